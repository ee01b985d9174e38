"""DAPO: GRPO with a higher upper clip, a token-level mean, prompts of mixed outcome only, and a soft length penalty."""

from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from postrl.advantages import MIN_SPREAD, Groups, Singleton
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.method import Method, Paper, Term
from postrl.papers.grpo import clip_loss, standardised
from postrl.weights import token_mean

PAPER = Paper(
    title="DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
    arxiv="2503.14476",
    status="equations known; verl's and TRL's released functions compared",
)


def dapo(
    low: float = 0.2,
    high: float = 0.28,
    correct: str | None = "correct",
    max_length: int = 20480,
    cache: int = 4096,
    penalty: float = 1.0,
    dual: float | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
) -> Method:
    """Four repairs that keep a long run of GRPO exploring and stable.

        clip-higher       l = −min(r·A, clip(r, 1−low, 1+high)·A) with high > low
        token-level mean  W_{i,t} = 1/Σ_j |o_j| over everything an update sees
        dynamic sampling  keep a prompt iff 0 < #correct < G; the loop refills what was dropped
        soft overlong     R_i += penalty · R_len(|o_i|), see `overlong`
        A_i = (R_i − mean_j R_j) / (std_j R_j + eps)

    Yu et al., arXiv 2503.14476.

    low, high: of the clip (paper: 0.2, 0.28).
    correct: the *raw* reward component that tells right from wrong for dynamic sampling, never the shaped total: a
        length penalty gives variance to groups that have nothing to teach. None switches dynamic sampling off.
    max_length, cache: L_max and L_c in tokens (paper: 20480, 4096). Set max_length to your sampler's limit.
    penalty: scale of R_len; 1 fits the paper's rewards of ±1. 0 switches it off.
    dual: c of dual clip, None for none (paper). The released recipe runs verl with c = 10.
    ddof, eps, singleton, min_spread, missing: as in `grpo`.

    TRL's `loss_type="dapo"` is the token-level mean alone. verl takes the mean per micro-batch unless it is given the
    global count.
    """
    if not 0 < cache <= max_length:
        raise UserError(f"dapo: cache is {cache} and max_length is {max_length}; choose 0 < cache <= max_length")
    shaped = partial(standardised, ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread, missing=missing)

    def advantage(batch: Batch) -> Tensor:
        shaping = penalty * overlong(batch.lengths(), max_length, cache).to(batch.rewards.dtype)
        return shaped(batch, shaping=shaping)

    policy = Term("policy", clip_loss(low, high, dual), token_mean)
    return Method("dapo", advantage, (policy,), keep=None if correct is None else partial(mixed, correct=correct))


def overlong(length: Int[Tensor, "N"], max_length: int, cache: int) -> Float[Tensor, "N"]:
    """R_len [N] of the sampled tokens |o|: 0 up to L_max − L_c, falling linearly to −1 at L_max, −1 beyond."""
    excess = length - (max_length - cache)
    return -(excess / cache).clamp(0, 1)


def mixed(batch: Batch, correct: str) -> Bool[Tensor, "N"]:
    """Units of groups whose answers are neither all right nor all wrong in the component `correct`; missing ones aside.

    Raises UserError if the batch has no such component.
    """
    if correct not in batch.reward_names:
        there = ", ".join(batch.reward_names) or "none"
        raise UserError(
            f"dapo: no reward component {correct!r} to filter by; set `correct` to one of: {there}, or None"
        )
    return Groups(batch.reward(correct), batch.group()).spread() > torch.finfo(batch.rewards.dtype).eps
