"""GSPO: one importance ratio per answer, its length-normalised likelihood ratio, clipped as a whole."""

from functools import partial
from typing import Literal

from torch import Tensor

from postrl.advantages import MIN_SPREAD, Singleton
from postrl.batch import Batch
from postrl.losses import clipped_ratio, log_ratio, moving_ratio, on, pooled
from postrl.method import Forward, Method, Paper, Term
from postrl.papers.grpo import standardised
from postrl.weights import sequence_mean, share_counted

PAPER = Paper(
    title="Group Sequence Policy Optimization",
    arxiv="2507.18071",
    status="equations known; verl's and TRL's released functions compared",
)


def gspo(
    low: float = 3e-4,
    high: float = 4e-4,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
    count_empty: bool = False,
) -> Method:
    """Rewards speak of whole answers, so the ratio should too; token ratios only add noise.

        s_i = exp( 1/|o_i| Σ_t log r_{i,t} ),   l = −min(s·A, clip(s, 1−low, 1+high)·A),   W_{i,t} = 1/(N·|o_i|)

    Zheng et al., arXiv 2507.18071, A as in GRPO. Written in the paper's token form, log s_{i,t} = sg(log s_i) + log π −
    sg(log π): the same value, and the same gradient as long as A is constant within an answer.

    low, high: of the clip (paper: 3e-4 and 4e-4, with four mini-batches per step). They are far below the rounding of
        bf16 log-probabilities: in bf16 `logp_old` must come from the training forward, never from the sampler.
    ddof, eps, singleton, min_spread, missing, count_empty: as in `grpo`. verl does not count empty units, TRL does.

    An answer may lie in several rows; they are pooled, so a micro-batch holds them all.
    """

    def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
        log_s = pooled(log_ratio(batch.mask, forward.logp, batch.logp_old), batch)
        advantage = on(batch.mask, advantage)
        return clipped_ratio(moving_ratio(log_s, advantage, low, high), advantage, low, high)

    advantage = partial(standardised, ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread, missing=missing)
    weight, total = partial(sequence_mean, count_empty=count_empty), partial(share_counted, count_empty=count_empty)
    policy = Term("policy", loss, weight, total=total)
    return Method("gspo", advantage, (policy,), atom="unit")
