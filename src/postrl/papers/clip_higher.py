"""clip_higher: GRPO with a wider upper clip, and nothing else of DAPO."""

from dataclasses import replace
from typing import Literal

from postrl.advantages import MIN_SPREAD, Singleton
from postrl.errors import UserError
from postrl.method import Method, Paper
from postrl.papers.grpo import grpo

PAPER = Paper(
    title="DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
    arxiv="2503.14476",
    status="one of DAPO's four parts, on its own: a baseline of other papers, which call it DAPO",
)


def clip_higher(
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
    count_empty: bool = False,
) -> Method:
    """Unlikely tokens of good answers may grow further before the clip silences them.

        l = −min(r·A, clip(r, 1−low, 1+high)·A),   high > low,   A and W as in GRPO

    One part of DAPO (Yu et al., arXiv 2503.14476): no token-level mean, no dynamic sampling, no length penalty, for
    which see `dapo`. The code released with ACPO (arXiv 2606.22570) calls this DAPO, with 0.3 for DAPO's 0.28 and
    dual=3.

    low, high: half-widths of the clip, not bounds of r. The others as in `grpo`, which this is at high = low.

    Raises UserError unless low is at most 1 and at most high.
    """
    if not low <= min(1.0, high):
        raise UserError(
            f"clip_higher: low={low} and high={high} are offsets from 1; give low at most 1 and at most high"
        )
    plain = grpo(low, high, dual, ddof, eps, singleton, min_spread, missing, count_empty)
    return replace(plain, name="clip_higher")
