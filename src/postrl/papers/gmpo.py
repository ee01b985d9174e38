"""GMPO: the geometric instead of the arithmetic mean of token ratios, each clipped in log space first."""

from functools import partial
from typing import Literal

from torch import Tensor

from postrl.advantages import MIN_SPREAD, Singleton
from postrl.batch import Batch
from postrl.losses import log_ratio, on, one_sided, pooled
from postrl.method import Forward, Method, Paper, Term
from postrl.papers.grpo import standardised
from postrl.weights import sequence_mean, share_counted

PAPER = Paper(
    title="Geometric-Mean Policy Optimization",
    arxiv="2507.20673",
    status="equations and released code read; verl's released function compared",
)


def gmpo(
    low: float = 0.4,
    high: float = 0.4,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
    count_empty: bool = False,
) -> Method:
    """A geometric mean is insensitive to the one token whose ratio explodes, so the clip can be wide.

        c_{i,t} = min(log r, high) where A > 0, max(log r, −low) where A < 0
        l = −A · exp( 1/|o_i| Σ_t c_{i,t} ),   W_{i,t} = 1/(N·|o_i|)

    Zhao et al., arXiv 2507.20673, A as in GRPO.

    low, high: bounds of *log* r (paper: 0.4, that is ratios in e^−0.4 … e^0.4). verl calls them `clip_ratio`, yet they
        are not offsets from 1 there either.
    ddof, eps, singleton, min_spread, missing, count_empty: as in `grpo`. verl counts rows without sampled tokens and
        takes a plain mean per micro-batch; the authors run one answer per pass, where the two agree, with ddof 1 and
        eps 1e-8 or, as in Dr. GRPO, no standard deviation.

    An answer may lie in several rows; they are pooled, so a micro-batch holds them all.
    """

    def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
        advantage = on(batch.mask, advantage)
        log_ratios = log_ratio(batch.mask, forward.logp, batch.logp_old)
        return -advantage * pooled(one_sided(log_ratios, advantage, low, high), batch).exp()

    advantage = partial(standardised, ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread, missing=missing)
    weight, total = partial(sequence_mean, count_empty=count_empty), partial(share_counted, count_empty=count_empty)
    policy = Term("policy", loss, weight, total=total)
    return Method("gmpo", advantage, (policy,), atom="unit")
