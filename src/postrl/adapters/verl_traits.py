"""What the verl adapter must know of a method, found by trying it on a small batch: no list of names to keep.

verl asks twice: once for advantages on a whole rollout batch, and then, per micro-batch, for a loss. Only counts of the
whole update reach the second call, so the method's weights have to travel inside the advantages.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from postrl.batch import Batch, Stop
from postrl.errors import UserError
from postrl.method import Forward, Method
from postrl.weights import sequence_sum, token_mean

Base = Literal["tokens", "answers"]
BASES = {"tokens": token_mean, "answers": sequence_sum}  # the two counts that verl hands to a loss
SIZES, LENGTH = (4, 3, 5), 6


@dataclass(frozen=True)
class Traits:
    """proportional: l(c·A) = c·l(A) for c > 0. base: the count of an update that is all a weight depends on besides its
    rollout batch; None if it depends on more. alone: which siblings an update holds changes no weight but for a factor
    common to all. plain: A, W and `keep` read nothing of an answer but its total reward and the number of its tokens.
    """

    proportional: bool
    base: Base | None
    alone: bool
    plain: bool


def traits(method: Method) -> Traits:
    """For methods of one term whose loss reads log-probabilities only; `verl.support` refuses others before."""
    batch = probe()
    whole = torch.arange(batch.size) < sum(SIZES[:2])  # two groups of three
    cut = torch.arange(batch.size) % 3 > 0
    bases: list[Base] = ["tokens", "answers"]
    found: Base | None = next((base for base in bases if _scales(method, batch, whole, base)), None)
    return Traits(_proportional(method, batch), found, _keeps_its_shape(method, batch, cut), _plain(method, batch))


def probe() -> Batch:
    """Twelve answers in three groups, with everything an answer can have."""
    units = sum(SIZES)
    generator = torch.Generator().manual_seed(0)
    column = torch.arange(LENGTH)
    length = 2 + torch.arange(units) ** 2 * 3 % 7 % (LENGTH - 1)
    mask = column < length[:, None]
    logp = torch.where(mask, -0.05 - 2 * torch.rand(units, LENGTH, generator=generator, dtype=torch.float64), 0)
    segment = torch.where(mask, (column >= 2).long().expand(units, -1), -1)
    task = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    correct = torch.where(task == 1, 1, torch.arange(units) * 3 % 7 % 2)
    form = torch.arange(units) * 5 % 4 / 4
    steps = torch.rand(units, 2, generator=generator, dtype=torch.float64)
    steps[1, 0] = torch.nan
    return Batch(
        tokens=torch.zeros_like(segment),
        valid=mask,
        mask=mask,
        segment=segment.to(torch.int32),
        prefix_id=torch.arange(units),
        prefix_length=torch.zeros_like(task),
        temperature=torch.ones(units, dtype=torch.float64),
        logp_sampler=logp,
        logp_old=logp,
        unit=torch.arange(units),
        groups=torch.stack([task, torch.arange(units) % 2], 1),
        group_names=("task", "answer"),
        rewards=torch.stack([correct.double(), form.double()], 1),
        reward_weights=torch.tensor([1.0, 0.5], dtype=torch.float64),
        reward_names=("correct", "form"),
        kind=torch.zeros(units, dtype=torch.int8),
        version=torch.zeros_like(task),
        stop=torch.where(torch.arange(units) % 4 == 1, int(Stop.TRUNCATED), int(Stop.FINISHED)).to(torch.int8),
        step_rewards=torch.where(length[:, None] > torch.tensor([0, 2]), steps, torch.nan),
        step_groups=torch.where(length[:, None] > torch.tensor([0, 2]), torch.tensor([0, 1]), -1),
    )


def kept(method: Method, batch: Batch) -> Bool[Tensor, "N"]:
    """Units that `keep` leaves in; all of them without one."""
    everything = torch.ones(batch.size, dtype=torch.bool, device=batch.unit.device)
    return everything if method.keep is None else method.keep(batch)


def _scales(method: Method, batch: Batch, part: Bool[Tensor, "N"], base: Base) -> bool:
    """Whether the weights of a part are those of the whole, but for the count."""
    [term] = method.terms
    some = batch.select(part)
    whole = term.weight(batch)[part] / _count(batch, base)
    return torch.allclose(whole * _count(some, base), term.weight(some), rtol=1e-9, atol=0)


def _keeps_its_shape(method: Method, batch: Batch, part: Bool[Tensor, "N"]) -> bool:
    """Whether the weights of a part are those of the whole, but for a factor."""
    [term] = method.terms
    some, whole = term.weight(batch.select(part)), term.weight(batch)[part]
    return torch.allclose(some * whole.sum(), whole * some.sum(), rtol=1e-9, atol=0)


def _count(batch: Batch, base: Base) -> float:
    """1 / tokens, or 1 / answers."""
    return float(BASES[base](batch).max())


def _proportional(method: Method, batch: Batch) -> bool:
    logp = torch.where(batch.mask, batch.logp_old + torch.linspace(-1, 1, batch.size)[:, None], 0)
    if method.observe is not None:
        batch = replace(batch, observed=method.observe(batch, logp))
    sign = torch.where(torch.arange(batch.size) % 2 == 0, 1.0, -1.0).double()
    advantage = torch.where(batch.mask, sign[:, None] * (1 + torch.arange(LENGTH)), 0)
    once, twice = (_loss(method, batch, logp, c * advantage) for c in (1.0, 4.0))
    return all(torch.allclose(4 * a, b, rtol=1e-9, atol=1e-12) for a, b in zip(once, twice, strict=True))


def _loss(method: Method, batch: Batch, logp: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Token losses and their gradient."""
    leaf = logp.clone().requires_grad_()
    loss = method.terms[0].loss(batch, advantage, Forward(leaf))
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


def _plain(method: Method, batch: Batch) -> bool:
    """By comparison with a batch that knows no more than what verl hands to any estimator."""
    if method.needs & {"step_rewards", "step_groups", "logp_old"}:
        return False
    bare = replace(
        batch,
        rewards=(batch.rewards * batch.reward_weights).sum(1, keepdim=True),
        reward_weights=batch.reward_weights[:1],
        reward_names=("reward",),
        stop=torch.full_like(batch.stop, int(Stop.FINISHED)),
        groups=batch.groups[:, :1],
        group_names=batch.group_names[:1],
        logp_old=torch.where(batch.mask, -1.0, 0.0).double(),
        step_rewards=None,
        step_groups=None,
    )
    try:
        found = _credit(method, bare)
    except UserError:  # it asks for a reward or a grouping by name
        return False
    pairs = zip(_credit(method, batch), found, strict=True)
    return all(bool(torch.allclose(a, b, rtol=1e-6, atol=1e-9)) for a, b in pairs)


def _credit(method: Method, batch: Batch) -> tuple[Float[Tensor, "N"], Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    [term] = method.terms
    return kept(method, batch).double(), method.advantage(batch), term.weight(batch)
