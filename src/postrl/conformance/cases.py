"""The same answers for every trainer: prompts, completions with gaps, two rewards some of which are missing, and a tiny
model on disk. And one run of our loop's `update` over them, mini-batch by mini-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from postrl.batch import Batch, Stop
from postrl.enrich import forward_all, reference_logp
from postrl.method import Method
from postrl.optimise import Seen, Trainer, update
from postrl.policies.hf import HuggingFacePolicy
from postrl.rollout import Rollout, Turn, collate
from postrl.settings import Settings

GROUPS, SIZE, VOCABULARY, EOS = 4, 4, 259, 257


@dataclass(frozen=True)
class Answer:
    """One completion: its tokens, which of them the policy wrote (1) or a tool (0), the sampler's log-probabilities."""

    tokens: list[int]
    sampled: list[int]
    logp: list[float]
    rewards: dict[str, float | None]
    steps: list[float]

    @property
    def turns(self) -> list[Turn]:
        """Runs of tokens of one writer."""
        ends = [t for t in range(1, len(self.tokens)) if self.sampled[t] != self.sampled[t - 1]]
        pieces = zip([0, *ends], [*ends, len(self.tokens)], strict=True)
        return [
            Turn(self.tokens[a:b], bool(self.sampled[a]), logp=self.logp[a:b] if self.sampled[a] else [])
            for a, b in pieces
        ]


