"""GD²PO: answers whose rewards pull apart are left out, and prompts with many of them count less."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from postrl.advantages import MIN_SPREAD, Groups, Singleton, Whiten, credit_per_reward, spread_whitened
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.method import Method, Paper, Term
from postrl.papers.grpo import clip_loss
from postrl.weights import sequence_mean, share_counted

PAPER = Paper(
    title="GD²PO: Mitigating Multi-Reward Conflicts via Group-Dynamic reward-Decoupled Policy Optimization",
    arxiv="2606.16771",
    status="equations from the released code and two digests; two released copies compared",
)

Filter = Literal["hard", "snr"] | None


def gd2po(
    filter: Filter = "hard",
    threshold: float = 0.8,
    query_weight: Literal["loss", "pre_whiten"] | None = "loss",
    sign_eps: float = 1e-3,
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
    """Where one reward says more and another says less, their sum says little; GD²PO does not train on such answers.

        c^k_i = w_k A^k_i,   A^k as in GDPO (each reward standardised within the group),   S_i = Σ_k c^k_i
        conflict_i = some A^k_i > sign_eps and some A^k_i < −sign_eps   (signs turned by those of w)
        hard: drop_i = conflict_i
        snr:  drop_i = conflict_i and |Σ_k c^k_i| / Σ_k |c^k_i| < threshold
        ρ_q = share of the group that is kept,   A_i = ρ_q · whiten(S)_i over kept answers,   0 for dropped ones
        l and W as in GRPO

    Liu et al., arXiv 2606.16771. The paper has unit weights; w are the batch's reward weights. With two rewards and one
    weight, snr drops iff the smaller |A| is over (1 − threshold)/(1 + threshold) of the larger: .11, .33, .67 for .8,
    .5, .2.

    filter: "hard" (the paper's choice for two rewards), "snr" (for three, where hard drops too much), or None, which
        with query_weight=None is GDPO.
    threshold: τ, 0 to 1 (released scripts: 0.8).
    query_weight: "loss" scales a prompt's loss by ρ_q, after whitening (a digest of the paper). "pre_whiten" scales S
        before it, which changes mean and deviation of the batch as well (released code). None: ρ_q = 1.
    sign_eps: |A| below it has no sign. Released: 1e-8, far below the rounding of float32, which turned constant rewards
        such as 0.1 into |A| up to 0.19 and into conflicts; here constant groups are exactly 0 as well.
    whiten, shift_mean, whiten_eps, ddof, eps, singleton, min_spread, missing: as in `gdpo`. Released: whiten="token",
        singleton="raw".
    low, high, dual, count_empty: as in `grpo`.

    Raises UserError for a threshold outside 0 to 1. What is dropped is the trade-off between rewards: where that is the
    information, dropping it hurts. `method/conflict`, `method/dropped`, `method/kept` (shares of the scored answers)
    and `method/query_weight` (mean ρ_q of the groups) are in the metrics.
    """
    if not 0 <= threshold <= 1:
        raise UserError(f"gd2po: threshold is {threshold}; give a number from 0 to 1, such as 0.8")
    credit = partial(credit_per_reward, ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread, missing=missing)

    judge = partial(judged, filter=filter, threshold=threshold, sign_eps=sign_eps)

    def advantage(batch: Batch) -> Tensor:
        parts = credit(batch)
        verdict = judge(parts, batch)
        total = parts.sum(1).masked_fill(~verdict.kept, torch.nan)
        if query_weight == "pre_whiten":
            total = verdict.query_weight * total
        a = spread_whitened(total, batch, whiten, whiten_eps, shift_mean)
        return a * verdict.query_weight[batch.unit][:, None] if query_weight == "loss" else a

    def figures(batch: Batch, now: Tensor) -> Mapping[str, float]:
        return conflict_figures(judge(credit(batch), batch), batch)

    weight, total = partial(sequence_mean, count_empty=count_empty), partial(share_counted, count_empty=count_empty)
    policy = Term("policy", clip_loss(low, high, dual), weight, total=total)
    return Method("gd2po", advantage, (policy,), figures=figures)


@dataclass(frozen=True)
class Verdict:
    """What the filter says of each unit; a missing one neither conflicts nor is kept."""

    scored: Bool[Tensor, "N"]
    conflict: Bool[Tensor, "N"]
    kept: Bool[Tensor, "N"]
    query_weight: Float[Tensor, "N"]  # ρ of the unit's group; 0 where nothing is scored


def judged(
    credit: Float[Tensor, "N _"], batch: Batch, filter: Filter = "hard", threshold: float = 0.8, sign_eps: float = 1e-3
) -> Verdict:
    """The filter on weighted credit per reward (rows of missing units are NaN)."""
    scored = ~torch.isnan(credit).any(1)
    scale = batch.reward_weights[batch.reward_weights != 0].abs()
    conflict = (credit > sign_eps * scale).any(1) & (credit < -sign_eps * scale).any(1)
    agreement = credit.sum(1).abs() / credit.abs().sum(1)
    dropped = conflict & (agreement < threshold) if filter == "snr" else conflict & (filter == "hard")
    kept = scored & ~dropped
    share = torch.where(scored, kept.to(credit.dtype), torch.nan)
    return Verdict(scored, conflict, kept, Groups(share, batch.group()).mean())


def conflict_figures(verdict: Verdict, batch: Batch) -> dict[str, float]:
    """Shares of the scored units, and the mean ρ of the groups that have any; nothing without scored units."""
    number = int(verdict.scored.sum())
    if number == 0:
        return {}
    groups = Groups(torch.where(verdict.scored, verdict.query_weight, torch.nan), batch.group())
    return {
        "conflict": int(verdict.conflict.sum()) / number,
        "dropped": int((verdict.scored & ~verdict.kept).sum()) / number,
        "kept": int(verdict.kept.sum()) / number,
        "query_weight": float(groups.means()[groups.sizes > 0].mean()),
    }
