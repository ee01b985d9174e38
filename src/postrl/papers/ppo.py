"""PPO: a critic's values say how much better each token went than expected, and a clip keeps each step small."""

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from postrl.advantages import gae, whitened
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.losses import Mask, Matrix, on
from postrl.method import Forward, Method, Paper, Term
from postrl.papers.grpo import clip_loss
from postrl.values import Gap, Missing, explained_variance, given_values, known, lambda_returns, token_rewards
from postrl.weights import token_mean

PAPER = Paper(
    title="Proximal Policy Optimization Algorithms",
    arxiv="1707.06347",
    status="equations known; GAE and clip compared with verl's released functions; value clipping is released code's",
)


def ppo(
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_critic: float = 1.0,
    gap: Literal["carry", "zero"] = "carry",
    whiten: bool = True,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    value_coef: float = 1.0,
    value_clip: float | None = 0.2,
    missing: Literal["exclude", "zero"] = "exclude",
) -> Method:
    """Credit by a critic V, which learns beside the policy: no group of answers to one prompt is needed.

        A_t = Σ_k (γλ)^k δ_{t+k},   δ_t = r_t + γV_{t+1} − V_t       (GAE, arXiv 1506.02438)
        l_policy = −min(r·A, clip(r, 1−low, 1+high)·A),   r = π(o_t|·)/π_old(o_t|·)
        l_value  = max( (V−R)², (clip(V, V_old−ε_v, V_old+ε_v) − R)² ),   R_t = A_t(λ_critic) + V_old,t
        loss = mean over tokens of l_policy + value_coef · l_value

    Schulman et al., arXiv 1707.06347. V is that of the state before token t. `train` needs an `ActorCritic` and its
    enricher `Values` (policies/critic.py), which fills V_old. r_t is 0 but for the last sampled token of a row, which
    gets its unit's reward; with `Values(truncated="bootstrap")` also γ·V of the state in which an answer was cut off.

    gamma, lam: discount and λ of the policy's A (paper: 0.99, 0.95; in language models γ is 1).
    lam_critic: λ of the critic's targets (paper: as lam). 1 is the return, free of the critic's own errors, as VC-PPO
        (arXiv 2503.01491) wants it for long answers.
    gap: the token after the last one before an observation. "carry": the next sampled one (verl, AReaL). "zero": the
        observation, whose value counts as 0 (OpenRLHF, ROLL); γ and λ are paid for each of its tokens.
    whiten: A to mean 0 and deviation 1 over the sampled tokens of the rollout batch (verl; OpenAI's baselines do it in
        each mini-batch; the paper does not say). Its mean also takes away what the critic gets wrong everywhere.
    low, high, dual: as in `grpo` (paper: 0.2). value_coef: c₁ (paper: 1 on Atari); with AdamW and a critic that shares
        no weights it hardly matters.
    value_clip: ε_v (baselines 0.2, verl 0.5; both halve the square). None is the paper, which has no such clip.
    missing: "exclude": a unit that lacks a reward gives no credit and no target; "zero": its reward is 0 (TRL).
        Either way A is 0 where nothing was rewarded.

    The paper's entropy bonus: `.plus(entropy_bonus(0.01), needs=frozenset({"entropy"}))`.
    Raises UserError for γ or λ outside 0 … 1, or a clip or coefficient that is not positive.
    """
    _check(gamma=gamma, lam=lam, lam_critic=lam_critic)
    _check_positive(value_coef=value_coef, **({} if value_clip is None else {"value_clip": value_clip}))
    returns = partial(lambda_returns, gamma=gamma, lam=lam_critic, gap=gap, missing=missing)

    def value_loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
        if forward.values is None:
            raise UserError("ppo needs values from the policy's forward pass: give `train` an ActorCritic")
        return value_error(batch.mask, forward.values, given_values(batch), returns(batch), value_clip)

    def figures(batch: Batch, logp: Tensor) -> dict[str, float]:
        return {"explained_variance": explained_variance(batch, gamma, gap, missing)}

    policy = Term("policy", clip_loss(low, high, dual), token_mean)
    share = partial(any_known, missing=missing)
    value = Term("value", value_loss, partial(known_mean, missing=missing), value_coef, total=share)
    return Method(
        "ppo",
        partial(credit, gamma=gamma, lam=lam, gap=gap, whiten=whiten, missing=missing),
        (policy, value),
        figures=figures,
        needs=frozenset({"values"}),
        exempt={"reward shift": "its baseline is the critic, which does not know the rewards of the group"},
    )


def credit(
    batch: Batch,
    gamma: float = 1.0,
    lam: float = 0.95,
    gap: Gap = "carry",
    whiten: bool = True,
    missing: Missing = "exclude",
) -> Float[Tensor, "B T"]:
    """GAE of the units whose reward is there, whitened over their tokens if asked for; 0 elsewhere."""
    rewards, at = token_rewards(batch, gamma, missing), known(batch, missing)
    a = gae(rewards, given_values(batch), batch, gamma, lam, gap)
    return whitened(a, replace(batch, mask=at)) if whiten else on(at, a)


def value_error(
    mask: Mask, values: Matrix, old: Matrix, returns: Matrix, clip: float | None = None
) -> Float[Tensor, "b t"]:
    """(V − R)², or with `clip` the larger of that and (clip(V, V_old ± clip) − R)²: no gain from leaving the band."""
    values, old, returns = on(mask, values), on(mask, old), on(mask, returns)
    error = (values - returns).square()
    if clip is None:
        return error
    return torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())


def known_mean(batch: Batch, missing: Missing = "exclude") -> Float[Tensor, "B T"]:
    """Every token of units with a reward counts the same."""
    at: Bool[Tensor, "B T"] = known(batch, missing)
    return at.to(batch.logp_old.dtype) / at.sum().clamp(min=1)


def any_known(batch: Batch, missing: Missing = "exclude") -> float:
    """What `known_mean` sums to."""
    return float(known(batch, missing).any())


def _check(**options: float) -> None:
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise UserError(f"ppo: {name} is {value}; give a number between 0 and 1")


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not 0 < value < float("inf"):
            raise UserError(f"ppo: {name} is {value}; give a number above 0")
