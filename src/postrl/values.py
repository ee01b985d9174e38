"""What a critic's numbers mean: rewards along tokens, λ-returns, regression on them, explained variance.

A critic is a module that maps a batch to values [B, T]: column t is the value of the state *before* token t, at sampled
tokens, 0 elsewhere. To a critic every row is an episode of its own: each row of a unit ends with the unit's reward.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from postrl.advantages import gae, total_reward
from postrl.batch import Batch
from postrl.enrich import mode
from postrl.errors import UserError
from postrl.packing import micro_batches
from postrl.ranks import here

Critic = Callable[[Batch], Tensor]
Missing = Literal["exclude", "zero"]
Gap = Literal["carry", "zero"]


def known(batch: Batch, missing: Missing = "exclude") -> Bool[Tensor, "B T"]:
    """Sampled tokens of units whose reward is there: only these can teach a critic anything."""
    return batch.mask & ~torch.isnan(total_reward(batch, missing=missing))[batch.unit][:, None]


def token_rewards(batch: Batch, gamma: float = 1.0, missing: Missing = "exclude") -> Float[Tensor, "B T"]:
    """The unit's reward on the last sampled token of each of its rows, plus γ·`value_after`; a missing reward is 0."""
    reward = total_reward(batch, missing=missing).nan_to_num(nan=0.0)[batch.unit]
    if batch.value_after is not None:
        reward = reward + gamma * batch.value_after
    last = batch.mask & (batch.mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, reward[:, None], torch.zeros_like(batch.logp_old[:1]))


def lambda_returns(
    batch: Batch, gamma: float = 1.0, lam: float = 1.0, gap: Gap = "carry", missing: Missing = "exclude"
) -> Float[Tensor, "B T"]:
    """R_t = A_t + V_t with GAE's A: what a critic is fitted to. λ = 1 is the discounted return, whatever V is; a lower
    λ leans on the values, which makes it calmer and, where they are wrong, wrong. 0 off the mask."""
    values = given_values(batch)
    advantage = gae(token_rewards(batch, gamma, missing), values, batch, gamma, lam, gap)
    return advantage + torch.where(batch.mask, values, torch.zeros_like(values))


def given_values(batch: Batch) -> Float[Tensor, "B T"]:
    """`values`. Raises UserError if no critic has filled them."""
    if batch.values is None:
        raise UserError("this batch has no values: give `train` an ActorCritic and the enricher `Values` of its critic")
    return batch.values


def with_values(critic: Critic, batch: Batch, token_budget: int) -> Batch:
    """The batch with `values` by a no-grad pass of the critic in eval mode; each process runs its share."""
    values, ranks = torch.zeros_like(batch.logp_old), here()
    with torch.no_grad(), mode(critic, False):  # pyright: ignore[reportArgumentType]
        for micro in ranks.passes(batch, token_budget) if len(batch.unit) else ():
            part = critic(batch.rows(micro.rows)).to(values.dtype)
            if micro.counts:
                values[micro.rows] = part
    return replace(batch, values=ranks.total(values))


def with_value_after(critic: Critic, batch: Batch, cut: Bool[Tensor, "N"], token_budget: int) -> Batch:
    """The batch with `value_after`: V of the state after each row's last sampled token for the units in `cut`, else 0.

    The critic is asked for the value before one more token, whichever that is: it never reads it.
    """
    value_after = torch.zeros_like(batch.temperature, dtype=batch.logp_old.dtype)
    rows = (cut[batch.unit] & batch.mask.any(1)).nonzero().squeeze(1)
    if len(rows):
        longer = with_values(critic, _one_more(batch.rows(rows)), token_budget)
        value_after[rows] = given_values(longer).sum(1)
    return replace(batch, value_after=value_after)


