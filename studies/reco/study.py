"""Does ReCo keep pass@64 where GRPO loses it, and does its weighting do it, not the mere spread of weights?"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from countdown import Countdown
from countdown import pretrain as expressions_shown
from torch import Tensor

from postrl.batch import Batch, unit_sum
from postrl.enrich import forward_all
from postrl.envs.grammar_audit import Auditor, covered
from postrl.envs.rewrite_grammar import audit
from postrl.method import Method
from postrl.papers.dapo import dapo
from postrl.papers.grpo import grpo
from postrl.papers.reco import reco, response_weight
from postrl.papers.rft import rft
from postrl.policies.decoder import Decoder
from postrl.probes.diversity import rarefied
from postrl.probes.passk import pass_at_k
from postrl.rollout import Rollout, collate
from postrl.source import OnPolicy
from postrl.study import (
    Arm,
    Base,
    Budget,
    Context,
    Contrast,
    Figures,
    Measured,
    Metric,
    Quick,
    Study,
    per_problem,
    scalar,
)
from postrl.study.rewriting import Pretraining, Words, pretrain, settings
from postrl.study.tiny import CHUNK, course, trained
from postrl.terms import entropy_bonus
from postrl.weights import sequence_mean

QUESTION = (
    "On words that the base solves sometimes, by one of many derivations: does ReCo keep pass@64 and the variety of "
    "right derivations where GRPO gives them up, at the same pass@1?"
)
HYPOTHESIS = (
    "Written before the first full run, after pilots of the base and of GRPO alone, on another seed. With four "
    "updates per rollout batch, ReCo's pass@64 is above GRPO's by 0.03 or more, and above that of ReCo with its "
    "weights permuted within the group; the permuted weights do no better than GRPO. Within a group the weights "
    "differ little (geometric means of 0.6 to 0.95 a token), so a small effect, or none, would not surprise. With one"
    " update per batch the token level changes nothing at all."
)
KS = (1, 4, 16, 64)
RIGHT = 8  # right answers of a problem, among which derivations are counted


@dataclass(frozen=True)
class Derivations:
    """The world of the core: words of the grammar, right where every step is allowed and the root is reached."""

    words: Words = field(default_factory=lambda: Words(Pretraining(chains=30_000, steps=1000), lengths=(4, 5)))
    tested: tuple[int, ...] = (5,)  # lengths

    def source(self, policy: Decoder, seed: int) -> OnPolicy:
        """Trained on the audited reward: a right root by invalid steps is none."""
        return self.words.source(policy, seed, audited=True)

    def answers(self, policy: Decoder, problems: int, samples: int, seed: int) -> list[list[Rollout]]:
        return self.words.answers(policy, self.tested, problems, samples, seed)

    def ways(self, rollouts: Sequence[Rollout]) -> list[Hashable | None]:
        """What tells each right answer from another; None for a wrong one."""
        auditor = Auditor(self.words.pretraining.grammar)
        traces = [audit(auditor, rollout, self.words.budget) for rollout in rollouts]
        return [trace.words if trace.valid else None for trace in traces]


World = Derivations | Countdown


@dataclass(frozen=True)
class Sizes:
    derivations: Derivations = field(default_factory=Derivations)
    countdown: Countdown = field(default_factory=Countdown)
    steps: int = 200
    updates: int = 4
    learning_rate: float = 2e-4
    problems: int = 48  # held out, per length
    samples: int = 96


# ---------------------------------------------------------------- methods


def permuted() -> Method:
    """The control: ReCo whose response weights go to other members of the group."""
    method = reco()

    def weight(batch: Batch) -> Tensor:
        weights = response_weight(batch)
        for group in batch.group().unique().tolist():
            members = (batch.group() == group).nonzero()[:, 0]
            order = np.random.default_rng([int(group), len(members)]).permutation(len(members))
            weights[members] = weights[members[torch.from_numpy(order)]]
        return sequence_mean(batch) * weights[batch.unit][:, None]

    policy = replace(method.terms[0], weight=weight)
    return replace(method, name="reco_permuted", terms=(policy,))


def dapo_here() -> Method:
    """DAPO without its penalty on length: the budget is the task's own. Nothing is refilled."""
    return dapo(correct="valid", penalty=0.0)


def with_entropy_bonus() -> Method:
    return grpo().plus(entropy_bonus(0.01), needs=frozenset({"entropy"}))


# ---------------------------------------------------------------- arms


def derivations(config: Sizes) -> World:
    return config.derivations


def countdown(config: Sizes) -> World:
    return config.countdown


def run(
    context: Context[Sizes],
    make: Callable[[], Method],
    updates: int | None = None,
    world: Callable[[Sizes], World] = derivations,
) -> Figures:
    """Train in a world, and measure there."""
    config = context.config
    policy = Decoder.load(context.base)
    how = settings(config.steps, updates or config.updates, config.learning_rate, context.seed)
    lines = trained(make(), policy, world(config).source(policy, context.seed), how, context.folder / "run")
    curves = tuple(course(lines, name, name) for name in ("reward", "entropy", "groups/constant"))
    return Figures(measure(context, policy, world(config)), curves)


def untrained(context: Context[Sizes], world: Callable[[Sizes], World] = derivations) -> Figures:
    return Figures(measure(context, Decoder.load(context.base), world(context.config)))


