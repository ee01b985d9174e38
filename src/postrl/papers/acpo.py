"""ACPO: the clip is as wide as the ratios of equally likely tokens spread."""

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from postrl.advantages import MIN_SPREAD, Groups, Singleton
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.losses import Matrix, clipped, log_ratio, on
from postrl.method import Forward, Method, Paper, Term
from postrl.papers.grpo import standardised
from postrl.weights import sequence_mean, share_counted

PAPER = Paper(
    title="What are Key Factors for Updates in RL for LLM Reasoning?",
    arxiv="2606.22570",
    status="released code compared; what the paper bins by rests on a reader of its second version",
)

LARGEST = 20.0  # nats: log ratios beyond it count as it, so that no square of a ratio overflows


def acpo(
    alpha: float = 3.0,
    base: float = 0.2,
    least: float = 0.0,
    most: float = 3.0,
    bins: int = 5,
    bin_by: Literal["behaviour", "current"] | None = None,
    sigma: Literal["std", "robust"] = "std",
    variant: Literal["paper", "released"] = "paper",
    dual: float | None = 3.0,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    min_spread: float = MIN_SPREAD,
    missing: Literal["exclude", "zero"] = "exclude",
    count_empty: bool = False,
) -> Method:
    """Ratios of unlikely tokens spread more, so one width clips them most; give each class of tokens its own.

        class j of a token: p in [j/bins, (j+1)/bins),   σ_j = √(Var_j(r) + 1e-8)
        ε_j = clamp(base + alpha·σ_j, least, most),   base where the class is empty
        l = −min(r·A, clip(r, 1−ε_j, 1+ε_j)·A), dual clip where A < 0;   A and W as in GRPO

    Wang et al., arXiv 2606.22570. ε is a constant of the update. With one update per step r = 1, σ = 1e-4, and this is
    PPO's clip; ε_j > 1 leaves the lower side open.

    alpha, base, least, most, bins: α, ε_0, ε_min, ε_max, J (released scripts; the defaults in the released
        configuration, α = 1 and ε in [.05, .5], are others).
    bin_by: p of the policy that sampled ("behaviour", as the paper is said to have it) or that is being updated
        ("current", as the code has it). None: that of the variant.
    sigma: "std", or "robust": 1.4826 times the median distance from the median, since one ratio far out widens the
        bound that should stop it. Log ratios enter σ cut at ±20.
    variant: "paper" takes σ over the whole update, which costs a pass without gradients before each. "released" takes
        it, as the code does, over what one micro-batch holds, so that σ depends on how the update is cut.
    dual: c of dual clip (released, by verl's default), None for none.
    ddof, eps, singleton, min_spread, missing, count_empty: as in `grpo`.

    Raises UserError for no bins, or least over most. `method/epsilon/<j>` is in the metrics, except for the released
    variant, which has no single one.
    """
    if bins < 1:
        raise UserError(f"acpo: bins is {bins}; give at least 1")
    if least > most:
        raise UserError(f"acpo: least={least} is over most={most}; the clip's width lies between them")
    by = bin_by or ("behaviour" if variant == "paper" else "current")
    width = partial(widths, alpha=alpha, base=base, least=least, most=most, bins=bins, bin_by=by, sigma=sigma)

    def loss(batch: Batch, advantage: Tensor, forward: Forward) -> Tensor:
        epsilon = width(batch, forward.logp.detach()) if variant == "released" else batch.observed
        if epsilon is None:
            raise ValueError("acpo: the clip's widths are missing: fill batch.observed by method.observe")
        return clipped(batch.mask, forward.logp, batch.logp_old, advantage, epsilon, epsilon, dual)

    def figures(batch: Batch, now: Tensor) -> Mapping[str, float]:
        if batch.observed is None:
            return {}
        place = classes(batch, now, bins, by)[batch.mask]
        seen = Groups(batch.observed[batch.mask], place)
        return {f"epsilon/{j}": float(e) for j, e in enumerate(seen.means()) if seen.sizes[j] > 0}

    advantage = partial(standardised, ddof=ddof, eps=eps, singleton=singleton, min_spread=min_spread, missing=missing)
    weight, total = partial(sequence_mean, count_empty=count_empty), partial(share_counted, count_empty=count_empty)
    policy = Term("policy", loss, weight, total=total)
    if variant == "paper":
        return Method("acpo", advantage, (policy,), observe=width, figures=figures)
    reason = "the clip's widths are statistics of the micro-batch, as in the released code"
    return Method("acpo", advantage, (policy,), exempt={"split": reason, "world size": reason})


def classes(batch: Batch, now: Matrix, bins: int, bin_by: Literal["behaviour", "current"]) -> Int[Tensor, "b t"]:
    """j of each sampled token, by its probability before the step or now; p = 1 is of the last class. 0 off mask."""
    p = on(batch.mask, batch.logp_old if bin_by == "behaviour" else now, fill=-torch.inf).exp()
    return (p * bins).long().clamp(max=bins - 1)


def widths(
    batch: Batch,
    now: Matrix,
    alpha: float = 3.0,
    base: float = 0.2,
    least: float = 0.0,
    most: float = 3.0,
    bins: int = 5,
    bin_by: Literal["behaviour", "current"] = "behaviour",
    sigma: Literal["std", "robust"] = "std",
) -> Float[Tensor, "b t"]:
    """ε of each sampled token, from the ratios of all tokens of its class in these rows; `base` off the mask."""
    mask = batch.mask
    ratio = log_ratio(mask, now, batch.logp_old)[mask].clamp(-LARGEST, LARGEST).exp()
    place = classes(batch, now, bins, bin_by)[mask]
    variance = (deviation if sigma == "std" else robust_deviation)(ratio, place).square()
    epsilon = torch.full_like(batch.logp_old, base)
    epsilon[mask] = (base + alpha * (variance + 1e-8).sqrt()).clamp(least, most)
    return epsilon


def deviation(x: Float[Tensor, "n"], place: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Population standard deviation of each x's class."""
    inside = Groups(x, place)
    return (inside.sum((x - inside.mean()).square()) / inside.count).sqrt()


def robust_deviation(x: Float[Tensor, "n"], place: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """1.4826 · median |x − median x| of each x's class: the standard deviation, were the class normal."""
    out = torch.zeros_like(x)
    for j in place.unique():
        here = place == j
        out[here] = 1.4826 * _median((x[here] - _median(x[here])).abs())
    return out


def _median(x: Tensor) -> Tensor:
    """With the mean of the two in the middle for an even count, where torch.median takes the lower."""
    ordered, n = x.sort().values, len(x)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