def _one_more(batch: Batch) -> Batch:
    """Rows cut after their last sampled token, and after it one token that is the only sampled one."""
    width = batch.mask.shape[1]
    end = width - batch.mask.flip(1).long().argmax(1)
    column = torch.arange(width + 1, device=end.device)
    wide = {
        name: torch.cat([value, torch.zeros_like(value[:, :1])], 1)
        for name, value in (
            ("tokens", batch.tokens),
            ("logp_sampler", batch.logp_sampler),
            ("logp_old", batch.logp_old),
        )
    }
    return replace(
        batch,
        **wide,
        valid=column <= end[:, None],
        mask=column == end[:, None],
        segment=(column == end[:, None]).to(batch.segment.dtype) - 1,
        **dict.fromkeys(("logp_ref", "values", "returns", "observed", "teacher_logp")),
    )


def regress(
    critic: torch.nn.Module,
    batch: Batch,
    *,
    steps: int,
    learning_rate: float = 1e-3,
    units: int = 64,
    gamma: float = 1.0,
    lam: float = 1.0,
    gap: Gap = "carry",
    missing: Missing = "exclude",
    token_budget: int = 4096,
    seed: int = 0,
) -> list[float]:
    """Fit the critic, in place, to λ-returns of given rollouts: min Σ (V − R)² by AdamW. Returns each step's error.

    A step takes the next `units` units of a shuffled epoch. With λ < 1 the returns are those of the critic at the start
    of each epoch. Units without a reward teach nothing. Raises UserError if no unit has one, or for options that cannot
    be right.
    """
    _check(steps=steps, units=units, learning_rate=learning_rate)
    if not bool(known(batch, missing).any()):
        raise UserError("no rollout has a reward and sampled tokens: there is nothing to fit a critic to")
    optimizer = torch.optim.AdamW([p for p in critic.parameters() if p.requires_grad], learning_rate, weight_decay=0.0)
    cuts = -(-batch.size // units)
    order, targets, errors = np.arange(batch.size), batch.logp_old, []
    for step in range(steps):
        epoch, number = divmod(step, cuts)
        if number == 0:
            order = np.random.default_rng([seed, epoch]).permutation(batch.size)
            targets = lambda_returns(with_values(critic, batch, token_budget), gamma, lam, gap, missing)
        keep = torch.zeros(batch.size, dtype=torch.bool)
        keep[torch.from_numpy(order[number * units : (number + 1) * units])] = True
        keep = keep.to(batch.unit.device)
        part, wanted = batch.select(keep), targets[keep[batch.unit]]
        errors.append(_fit(critic, optimizer, part, wanted, known(part, missing), token_budget))
    return errors


def _fit(
    critic: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    wanted: Float[Tensor, "B T"],
    use: Bool[Tensor, "B T"],
    token_budget: int,
) -> float:
    """One step towards `wanted` on the tokens to `use`; the mean squared error before it, NaN if there are none."""
    if not bool(use.any()):
        return float("nan")
    optimizer.zero_grad()
    total = 0.0
    with mode(critic, True):  # pyright: ignore[reportArgumentType]
        for index in micro_batches(batch, token_budget):
            error = torch.where(use[index], critic(batch.rows(index)) - wanted[index], 0.0)
            loss = error.square().sum() / use.sum()
            loss.backward()
            total += float(loss.detach())
    optimizer.step()
    return total


def explained_variance(batch: Batch, gamma: float = 1.0, gap: Gap = "carry", missing: Missing = "exclude") -> float:
    """1 − Var(R − V) / Var(R) over sampled tokens, R being discounted returns: 1 for an exact critic, 0 for a constant.

    Below 0 the critic is worse than none. It does not see a constant error. Where states lead to random rewards even
    the exact critic stays below 1. NaN if the returns do not vary.
    """
    at = known(batch, missing)
    returns = lambda_returns(batch, gamma, 1.0, gap, missing)[at].double()
    if len(returns) < 2 or float(returns.var()) < 1e-12:
        return float("nan")
    return 1 - float((returns - given_values(batch)[at].double()).var() / returns.var())


def _check(**options: float) -> None:
    for name, value in options.items():
        if not 0 < value < float("inf"):
            raise UserError(f"option {name}={value} of a critic's regression must be a number above 0")
