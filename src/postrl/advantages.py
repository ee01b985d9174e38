"""Advantages: raw rewards of units -> credit. [N] -> [N] over groups, or [N] -> [B, T] over time.

NaN is a missing reward: that unit leaves every statistic and gets 0. A group is *constant* iff max − min ≤ min_spread
(absolute); its units get exactly 0, whatever float rounding does to its mean. Group ids are arbitrary integers, groups
may be ragged and interleaved. Nothing here casts or moves devices.
"""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from postrl.batch import Batch, Kind, spread, unit_sum
from postrl.errors import UserError

MIN_SPREAD = 1e-6
Singleton = Literal["zero", "raw"]
Whiten = Literal["response", "token"] | None


def dense(group: Int[Tensor, "N"]) -> tuple[Int[Tensor, "N"], int]:
    """The same partition with small ids: (id of each unit, number of ids). Ids already small are kept as they are."""
    if group.numel() == 0:
        return group, 0
    low, high = torch.aminmax(group)
    if low >= 0 and high < 2 * group.numel():
        return group, int(high) + 1
    names, index = torch.unique(group, return_inverse=True)
    return index, len(names)


class Groups:
    """Sums, means and extremes over groups of the units whose `x` is present; each answer is given per unit.

    What is the same for a whole group is worked out once per group, [n], and handed out by `each`: passes over all
    units are what a million of them wait for.
    """

    def __init__(self, x: Float[Tensor, "N"], group: Int[Tensor, "N"]):
        self.x = x
        self.index, self.number = dense(group)
        missing = torch.isnan(x)
        self.missing = missing if bool(missing.any()) else None
        # Missing units are counted in a group of their own, the last, which nobody reads.
        self.place = self.index if self.missing is None else self.index.masked_fill(missing, self.number)
        self.sizes: Float[Tensor, "n"] = self.total(torch.ones_like(x))

    def total(self, y: Float[Tensor, "N"]) -> Float[Tensor, "n"]:
        """Sum of y over the present units of each group; what y is for the others does not matter."""
        return y.new_zeros(self.number + 1).index_add_(0, self.place, y)[:-1]

    def each(self, z: Shaped[Tensor, "n"]) -> Shaped[Tensor, "N"]:
        """Each unit's entry of what there is one of per group."""
        return z.index_select(0, self.index)

    def means(self) -> Float[Tensor, "n"]:
        return self.total(self.x) / self.sizes.clamp(min=1)

    def spreads(self) -> Float[Tensor, "n"]:
        """max − min of each group; −inf where nothing is present."""
        top = self.x.new_full((self.number + 1,), torch.inf)
        low = top.scatter_reduce(0, self.place, self.x, "amin")
        high = (-top).scatter_reduce(0, self.place, self.x, "amax")
        return (high - low)[:-1]

    @property
    def count(self) -> Float[Tensor, "N"]:
        return self.each(self.sizes)

    def sum(self, y: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
        return self.each(self.total(y))

    def mean(self) -> Float[Tensor, "N"]:
        return self.each(self.means())

    def spread(self) -> Float[Tensor, "N"]:
        return self.each(self.spreads())


def total_reward(
    batch: Batch, weights: Float[Tensor, "K"] | None = None, missing: Literal["exclude", "zero"] = "exclude"
) -> Float[Tensor, "N"]:
    """Σ_k w_k r_k of the components with a non-zero weight.

    missing="exclude": a unit that lacks one of them is missing (NaN). "zero" reproduces TRL: a missing component counts
    as 0, and a unit is missing only if it lacks all of them.
    """
    weights = batch.reward_weights if weights is None else weights
    rewards, weights = batch.rewards[:, weights != 0], weights[weights != 0]
    if missing == "exclude":
        return (rewards * weights).sum(1)
    lost = torch.isnan(rewards)
    known = torch.where(lost, torch.zeros_like(rewards), rewards * weights).sum(1)
    return torch.where(lost.all(1), torch.full_like(known, torch.nan), known)


def group_mean(x: Float[Tensor, "N"], group: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Each unit's group mean over the present x; NaN entries count for nothing, a group of them has mean 0."""
    return Groups(x, group).mean()


def centred(
    x: Float[Tensor, "N"],
    group: Int[Tensor, "N"],
    *,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
) -> Float[Tensor, "N"]:
    """A_i = x_i − mean of its group (Dr. GRPO, arXiv 2503.20783)."""
    groups = Groups(x, group)
    return _finish(groups, groups.x - groups.mean(), singleton, min_spread)


def zscored(
    x: Float[Tensor, "N"],
    group: Int[Tensor, "N"],
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
) -> Float[Tensor, "N"]:
    """A_i = (x_i − mean) / (std + eps) over its group (GRPO, arXiv 2402.03300).

    ddof=1 (Bessel), eps=1e-6 is verl's convention; TRL has eps=1e-4. singleton="raw" leaves a lone sample its raw
    reward, as verl does; "zero" gives it no credit, as TRL does.
    """
    groups = Groups(x, group)
    deviation = groups.x - groups.mean()
    variance = groups.total(deviation.square()) / (groups.sizes - ddof).clamp(min=1)
    return _finish(groups, deviation / groups.each(variance.sqrt() + eps), singleton, min_spread)


def leave_one_out(
    x: Float[Tensor, "N"],
    group: Int[Tensor, "N"],
    *,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
) -> Float[Tensor, "N"]:
    """A_i = x_i − mean of the others of its group = G/(G−1)·(x_i − mean) (RLOO, arXiv 2402.14740)."""
    groups = Groups(x, group)
    scale = groups.each(groups.sizes / (groups.sizes - 1).clamp(min=1))
    return _finish(groups, scale * (groups.x - groups.mean()), singleton, min_spread)


def _finish(groups: Groups, a: Tensor, singleton: Singleton, min_spread: float) -> Tensor:
    lone = groups.sizes == 1
    a = a.masked_fill(groups.each((groups.spreads() <= min_spread) | lone), 0.0)
    if singleton == "raw":
        a = torch.where(groups.each(lone), groups.x, a)
    return a if groups.missing is None else a.masked_fill(groups.missing, 0.0)


def credit_per_reward(
    batch: Batch,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
) -> Float[Tensor, "N _"]:
    """w_k·A^k, where A^k is `zscored` of the reward component k alone, for each k of non-zero weight (GDPO, arXiv
    2601.05242): a component counts by where it stands in its group, whatever the scale of the others.

    missing="exclude": a unit that lacks one of the components leaves the statistics of all. "zero": it leaves those of
    the component that it lacks, which gives it 0; it is missing only if it lacks all of them (TRL). The row of a
    missing unit is NaN.
    """
    used = batch.reward_weights != 0
    rewards, weights = batch.rewards[:, used], batch.reward_weights[used]
    lost = torch.isnan(rewards)
    gone = (lost.any(1) if missing == "exclude" else lost.all(1))[:, None]
    rewards = rewards.masked_fill(gone, torch.nan)
    credit = torch.zeros_like(rewards)
    for k, column in enumerate(rewards.unbind(1)):
        credit[:, k] = zscored(column, batch.group(), ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread)
    return (weights * credit).masked_fill(gone, torch.nan)


def unit_mean(x: Float[Tensor, "B T"], batch: Batch) -> Float[Tensor, "N"]:
    """Mean of x over each unit's sampled tokens; 0 for a unit without any."""
    return unit_sum(x, batch) / batch.lengths().clamp(min=1)


def whitened(x: Float[Tensor, "B T"], batch: Batch, eps: float = 1e-8, shift_mean: bool = True) -> Float[Tensor, "B T"]:
    """(x − mean) / √(var + eps) over all sampled tokens of the batch (Bessel's variance); long units weigh more.

    shift_mean=False takes the mean to be 0 instead, in the variance as well: signs stay, and |x| still has size 1.
    0 off the mask, and, with the mean, everywhere if fewer than two tokens were sampled.
    """
    number = batch.mask.sum()
    x = torch.where(batch.mask, x, torch.zeros_like(x))
    mean = x.sum() / number.clamp(min=1) if shift_mean else x.new_zeros(())
    deviation = torch.where(batch.mask, x - mean, torch.zeros_like(x))
    variance = deviation.square().sum() / (number - int(shift_mean)).clamp(min=1)
    return deviation * (variance + eps).clamp(min=torch.finfo(x.dtype).tiny).rsqrt()


def whitened_units(
    x: Float[Tensor, "N"], eps: float = 1e-4, shift_mean: bool = True, min_spread: float = MIN_SPREAD
) -> Float[Tensor, "N"]:
    """(x − mean) / (std + eps) over the present units of the batch (Bessel's deviation); each unit counts once.

    shift_mean=False as in `whitened`. Exactly 0 for missing units (NaN), and for all if none is further than min_spread
    from the mean: what is left then is rounding.
    """
    missing = torch.isnan(x)
    number = (~missing).sum()
    mean = x.masked_fill(missing, 0.0).sum() / number.clamp(min=1) if shift_mean else x.new_zeros(())
    deviation = (x - mean).masked_fill(missing, 0.0)
    variance = deviation.square().sum() / (number - int(shift_mean)).clamp(min=1)
    flat = (deviation.abs() <= min_spread).all()
    return (deviation / (variance.sqrt() + eps)).masked_fill(flat, 0.0)


def spread_whitened(
    a: Float[Tensor, "N"], batch: Batch, whiten: Whiten = "response", eps: float = 1e-4, shift_mean: bool = True
) -> Float[Tensor, "B T"]:
    """Credit of units (NaN = missing) -> each of their sampled tokens, whitened over the batch; 0 for missing units.

    whiten="response": each unit counts once, over std + eps. "token": each token counts once, over √(var + eps²). None:
    spread as it is.
    """
    if whiten == "token":
        present = batch.mask & ~torch.isnan(a)[batch.unit][:, None]
        return whitened(a[batch.unit][:, None].expand(present.shape), replace(batch, mask=present), eps**2, shift_mean)
    a = whitened_units(a, eps, shift_mean) if whiten == "response" else a.masked_fill(torch.isnan(a), 0.0)
    return spread(a, batch)


def discounted_returns(rewards: Float[Tensor, "B T"], batch: Batch, gamma: float = 1.0) -> Float[Tensor, "B T"]:
    """R_t = r_t + γ·R_u over a row's sampled tokens, u being the next one after t, whatever lies between.

    Observations (tool output between two turns) take no discount step and do not cut the return. Rewards off the mask
    are not read: put a reward that arrives with an observation on the sampled token before it. 0 off the mask.
    """
    rewards = torch.where(batch.mask, rewards, torch.zeros_like(rewards))
    returns, tail = torch.zeros_like(rewards), rewards[:, :0].sum(1)
    for t in reversed(range(rewards.shape[1])):
        here = batch.mask[:, t]
        tail = torch.where(here, rewards[:, t] + gamma * tail, tail)
        returns[:, t] = torch.where(here, tail, torch.zeros_like(tail))
    return returns


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    batch: Batch,
    gamma: float = 1.0,
    lam: float = 1.0,
    gap: Literal["carry", "zero"] = "carry",
) -> Float[Tensor, "B T"]:
    """A_t = δ_t + γλ·A_u, δ_t = r_t + γ·V_u − V_t (generalised advantage estimation, arXiv 1506.02438).

    gap="carry": u is the row's next sampled token, so observations are skipped (verl, AReaL). "zero": u = t + 1, and an
    observation is a step of value 0 that costs γ and λ (OpenRLHF, ROLL). Both bootstrap from 0 after the last sampled
    token, read neither rewards nor values off the mask, and give 0 there. Returns to fit a critic to are A + V.
    """
    zero = torch.zeros_like(rewards)
    rewards, values = torch.where(batch.mask, rewards, zero), torch.where(batch.mask, values, zero)
    advantages, tail, value = torch.zeros_like(rewards), zero[:, :0].sum(1), zero[:, :0].sum(1)
    for t in reversed(range(rewards.shape[1])):
        here = batch.mask[:, t] | (gap == "zero")
        tail = torch.where(here, rewards[:, t] + gamma * value - values[:, t] + gamma * lam * tail, tail)
        value = torch.where(here, values[:, t], value)
        advantages[:, t] = torch.where(batch.mask[:, t], tail, zero[:, t])
    return advantages


def spread_steps(batch: Batch) -> Float[Tensor, "B T"]:
    """Each sampled token gets `step_rewards` of its unit at its own segment: turn-level credit, still raw.

    0 where that reward is missing (NaN), where the world gave none for the segment, and off the mask. Segments count
    from 0 in every row, so the rows of a unit with several contexts read the same steps. Raises UserError if no unit
    has step rewards.
    """
    return over_steps(given_steps(batch), batch).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def given_steps(batch: Batch) -> Float[Tensor, "N S"]:
    """`step_rewards`. Raises UserError if no unit has any."""
    if batch.step_rewards is None:
        raise UserError("this batch has no step rewards: use an environment whose Step has a reward")
    return batch.step_rewards


def over_steps(x: Float[Tensor, "N S"], batch: Batch) -> Float[Tensor, "B T"]:
    """x of each step -> the sampled tokens of that segment of its unit; NaN for a segment beyond S, 0 off the mask."""
    known = torch.cat([x, x.new_full((batch.size, 1), torch.nan)], 1)
    last = known.shape[1] - 1
    step = torch.where(batch.segment >= 0, batch.segment, last).clamp(max=last)
    return torch.where(batch.mask, known[batch.unit[:, None], step.long()], x.new_zeros(()))


def truncated_importance(batch: Batch, cap: float) -> Float[Tensor, "B T"]:
    """min(π_train/π_sampler, cap) per token at the weights that sampled: the sampler's mismatch, to be put on A.

    1 off the mask and on units that are no rollouts: pairs and demonstrations had no sampler whose mismatch there could
    be, whatever stands in their `logp_sampler`. Truncation bounds the variance that rare tokens would add (cap > 0).
    """
    drawn = batch.mask & (batch.kind == Kind.ROLLOUT)[batch.unit][:, None]
    gap = torch.where(drawn, batch.logp_old - batch.logp_sampler, torch.zeros_like(batch.logp_old))
    return gap.exp().clamp(max=cap)