@dataclass(frozen=True)
class Case:
    """GROUPS prompts with SIZE answers each, group by group."""

    prompts: list[list[int]]
    answers: list[Answer]

    def rollouts(self) -> list[Rollout]:
        return [
            Rollout(
                f"item{unit // SIZE}",
                unit // SIZE,
                unit % SIZE,
                [[Turn(self.prompts[unit // SIZE], False), *answer.turns]],
                rewards=answer.rewards,
                reward_weights={"correct": 1.0, "form": 0.5},
                step_rewards=answer.steps,
                groups={"answer": answer.tokens[0] % 3},
                stop=Stop.FINISHED if answer.tokens[-1] == EOS else Stop.TRUNCATED,
            )
            for unit, answer in enumerate(self.answers)
        ]


def make_case(seed: int, missing: float = 0.2, gaps: bool = True) -> Case:
    """Ragged prompts and answers; with gaps, some answers hold tool output. One group has equal rewards."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, VOCABULARY - 3, rng.integers(2, 6)).tolist() for _ in range(GROUPS)]
    answers = []
    for unit in range(GROUPS * SIZE):
        length = int(rng.integers(1, 11))
        sampled = [1] * length
        if gaps and length > 4 and rng.random() < 0.7:
            sampled[2:4] = [0, 0]
        turns = 1 + sum(sampled[t] > sampled[t - 1] for t in range(1, length))
        form = None if rng.random() < missing else float(rng.integers(0, 5)) / 4
        correct = 1.0 if unit // SIZE == 1 else float(rng.integers(0, 2))
        if unit // SIZE == 1:
            form = 0.5
        elif rng.random() < missing / 3:
            correct = None
        tokens, logp = rng.integers(1, VOCABULARY - 3, length).tolist(), (-rng.exponential(2.0, length)).tolist()
        if rng.random() < 0.6:
            tokens[-1] = EOS
        steps = (rng.integers(0, 5, turns) / 4).tolist()
        answers.append(Answer(tokens, sampled, logp, {"correct": correct, "form": form}, steps))
    return Case(prompts, answers)


def stopping(case: Case, longest: int) -> Case:
    """The same, but answers end with the end token unless they are as long as allowed."""
    last = [EOS if len(a.tokens) < longest else 1 for a in case.answers]
    ended = [replace(a, tokens=[*a.tokens[:-1], end]) for a, end in zip(case.answers, last, strict=True)]
    return Case(case.prompts, ended)


class Disagreement(AssertionError):
    """Two trainers gave different numbers for the same answers."""


@dataclass(frozen=True)
class Done:
    """One update: its loss and the gradient of every parameter, by name."""

    loss: float
    gradient: dict[str, Tensor]


def our_updates(
    method: Method,
    folder: Path,
    case: Case,
    minis: Sequence[Sequence[int]],
    weights: Sequence[dict[str, Tensor]],
) -> list[Done]:
    """Our loop's updates on mini-batches given as units, each at given weights and cut into micro-batches.

    Log-probabilities of the reference, and of the policy that sampled, are those of the model in `folder`.
    """
    policy = HuggingFacePolicy.load(folder)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    settings = Settings(token_budget=40, max_gradient_norm=float("inf"), importance_cap=None)
    batch = collate(case.rollouts())
    batch = replace(batch, logp_old=forward_all(policy, batch, 10**6).logp)
    if "logp_ref" in method.needs:
        batch = reference_logp(policy, batch, 10**6)
    keep = torch.ones(batch.size, dtype=torch.bool) if method.keep is None else method.keep(batch)
    advantage = torch.zeros(batch.mask.shape)
    if keep.any():
        advantage[keep] = method.advantage(batch.select(keep)).float()
    trainer = Trainer(method, policy, optimizer, Accelerator(), settings, free_old=False)
    updates = []
    for units, now in zip(minis, weights, strict=True):
        policy.model.load_state_dict(now, strict=False)  # tied or derived entries are not parameters
        chosen = torch.zeros(batch.size, dtype=torch.bool).index_fill(0, torch.tensor(units), True) & keep
        loss = _update(trainer, batch, chosen, advantage)
        named = policy.model.named_parameters()
        updates.append(Done(loss, {name: p.grad.clone() for name, p in named if p.grad is not None}))
    return updates


def _update(trainer: Trainer, batch: Batch, chosen: Tensor, advantage: Tensor) -> float:
    """Leaves the gradient in the parameters and returns the loss."""
    rows = chosen.nonzero().squeeze(1)
    seen = Seen(torch.ones_like(batch.logp_old), torch.ones_like(batch.logp_old), torch.ones_like(batch.logp_old))
    for parameter in trainer.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if len(rows):
        update(trainer, batch.select(chosen), rows, advantage[rows], 0.0, seen)
    return sum(seen.losses)


def near(got: dict[str, Tensor], wanted: dict[str, Tensor], bound: float = 1e-5) -> float:
    """The largest difference of a tensor, in units of its largest entry. Raises Disagreement beyond `bound`."""
    if got.keys() != wanted.keys():
        raise Disagreement(f"gradient of other parameters: {sorted(set(got) ^ set(wanted))}")
    worst = 0.0
    for name, tensor in wanted.items():
        top = float(tensor.abs().max())
        gap = float((got[name] - tensor).abs().max())
        if not (gap <= bound * top or gap == 0):
            raise Disagreement(f"gradient of {name} differs by {gap:.3g}; its largest entry is {top:.3g}")
        worst = max(worst, gap / top if top else 0.0)
    return worst


def agree(updates: Sequence[Done], ours: Sequence[Done], loss_bound: float = 1e-5) -> float:
    """The largest relative difference of a gradient, see `near`. Raises Disagreement, also where losses differ, and
    where fewer than two updates move anything: then there was nothing to compare."""
    if len(updates) != len(ours):
        raise Disagreement(f"{len(updates)} updates against {len(ours)}")
    if sum(any(bool(g.any()) for g in done.gradient.values()) for done in ours) < 2:
        raise Disagreement("fewer than two updates have a gradient")
    worst = 0.0
    for got, right in zip(updates, ours, strict=True):
        worst = max(worst, near(got.gradient, right.gradient))
        if not abs(got.loss - right.loss) <= max(loss_bound * abs(right.loss), 2e-6):
            raise Disagreement(f"loss {got.loss:.7g} against {right.loss:.7g}")
    return worst
