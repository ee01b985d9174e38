"""RFT: sample, keep what is right, imitate it: the baseline without push-down that RL is held to."""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from postrl.advantages import MIN_SPREAD, total_reward
from postrl.batch import Batch, Kind, spread
from postrl.errors import UserError
from postrl.files import as_fields
from postrl.losses import reinforce as score_function
from postrl.method import Forward, Method, Paper, Term
from postrl.rollout import Rollout, Source, from_json

PAPER = Paper(
    title="Scaling Relationship on Learning Mathematical Reasoning with Large Language Models",
    arxiv="2308.01825",
    status="textbook form; iterated as in STaR (2203.14465) and ReST-EM (2312.06585); no released code compared",
)


def rft(correct: str | None = None, threshold: float = 1.0) -> Method:
    """Likelihood of the successes, and nothing else: failures are not pushed down.

        A_i = 1 if r_i ≥ threshold, else 0;   W_{i,t} = 1/#successes for their tokens;   l = −A · log π
        so that the gradient of an update is −Σ_i r_i ∇log π(o_i|q) / Σ_i r_i

    Yuan et al., arXiv 2308.01825. On fresh rollouts this is on-policy RFT: REINFORCE with rewards 0 and 1, without a
    baseline and divided by the number of successes. On `demonstrations` in a data set it is offline RFT, and on the
    source `Iterated` the iterated form; a demonstration is a success whatever its rewards.

    correct: the raw reward component that tells success; None for the total reward. threshold: the least value that is
        one. A missing reward is no success.

    Raises UserError, when it meets a batch, for a component that the batch has not.
    """

    def advantage(batch: Batch) -> Tensor:
        return spread(successes(batch, correct, threshold).to(batch.logp_old.dtype), batch)

    def weight(batch: Batch) -> Tensor:
        chosen = successes(batch, correct, threshold) & (batch.lengths() > 0)
        return spread(chosen.to(batch.logp_old.dtype) / chosen.sum().clamp(min=1), batch)

    def total(batch: Batch) -> float:
        lengths = batch.lengths()
        chosen = successes(batch, correct, threshold) & (lengths > 0)
        return float(lengths[chosen].sum() / chosen.sum().clamp(min=1))

    def figures(batch: Batch, logp: Tensor) -> dict[str, float]:
        return {"successes": float(successes(batch, correct, threshold).sum())}

    exempt = {"reward shift": "RFT has no baseline: a success is one by its own reward"}
    return Method("rft", advantage, (Term("policy", loss, weight, total=total),), figures=figures, exempt=exempt)


def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
    """−A · log π [b, t]."""
    return score_function(batch.mask, forward.logp, advantage)


def successes(batch: Batch, correct: str | None = None, threshold: float = 1.0) -> Bool[Tensor, "N"]:
    """Units that reach the threshold, and demonstrations, which need no reward: a data set of them has no components.

    Raises UserError if there are sampled units and the batch has no component `correct`.
    """
    shown = batch.kind == Kind.DEMONSTRATION
    if bool(shown.all()):
        return shown
    if correct is not None and correct not in batch.reward_names:
        there = ", ".join(batch.reward_names) or "none"
        raise UserError(f"rft: no reward component {correct!r}; set `correct` to one of: {there}, or None")
    reward = total_reward(batch) if correct is None else batch.reward(correct)
    return (reward >= threshold - MIN_SPREAD) | shown


def demonstrations(
    rollouts: Sequence[Rollout],
    correct: str | None = None,
    threshold: float = 1.0,
    trace: Callable[[Rollout], Hashable] | None = None,
    most: int | None = None,
) -> list[Rollout]:
    """The successes among sampled rollouts as demonstrations, one for each distinct trace of a problem.

    trace: what makes two successes of a problem the same, for example the list of equations; by default their sampled
    tokens. most: demonstrations kept of a problem, the first sampled ones; None for all. Each is a group of its own, so
    a data set's `per_step` counts demonstrations. They carry no rewards. Raises UserError for a `most` below 1 or a
    component that a rollout has not.
    """
    if most is not None and most < 1:
        raise UserError(f"rft: most is {most}; keep at least 1 demonstration of a problem, or None for all")
    seen: dict[str, set[Hashable]] = {}
    kept = []
    for rollout in rollouts:
        traces = seen.setdefault(rollout.item, set())
        if not _solved(rollout, correct, threshold) or not rollout.sampled_tokens() or len(traces) == most:
            continue
        name = _tokens(rollout) if trace is None else trace(rollout)
        if name not in traces:
            traces.add(name)
            plain = replace(rollout, kind=Kind.DEMONSTRATION, group=len(kept), rewards={}, reward_weights={})
            kept.append(replace(plain, step_rewards=[]))
    return kept


