"""GDPO: every reward is standardised within the group by itself, so that different rewards cannot hide in one sum."""

from functools import partial
from typing import Literal

from torch import Tensor

from postrl.advantages import MIN_SPREAD, Singleton, Whiten, credit_per_reward, spread_whitened
from postrl.batch import Batch
from postrl.method import Method, Paper, Term
from postrl.papers.grpo import clip_loss
from postrl.weights import sequence_mean, share_counted

PAPER = Paper(
    title="GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization",
    arxiv="2601.05242",
    status="equations known; the authors' two released forms, TRL's and verl's functions compared",
)


def gdpo(
    whiten: Whiten = "response",
    shift_mean: bool = True,
    whiten_eps: float = 1e-4,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    count_empty: bool = False,
) -> Method:
    """Summing first makes (0, 2) and (1, 1) one reward; GDPO sums after each reward has met its own group.

        A^k_i = (r^k_i − mean_j r^k_j) / (std_j r^k_j + eps),   S_i = Σ_k w_k A^k_i
        A_i = (S_i − mean S) / (std S + whiten_eps),   over the whole rollout batch
        l and W as in GRPO

    NVIDIA, arXiv 2601.05242. w are the batch's reward weights.

    whiten: "response" counts each answer once (the paper, the authors' TRL patch, TRL). "token" counts each token, so
        that long answers weigh more, over √(var + whiten_eps²) (the authors' verl patch, verl). None leaves S.
    shift_mean: subtract the mean (the paper). Over responses it is 0 already, each group's S adding up to 0, unless
        singleton="raw"; over tokens it is not, and then an answer of a constant group, S = 0, gets credit that its
        rewards do not speak for. False scales only, by √(mean S²).
    whiten_eps: TRL's 1e-4; as a variance verl's 1e-8.
    ddof, eps: of each reward's deviation. verl: 1, 1e-6. TRL: 1, 1e-4.
    singleton, min_spread: as in `grpo`, for each reward. verl: "raw".
    missing: "exclude": who lacks one of the rewards leaves the statistics of all. "zero": only of that one (TRL). The
        authors' TRL patch takes a missing reward for a reward of 0, which moves its group's mean: not offered.
    low, high, dual, count_empty: as in `grpo`. verl's dual is 3 unless told otherwise.
    """
    credit = partial(credit_per_reward, ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread, missing=missing)

    def advantage(batch: Batch) -> Tensor:
        return spread_whitened(credit(batch).sum(1), batch, whiten, whiten_eps, shift_mean)

    weight, total = partial(sequence_mean, count_empty=count_empty), partial(share_counted, count_empty=count_empty)
    return Method("gdpo", advantage, (Term("policy", clip_loss(low, high, dual), weight, total=total),))
