"""REINFORCE: the reward itself is the credit of every token; no baseline, no ratio."""

from functools import partial
from typing import Literal

from torch import Tensor

from postrl.advantages import total_reward
from postrl.batch import Batch, spread
from postrl.losses import reinforce as score_function
from postrl.method import Forward, Method, Paper, Term
from postrl.weights import mean_length, sequence_sum

PAPER = Paper(
    title="Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
    arxiv="",
    status="textbook form (Williams, Machine Learning 8, 1992)",
)


def reinforce(missing: Literal["exclude", "zero"] = "exclude", count_empty: bool = False) -> Method:
    """Weight each answer's log-probability by its reward: the unbiased policy gradient, and the noisiest.

        ∇J = E[ R ∇ log π(o|q) ],   A_i = R_i,   W_{i,t} = 1/N,   l = −A · log π

    Williams, 1992 (no arXiv version). The estimate is unbiased only at the weights that sampled: with several updates
    per step nothing corrects the later ones.

    missing: "exclude" gives a unit that lacks a reward no credit, "zero" counts the lacking component as 0.
    count_empty: count units without sampled tokens in N.
    """

    def advantage(batch: Batch) -> Tensor:
        return spread(total_reward(batch, missing=missing).nan_to_num(nan=0.0), batch)

    weight = partial(sequence_sum, count_empty=count_empty)
    policy = Term("policy", loss, weight, total=partial(mean_length, count_empty=count_empty))
    return Method("reinforce", advantage, (policy,), exempt={"reward shift": "REINFORCE has no baseline"})


def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
    """−A · log π [b, t]."""
    return score_function(batch.mask, forward.logp, advantage)