def measure(context: Context[Sizes], policy: Decoder, world: World) -> tuple[Measured, ...]:
    """Figures of answers to held-out problems, and how likely the base's own right answers still are."""
    config = context.config
    groups = world.answers(policy, config.problems, config.samples, context.seed)
    items = [group[0].item for group in groups]
    counts = [right_counts(world.ways(group)) for group in groups]  # of each way, per problem
    n, right = np.full(len(groups), config.samples), np.array([sum(count) for count in counts])
    wrong = [[1] * (config.samples - sum(count)) for count in counts]  # as if each were of a kind of its own
    drawn = [rarefied([*c, *w], 64) - 64 * len(w) / config.samples for c, w in zip(counts, wrong, strict=True)]
    varied = [rarefied(count, RIGHT) for count in counts if sum(count) >= RIGHT]
    return (
        *(per_problem(f"pass@{k}", items, pass_at_k(n, right, k).tolist()) for k in KS),
        per_problem("distinct@64", items, drawn),
        scalar("distinct_of_8", float(np.mean(varied)) if varied else np.nan),
        scalar("kept@1024", kept(context, policy, world)),
    )


def right_counts(ways: Sequence[Hashable | None]) -> list[int]:
    """How often each right way occurs."""
    return list(Counter(way for way in ways if way is not None).values())


def kept(context: Context[Sizes], policy: Decoder, world: World) -> float:
    """Share of the base's distinct right answers that the policy has among 1024 samples, by its probabilities."""
    config = context.config
    groups = world.answers(Decoder.load(context.base), config.problems, config.samples, context.seed)
    right = [r for group in groups for r, way in zip(group, world.ways(group), strict=True) if way is not None]
    distinct = list({(rollout.item, rollout.completion): rollout for rollout in right}.values())
    if not distinct:
        return float("nan")
    batch = collate(distinct)
    return covered(unit_sum(forward_all(policy, batch, CHUNK).logp, batch).double().numpy(), 1024)


WORDS = Base("chained", pretrain, options=lambda sizes: sizes.derivations.words.pretraining)
NUMBERS = Base("countdown", expressions_shown, options=lambda sizes: sizes.countdown)


def arm(name: str, make: Callable[[], Method], updates: int | None = None, exploratory: bool = True) -> Arm:
    return Arm(name, partial(run, make=make, updates=updates), (WORDS,), exploratory)


def elsewhere(name: str, make: Callable[[], Method]) -> Arm:
    return Arm(f"countdown-{name}", partial(run, make=make, world=countdown), (NUMBERS,), exploratory=True)


STUDY = Study(
    question=QUESTION,
    hypothesis=HYPOTHESIS,
    config=Sizes(),
    arms=(
        Arm("base", untrained, (WORDS,)),
        arm("grpo", grpo, exploratory=False),
        arm("reco", reco, exploratory=False),
        arm("permuted", permuted, exploratory=False),
        arm("reco-response", partial(reco, token_level=False)),
        arm("reco-token", partial(reco, response_level=False)),
        arm("reco-answers", partial(reco, typical="empirical")),
        arm("dapo", dapo_here),
        arm("grpo-entropy", with_entropy_bonus),
        arm("rft", partial(rft, "valid")),
        arm("grpo-one", grpo, updates=1),
        arm("reco-token-one", partial(reco, response_level=False), updates=1),
        Arm("countdown-base", partial(untrained, world=countdown), (NUMBERS,), exploratory=True),
        elsewhere("grpo", grpo),
        elsewhere("reco", reco),
        elsewhere("permuted", permuted),
        elsewhere("rft", partial(rft, "correct")),
    ),
    seeds=(1, 2, 3, 4, 5, 6),  # 0 was the pilots'
    metrics=(
        *(Metric(f"pass@{k}", f"share of held-out words solved by allowed steps in {k}") for k in KS),
        Metric("distinct@64", "different right derivations expected among 64 answers to a word"),
        Metric("distinct_of_8", "different derivations among 8 right answers, mean over words with so many"),
        Metric("kept@1024", "share of the base's right answers likely among 1024 of the policy, by its probabilities"),
    ),
    contrasts=(
        Contrast("reco", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("reco", "permuted", "pass@64", "higher", worth=0.03),
        Contrast("grpo", "base", "pass@64", "lower", worth=0.03),
    ),
    must_fail=(Contrast("permuted", "grpo", "pass@64", "higher", worth=0.03),),
    papers=("reco",),
    exploratory_seeds=(1, 2, 3),
    budget=Budget(minutes=80, run_minutes=60),
    quick=Quick(
        Sizes(
            Derivations(
                Words(
                    Pretraining(symbols=8, hidden=64, layers=2, chains=6000, steps=250, batch=32, learning_rate=3e-3),
                    lengths=(3, 4),
                    per_length=200,
                    groups=8,
                    group_size=8,
                ),
                tested=(3, 4),
            ),
            Countdown(problems=200, shown=4000, hidden=64, layers=2, steps=200, batch=32, groups=8, group_size=8),
            steps=30,
            learning_rate=5e-4,
            problems=12,
            samples=64,
        )
    ),
    exploratory=(
        Contrast("reco-response", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("reco-token", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("reco-answers", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("dapo", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("grpo-entropy", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("rft", "grpo", "pass@64", "higher", worth=0.03),
        Contrast("reco-token-one", "grpo-one", "pass@64", "higher", worth=0.03),
        Contrast("countdown-grpo", "countdown-base", "pass@64", "lower", worth=0.03),
        Contrast("countdown-reco", "countdown-grpo", "pass@64", "higher", worth=0.03),
        Contrast("countdown-permuted", "countdown-grpo", "pass@64", "higher", worth=0.03),
        Contrast("countdown-rft", "countdown-grpo", "pass@64", "higher", worth=0.03),
    ),
)
