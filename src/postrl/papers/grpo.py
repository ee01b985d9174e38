"""GRPO: rewards standardised within the group of answers to one prompt, under PPO's clipped ratio."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from postrl.advantages import MIN_SPREAD, Singleton, total_reward, zscored
from postrl.batch import Batch, spread
from postrl.losses import clipped
from postrl.method import Forward, Method, Paper, Term
from postrl.weights import sequence_mean, share_counted

PAPER = Paper(
    title="DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    arxiv="2402.03300",
    status="equations known; verl's and TRL's released functions compared",
)


def grpo(
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
    count_empty: bool = False,
) -> Method:
    """The group replaces the critic: an answer is good if it beats its siblings, in units of their spread.

        A_i = (R_i − mean_j R_j) / (std_j R_j + eps),   W_{i,t} = 1/(N·|o_i|)
        l = −min(r·A, clip(r, 1−low, 1+high)·A),   r = π(o_t|·)/π_old(o_t|·)

    Shao et al., arXiv 2402.03300, with outcome rewards. The paper adds 0.04·KL_k3(π‖π_ref):
    `grpo().plus(reference_kl(0.04, weight=sequence_mean))`.

    low, high: half-widths of the clip (the paper does not state its ε; 0.2 everywhere since).
    dual: c of dual clip, None for none (the paper). verl switches it on with c = 3 unless told otherwise.
    ddof, eps: of the standard deviation. verl: 1, 1e-6. TRL: 1, 1e-4. The paper leaves both open.
    singleton: a group of one gets 0 (TRL) or its "raw" reward (verl).
    min_spread: a group whose max − min does not exceed it is constant and gets exactly 0; verl and TRL divide the
        rounding error of the mean by the rounding error of the deviation instead (up to 0.19 in float32).
    missing: "exclude" takes a unit that lacks a reward out of its group; "zero" counts what lacks as 0 (TRL).
    count_empty: count units without sampled tokens in N (TRL), or not (verl).
    """
    advantage = partial(standardised, ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread, missing=missing)
    weight, total = partial(sequence_mean, count_empty=count_empty), partial(share_counted, count_empty=count_empty)
    policy = Term("policy", clip_loss(low, high, dual), weight, total=total)
    return Method("grpo", advantage, (policy,))


def standardised(
    batch: Batch,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
    shaping: Float[Tensor, "N"] | float = 0.0,
) -> Float[Tensor, "B T"]:
    """GRPO's advantage of the total reward plus `shaping`, on every sampled token of a unit."""
    reward = total_reward(batch, missing=missing) + shaping
    a = zscored(reward, batch.group(), ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread)
    return spread(a, batch)


def clip_loss(low: float, high: float, dual: float | None = None) -> Callable[[Batch, Tensor, Forward], Tensor]:
    """Token loss of the clipped surrogate, as a term wants it."""

    def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
        return clipped(batch.mask, forward.logp, batch.logp_old, advantage, low, high, dual)

    return loss
