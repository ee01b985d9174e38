"""RLOO: REINFORCE whose baseline is the mean reward of the other answers to the same prompt."""

from functools import partial
from typing import Literal

from torch import Tensor

from postrl.advantages import MIN_SPREAD, Singleton, leave_one_out, total_reward
from postrl.batch import Batch, spread
from postrl.method import Method, Paper, Term
from postrl.papers.reinforce import loss
from postrl.weights import mean_length, sequence_sum

PAPER = Paper(
    title="Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs",
    arxiv="2402.14740",
    status="equation known; verl's released estimator compared",
)


def rloo(
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
    count_empty: bool = False,
) -> Method:
    """Compare each answer with its siblings only, which lowers the variance and keeps the gradient unbiased.

        A_i = R_i − 1/(G−1) Σ_{j≠i} R_j = G/(G−1) · (R_i − mean),   W_{i,t} = 1/N,   l = −A · log π

    Ahmadian et al., arXiv 2402.14740 (the estimator: Kool et al., 2019). Unbiased at the weights that sampled.

    singleton: credit of an answer without siblings. "zero" (verl's vectorised version) or "raw", its reward (verl's
        loop version: the two disagree).
    min_spread: a group whose max − min does not exceed it is constant and gets exactly 0.
    missing, count_empty: as in `reinforce`.

    The paper subtracts β·KL(π‖π_ref) from the reward; here `rloo().plus(reference_kl(β))` puts it in the loss. TRL's
    trainer adds a PPO clip over the sequence ratio, which the paper argues is not needed.
    """

    def advantage(batch: Batch) -> Tensor:
        reward = total_reward(batch, missing=missing)
        return spread(leave_one_out(reward, batch.group(), singleton=singleton, min_spread=min_spread), batch)

    weight = partial(sequence_sum, count_empty=count_empty)
    return Method(
        "rloo", advantage, (Term("policy", loss, weight, total=partial(mean_length, count_empty=count_empty)),)
    )
