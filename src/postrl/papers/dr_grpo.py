"""Dr. GRPO: GRPO without its two biases, the division by the group's spread and by each answer's own length."""

from functools import partial
from typing import Literal

from torch import Tensor

from postrl.advantages import MIN_SPREAD, Singleton, centred, total_reward
from postrl.batch import Batch, spread
from postrl.errors import UserError
from postrl.method import Method, Paper, Term
from postrl.papers.grpo import clip_loss
from postrl.weights import fixed_length, mean_length

PAPER = Paper(
    title="Understanding R1-Zero-Like Training: A Critical Perspective",
    arxiv="2503.20783",
    status="equations known; verl's and TRL's released functions compared",
)


def dr_grpo(
    length: int = 3000,
    low: float = 0.2,
    high: float = 0.2,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
    count_empty: bool = False,
) -> Method:
    """Long wrong answers are no longer punished less per token, and easy or hard prompts no longer weigh more.

        A_i = R_i − mean_j R_j,   W_{i,t} = 1/(N·L),   l = −min(r·A, clip(r, 1−low, 1+high)·A)

    Liu et al., arXiv 2503.20783.

    length: L in tokens, one constant for all answers, usually the limit given to the sampler (paper: 3000). It only
        scales the loss, so set it near your own limit or the gradient becomes tiny.
    low, high: half-widths of the clip (paper: 0.2); no KL penalty (paper: β = 0), groups of 8.
    singleton, min_spread, missing, count_empty: as in `grpo`. TRL counts empty units.

    In TRL `loss_type="dr_grpo"` alone still divides by the standard deviation; `scale_rewards="none"` must be set
    too. verl divides by the padded width of the batch unless `loss_scale_factor` is given.
    """
    if length < 1:
        raise UserError(f"dr_grpo: length is {length}; give the number of tokens an answer may have")

    def advantage(batch: Batch) -> Tensor:
        reward = total_reward(batch, missing=missing)
        return spread(centred(reward, batch.group(), singleton=singleton, min_spread=min_spread), batch)

    def total(batch: Batch) -> float:
        return mean_length(batch, count_empty) / length

    weight = partial(fixed_length, length=length, count_empty=count_empty)
    return Method("dr_grpo", advantage, (Term("policy", clip_loss(low, high), weight, total=total),))
