"""masked_cispo: CISPO's detached, capped ratio, but tokens past PPO's clip get no gradient after all."""

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from postrl.advantages import MIN_SPREAD, Singleton
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.losses import detached_ratio, log_ratio, on, outside
from postrl.method import Forward, Method, Paper, Term
from postrl.papers.grpo import standardised
from postrl.weights import sequence_mean, share_counted

PAPER = Paper(
    title="What are Key Factors for Updates in RL for LLM Reasoning?",
    arxiv="2606.22570",
    status="a baseline of ACPO's released code, compared with it; that code calls it CISPO",
)


def masked_cispo(
    low: float = 0.2,
    high: float = 0.3,
    floor: float = 0.0,
    ceiling: float = 1.45,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
    count_empty: bool = False,
) -> Method:
    """What ACPO's release compares with under the name CISPO. `cispo` is the method of that name.

        l = −sg(clip(r, floor, ceiling)) · A · log π · [r still inside the clip],   A and W as in GRPO
        outside: A > 0 and r > 1 + high, or A < 0 and r < 1 − low

    Wang et al., arXiv 2606.22570 (released code). CISPO (arXiv 2506.13585) exists to keep the gradient of the tokens
    that are dropped here.

    low, high: half-widths of the mask (released: 0.2, 0.3). floor, ceiling: bounds of the ratio itself (released: 0,
        1.45). With floor=0 and a ceiling never met the gradient is that of `grpo(low, high)`, on both sides.
    ddof, eps, singleton, min_spread, missing, count_empty: as in `grpo`.

    Raises UserError if floor and ceiling exclude r = 1 or are not finite, or low is over 1.
    """
    if not floor <= 1 < ceiling < math.inf:
        raise UserError(
            f"masked_cispo: floor={floor} and ceiling={ceiling} bound the ratio itself: finite numbers around 1"
        )
    if not low <= 1:
        raise UserError(f"masked_cispo: low={low} is an offset from 1; give at most 1, such as 0.2")

    def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
        mask, advantage = batch.mask, on(batch.mask, advantage)
        ratio = log_ratio(mask, forward.logp, batch.logp_old).exp().detach()
        token = detached_ratio(mask, forward.logp, batch.logp_old, advantage, floor, ceiling)
        return torch.where(outside(ratio, advantage, low, high), torch.zeros_like(token), token)

    advantage = partial(standardised, ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread, missing=missing)
    weight, total = partial(sequence_mean, count_empty=count_empty), partial(share_counted, count_empty=count_empty)
    return Method("masked_cispo", advantage, (Term("policy", loss, weight, total=total),))