def _solved(rollout: Rollout, correct: str | None, threshold: float) -> bool:
    if correct is not None and correct not in rollout.rewards:
        there = ", ".join(rollout.rewards) or "none"
        raise UserError(f"rft: item {rollout.item!r} has no reward {correct!r}; set `correct` to one of: {there}")
    weights = {n: rollout.reward_weights.get(n, 1.0) for n in rollout.rewards} if correct is None else {correct: 1.0}
    parts = [(rollout.rewards[name], weight) for name, weight in weights.items() if weight]
    if any(reward is None for reward, _ in parts):
        return False
    return sum(weight * reward for reward, weight in parts if reward is not None) >= threshold - MIN_SPREAD


def _tokens(rollout: Rollout) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(turn.tokens) for turns in rollout.contexts for turn in turns if turn.sampled)


class Iterated:
    """Iterated RFT as a source: every `every` steps sample anew from the present policy and imitate those successes.

    source: on-policy collection. draws: how often it is asked per round. per_step: demonstrations per step, in shuffled
    epochs over the round's. choose: rollouts -> demonstrations, such as `demonstrations` with its options bound.
    `Iterated` goes on from the present weights, as one run; ReST-EM starts each round from the first ones again.

    Raises UserError for numbers below 1, and when a round has no success to imitate.
    """

    def __init__(
        self,
        source: Source,
        every: int,
        draws: int,
        per_step: int,
        seed: int = 0,
        choose: Callable[[Sequence[Rollout]], list[Rollout]] = demonstrations,
    ) -> None:
        for name, value in (("every", every), ("draws", draws), ("per_step", per_step)):
            if value < 1:
                raise UserError(f"rft: {name} is {value}; it must be at least 1")
        self.source, self.every, self.draws, self.per_step, self.seed = source, every, draws, per_step, seed
        self.choose = choose
        self.round, self.served, self.position = -1, 0, 0
        self.kept: list[Rollout] = []
        self._stored = "[]"  # as text, because the loop copies the state at every step

    def __call__(self, step: int) -> list[Rollout]:
        """The step's demonstrations; group numbers are never used again."""
        if step // self.every != self.round:
            self._refresh(step)
        chosen = [self.kept[self._index(self.position + k)] for k in range(self.per_step)]
        first, self.position, self.served = self.served, self.position + self.per_step, self.served + self.per_step
        return [replace(rollout, group=first + k) for k, rollout in enumerate(chosen)]

    def _refresh(self, step: int) -> None:
        sampled = [rollout for _ in range(self.draws) for rollout in self.source(step)]
        kept = self.choose(sampled)
        if not kept:
            raise UserError(
                f"rft: none of the {len(sampled)} answers sampled in step {step + 1} is a success, so there is nothing "
                "to imitate: choose easier problems, raise draws or lower the threshold"
            )
        self.kept, self.round, self.position = kept, step // self.every, 0
        self._stored = json.dumps(list(kept), default=as_fields)

    def _index(self, number: int) -> int:
        epoch, place = divmod(number, len(self.kept))
        return int(np.random.default_rng([self.seed, self.round, epoch]).permutation(len(self.kept))[place])

    def state_dict(self) -> dict[str, object]:
        place = {"round": self.round, "served": self.served, "position": self.position}
        return {**place, "kept": self._stored, "source": self.source.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raises UserError for a damaged state, and what the inner source raises for another run's."""
        inner = state.get("source")
        try:
            self.round, self.served, self.position = (int(str(state[n])) for n in ("round", "served", "position"))
            self._stored = str(state["kept"])
            self.kept = [from_json(fields) for fields in json.loads(self._stored)]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"the checkpoint's demonstrations are damaged ({error!r}); resume another one") from error
        if not isinstance(inner, Mapping):
            raise UserError("the checkpoint has no state of the source that RFT samples from; resume another one")
        self.source.load_state_dict(inner)
