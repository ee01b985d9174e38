"""CISPO: the importance ratio is clipped and detached, so every token keeps a gradient."""

import math
from functools import partial
from typing import Literal

from torch import Tensor

from postrl.advantages import MIN_SPREAD, Singleton
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.losses import detached_ratio
from postrl.method import Forward, Method, Paper, Term
from postrl.papers.grpo import standardised
from postrl.weights import token_mean

PAPER = Paper(
    title="MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
    arxiv="2506.13585",
    status="equation known, bounds from secondary sources; verl's and TRL's released functions compared",
)


def cispo(
    high: float = 5.0,
    low: float | None = None,
    bound: Literal["absolute", "delta"] = "absolute",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
) -> Method:
    """PPO's clip silences the rare tokens that move most; clip their weight instead of their gradient.

        l = −sg(clip(r, floor, ceiling)) · A · log π,   W_{i,t} = 1/Σ_j |o_j|,   A as in GRPO

    MiniMax, arXiv 2506.13585; no KL penalty.

    high, low, bound: the bounds of r. bound="absolute": floor = low, ceiling = high. bound="delta": floor = 1 − low,
        ceiling = 1 + high. The same number means two algorithms: TRL's `epsilon_high` is absolute, verl's and NeMo's is
        a delta, and PPO's 0.2 on both sides makes the weight nearly constant, which is not CISPO. low=None leaves the
        lower side open, as the paper does; its upper value is not published, ScaleRL (arXiv 2510.13786) has 5.
    ddof, eps, singleton, min_spread, missing: as in `grpo`.

    verl's default clips both sides at 0.2. TRL has no lower bound. Raises UserError for bounds that exclude r = 1.
    """
    ceiling = high if bound == "absolute" else 1 + high
    floor = 0.0 if low is None else low if bound == "absolute" else 1 - low
    if not (floor <= 1 < ceiling and math.isfinite(floor)):
        raise UserError(
            f"cispo: high={high} and low={low} with bound={bound!r} keep ratios in [{floor:g}, {ceiling:g}], but 1 must"
            ' lie inside; say bound="delta" for offsets from 1 such as 0.2, or give the largest ratio itself, such as 5'
        )

    def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
        return detached_ratio(batch.mask, forward.logp, batch.logp_old, advantage, floor, ceiling)

    advantage = partial(standardised, ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread, missing=missing)
    return Method("cispo", advantage, (Term("policy", loss, token_mean),))
