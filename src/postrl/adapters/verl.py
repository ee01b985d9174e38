"""Any method of the shelf inside verl, by name: `algorithm.adv_estimator=postrl_reco` and
`actor_rollout_ref.actor.policy_loss.loss_mode=postrl_reco`.

verl loads `verl_entry` through the entry point `verl.plugins` in each of its processes. This module imports no verl and
says what verl can do with a method. `docs/verl.md` says how to use it.
"""

import functools

from postrl.adapters.support import Full, Refused, Support, Variant
from postrl.adapters.verl_traits import traits
from postrl.method import Method
from postrl.papers import method as build
from postrl.papers import methods

TESTED = "0.9"
PREFIX = "postrl_"
OWN_TRAINER = "trainer.v1.trainer_mode=postrl_sync"
CRITIC = ("values", "returns")
UNSEEN = ("entropy", "logits", "hidden", "logp_ref", "teacher_logp")  # what verl does not hand to a policy loss


def support(method: Method) -> Support:
    """What verl can do with a method."""
    if critic := sorted(method.needs & set(CRITIC)):
        return Refused(
            f"it trains a critic in the policy's own pass ({critic[0]}); verl's critic goes with its own gae"
        )
    if method.atom == "group":
        return Refused("its loss compares the answers of a group, and verl's micro-batches cut groups")
    if parts := sorted(method.needs & set(UNSEEN)):
        return Refused(f"it needs {parts[0]}, which verl does not hand to a policy loss")
    if len(method.terms) != 1:
        others = ", ".join(term.name for term in method.terms[1:])
        return Refused(
            f"of its terms verl carries the first alone, not {others}: use verl's use_kl_loss, entropy_coeff"
        )
    known = traits(method)
    if not known.proportional:
        return Refused("its loss is not proportional to the advantage, in which its weights would have to travel")
    if method.observe is not None or "split" in method.exempt:
        return Variant(
            "micro-batch statistics", "what it observes of a whole update, a pass observes of its micro-batch"
        )
    if method.keep is not None:
        return Variant(
            "refill=0", "units that `keep` leaves out are dropped; only algorithm.filter_groups samples more"
        )
    notes = [] if known.plain and known.base else [OWN_TRAINER]
    if "step_rewards" in method.needs:
        notes.append("data.step_rewards named in POSTRL_VERL")
    return Full(", ".join(notes))


@functools.cache
def matrix() -> dict[str, Support]:
    """`support` of every method of the shelf with its defaults, by name."""
    return {name: support(build(name)) for name in sorted(methods())}
