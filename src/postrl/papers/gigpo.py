"""GiGPO: steps taken from the same state are compared with one another, besides whole episodes with their siblings."""

from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from postrl.advantages import (
    MIN_SPREAD,
    Singleton,
    centred,
    dense,
    given_steps,
    over_steps,
    total_reward,
    zscored,
)
from postrl.batch import Batch, spread
from postrl.errors import UserError
from postrl.method import Method, Paper, Term
from postrl.papers.grpo import clip_loss
from postrl.weights import token_mean

PAPER = Paper(
    title="Group-in-Group Policy Optimization for LLM Agent Training",
    arxiv="2505.10978",
    status="equations from the released code's header; a copy by the author compared by vectors",
)

Norm = Literal["mean_norm", "mean_std_norm"]


def gigpo(
    omega: float = 1.0,
    gamma: float = 0.95,
    norm: Norm = "mean_norm",
    steps: Literal["world", "outcome"] = "world",
    singleton: Singleton = "zero",
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
) -> Method:
    """Credit by the step without a critic: episodes of one task pass through the same states and can be compared there.

        A_E = (R(τ) − mean over the task's episodes) / F
        R_t = Σ_{k≥t} γ^{k−t} r_k;   A_S = (R_t − mean over the task's steps that answer the same observation) / F
        A = A_E + ω·A_S on every token of step t,   W = 1/Σ|o|,   l = −min(r·A, clip(r, 1−low, 1+high)·A)

    Feng et al., arXiv 2505.10978 (Eq. 3 and 5–8). R(τ) is the batch's total reward and each episode counts once,
    however long. Equal observations are found by `collate` (`step_groups`). The paper adds a KL penalty:
    `.plus(reference_kl(β))`.

    omega: ω (paper: 1). gamma: γ of the step returns, in [0, 1].
    norm: F = 1 ("mean_norm", the default of the released function) or the standard deviation of the episodes and of the
        steps ("mean_std_norm", what its trainer passes).
    steps: where r_k comes from. "world": the steps' own rewards, absent ones 0. "outcome": the total reward at the last
        step and 0 before, for worlds that reward the end alone.
    singleton: an episode without siblings gets 0, or its "raw" reward (released). A step nobody shares gets A_S = 0.
    low, high, dual, ddof, eps, min_spread, missing: as in `grpo`.

    A unit that lacks a reward has no credit at all and leaves both statistics. Two visits of one episode to a state are
    compared with each other too (released). The released code can also join observations whose texts are 95 % alike; a
    fork that counts an episode once per step in A_E departs from Eq. 3.
    Raises UserError for ω or γ out of range.
    """
    if not 0 <= gamma <= 1:
        raise UserError(f"gigpo: gamma is {gamma}; give a discount between 0 and 1")
    if not 0 <= omega < float("inf"):
        raise UserError(f"gigpo: omega is {omega}; give a weight of at least 0, such as 1")
    rule = partial(zscored, ddof=ddof, eps=eps) if norm == "mean_std_norm" else centred

    def advantage(batch: Batch) -> Tensor:
        reward = total_reward(batch, missing=missing)
        episode = rule(reward, batch.group(), singleton=singleton, min_spread=min_spread)
        anchors = anchor_groups(batch)
        step = step_returns(step_rewards(batch, reward, steps), gamma)
        step = torch.where((anchors >= 0) & ~torch.isnan(reward)[:, None], step, torch.nan)
        step = rule(step.flatten(), anchors.flatten(), min_spread=min_spread).reshape(step.shape)
        return spread(episode, batch) + omega * over_steps(step, batch).nan_to_num(nan=0.0)

    needs = frozenset({"step_groups", *(("step_rewards",) if steps == "world" else ())})
    return Method("gigpo", advantage, (Term("policy", clip_loss(low, high, dual), token_mean),), needs=needs)


def anchor_groups(batch: Batch) -> Int[Tensor, "N S"]:
    """Number of each step's anchor group: the steps of one task group that answer the same observation; −1 for none.

    Raises UserError if the batch knows no observations.
    """
    if batch.step_groups is None:
        raise UserError("gigpo: this batch has no step_groups; make it with `collate`, which numbers observations")
    task, _ = dense(batch.group())
    seen, number = dense(batch.step_groups.flatten())
    return torch.where(batch.step_groups >= 0, task[:, None] * number + seen.reshape(batch.step_groups.shape), -1)


def step_rewards(batch: Batch, reward: Float[Tensor, "N"], steps: Literal["world", "outcome"]) -> Float[Tensor, "N S"]:
    """r_k [N, S]: the world's, 0 where it gave none; or the unit's total reward at its last step, which is NaN if that
    reward is missing. Raises UserError if the world gives no step rewards."""
    if steps == "world":
        return given_steps(batch).nan_to_num(nan=0.0)
    exists = anchor_groups(batch) >= 0
    last = exists & (exists.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, reward[:, None], reward.new_zeros(()))


def step_returns(rewards: Float[Tensor, "N S"], gamma: float) -> Float[Tensor, "N S"]:
    """R_t = r_t + γ·R_{t+1}, 0 after the last column."""
    returns, tail = torch.zeros_like(rewards), rewards[:, :0].sum(1)
    for t in reversed(range(rewards.shape[1])):
        tail = rewards[:, t] + gamma * tail
        returns[:, t] = tail
    return returns
