"""ReCo: each answer counts by how rarely it was expected, each token by how its variance, not its odds, has moved."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from postrl.advantages import MIN_SPREAD, Groups, Singleton, dense
from postrl.batch import Batch, unit_sum
from postrl.errors import UserError
from postrl.losses import Matrix, clipped, log_ratio, on, outside
from postrl.method import Forward, Method, Paper, Term
from postrl.papers.grpo import standardised
from postrl.weights import sequence_mean

PAPER = Paper(
    title="ReCo: Reweighting GRPO Against Distributional Concentration",
    arxiv="2607.26862",
    status="formulas from two independent digests; no released code; π̄, the cap and the clip variable are our reading",
)

Typical = Literal["geometric", "sequence", "empirical"]


def reco(
    typical: Typical = "geometric",
    cap: float = 5.0,
    rescale: bool = True,
    response_level: bool = True,
    token_level: bool = True,
    trust: Literal["ratio", "variance"] = "ratio",
    low: float = 0.2,
    high: float = 0.2,
    floor: float = 1e-5,
    clusters: str = "answer",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
) -> Method:
    """GRPO loses pass@k because likely answers fill the group and likely tokens grow; undo both counts.

        w_i = min( 1/(G·π̄(o_i|q)), cap ) / mean over the group          response level
        v_t = p(1−p) / (p_old(1−p_old)),   p = π(o_t|·)                  token level
        l = −sg(v) · A · log π · [r still inside the clip],   W_{i,t} = w_i / (N·|o_i|),   A as in GRPO

    Park et al., arXiv 2607.26862. v is detached: its own derivative has the sign of 1 − 2p and would push likely tokens
    the wrong way. At the weights that sampled v = 1, so with one update per step the token level does nothing.

    typical: π̄. "geometric": exp(mean_t log p_old), never above 1. "sequence": the literal probability of the answer,
        so small for long ones that every weight meets the cap and the level vanishes. "empirical": the share of the
        group that lies in the same cluster of the grouping named `clusters` (for example equal final answers).
    cap: on 1/(G·π̄), applied in log space (a port's value; the paper's is not known).
    rescale: divide by the group's mean weight, so that the step size is GRPO's. False is the raw weight, which
        changes the step several-fold: never compare it with GRPO at an equal learning rate.
    response_level, token_level: switches; both off is GRPO, and without the token level l is GRPO's clipped r·A.
    trust: what PPO's one-sided test reads, r or v. v misses 0.5 → 0.9 (r = 1.8, v = 0.36).
    low, high: half-widths of the test (a port's 0.2). floor: least 1 − p, against v's blow-up at p → 1.
    ddof, eps, singleton, min_spread, missing: as in `grpo`. The paper keeps GRPO's KL: `.plus(reference_kl(β))`.

    Where right answers are also the expected ones, the weights take from the advantages above 0, and a group's no
    longer sum to 0: `method/weighted_advantage` in the metrics is Σ W·A of the rollout batch, 0 for GRPO.

    Raises UserError for a cap that is not a positive number. No code has been released.
    """
    if not 0 < cap < math.inf:
        raise UserError(f"reco: cap is {cap}; give a positive number, such as 5")
    weigh = partial(response_weight, typical=typical, cap=cap, rescale=rescale, clusters=clusters)

    def weight(batch: Batch) -> Tensor:
        plain = sequence_mean(batch)
        return plain * weigh(batch)[batch.unit][:, None] if response_level else plain

    def total(batch: Batch) -> float:
        return 1.0 if rescale or not response_level else float(weigh(batch)[batch.lengths() > 0].mean())

    def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
        mask, logp, old = batch.mask, forward.logp, batch.logp_old
        if not token_level:
            return clipped(mask, logp, old, advantage, low, high)
        advantage = on(mask, advantage)
        ratio = log_ratio(mask, logp, old).exp().detach()
        change = (variance(mask, logp, floor) / variance(mask, old, floor)).detach()
        stop = outside(ratio if trust == "ratio" else change, advantage, low, high)
        return -torch.where(stop, torch.zeros_like(change), change) * advantage * on(mask, logp)

    advantage = partial(standardised, ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread, missing=missing)

    def figures(batch: Batch, now: Tensor) -> Mapping[str, float]:
        return {"weighted_advantage": float((weight(batch) * on(batch.mask, advantage(batch))).sum())}

    policy = Term("policy", loss, weight, total=total)
    # The weights read log π_old before an update's own forward could give it.
    needs = frozenset({"logp_old"} if response_level else ())
    return Method("reco", advantage, (policy,), figures=figures, needs=needs)


def response_weight(
    batch: Batch, typical: Typical = "geometric", cap: float = 5.0, rescale: bool = True, clusters: str = "answer"
) -> Float[Tensor, "N"]:
    """w_i of each answer; 0 for a unit without sampled tokens, which counts neither in G nor in the mean.

    Raises UserError if typical="empirical" and the batch has no grouping named `clusters`.
    """
    lengths = batch.lengths()
    if typical == "empirical":
        log_expected = _cluster_size(batch, clusters).log()
    else:
        likelihood = unit_sum(batch.logp_old, batch)
        likelihood = likelihood / lengths.clamp(min=1) if typical == "geometric" else likelihood
        log_expected = likelihood + Groups(_present(batch), batch.group()).count.log()
    weight = torch.where(lengths > 0, (-log_expected).clamp(max=math.log(cap)).exp(), torch.nan)
    if rescale:
        weight = weight / Groups(weight, batch.group()).mean()
    return weight.nan_to_num(nan=0.0)


def variance(mask: Tensor, logp: Matrix, floor: float) -> Matrix:
    """p(1−p) of the sampled tokens, 1 − p kept above `floor` and p above e^−80, where float32 still divides; a constant
    off the mask."""
    logp = on(mask, logp, fill=-1.0).clamp(min=-80.0)
    return logp.exp() * (-torch.expm1(logp)).clamp(min=floor)


def _present(batch: Batch) -> Float[Tensor, "N"]:
    one = torch.ones(batch.size, dtype=batch.logp_old.dtype, device=batch.unit.device)
    return torch.where(batch.lengths() > 0, one, torch.nan)


def _cluster_size(batch: Batch, clusters: str) -> Float[Tensor, "N"]:
    if clusters not in batch.group_names:
        there = ", ".join(batch.group_names)
        raise UserError(f"reco: typical='empirical' needs a grouping {clusters!r}; this batch has: {there}")
    task, number = dense(batch.group())
    pairs = dense(batch.group(clusters))[0] * number + task
    return Groups(_present(batch), pairs).count
