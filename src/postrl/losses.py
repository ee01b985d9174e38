"""Token losses: [B, T] in, [B, T] out, never reduced. Minimise them.

r = exp(logp − logp_old). Every function takes the mask first and reads nothing off it, so that NaN there cannot reach
a value or a gradient; off the mask it returns 0 (or a constant of zero gradient). Arguments are [b, t] unless said.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from postrl.batch import Batch, unit_sum

Matrix = Float[Tensor, "b t"]
Mask = Bool[Tensor, "b t"]


def on(mask: Mask, x: Matrix, fill: float = 0.0) -> Matrix:
    """x on the mask, `fill` elsewhere; no gradient and no NaN comes from elsewhere."""
    return torch.where(mask, x, torch.full_like(x, fill))


def log_ratio(mask: Mask, logp: Matrix, logp_old: Matrix) -> Matrix:
    """log r = logp − logp_old on the mask, 0 elsewhere."""
    return on(mask, logp) - on(mask, logp_old)


def outside(ratio: Matrix, advantage: Matrix, low: float | Tensor, high: float | Tensor) -> Mask:
    """Where PPO's clip removes the gradient: r already past the bound in the direction A pushes it."""
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))


def reinforce(mask: Mask, logp: Matrix, advantage: Matrix) -> Matrix:
    """−A · log π, the score-function loss."""
    return -on(mask, advantage) * on(mask, logp)


def clipped(
    mask: Mask,
    logp: Matrix,
    logp_old: Matrix,
    advantage: Matrix,
    low: float | Tensor,
    high: float | Tensor,
    dual: float | None = None,
) -> Matrix:
    """−min(r·A, clip(r, 1−low, 1+high)·A), PPO's clipped surrogate (arXiv 1707.06347).

    `low` and `high` are numbers or [b, t]. dual=c bounds the loss by −c·A where A < 0 (dual-clip PPO, arXiv
    1912.09729; verl has c=3 by default).
    """
    advantage = on(mask, advantage)
    ratio = moving_ratio(log_ratio(mask, logp, logp_old), advantage, low, high, dual)
    return clipped_ratio(ratio, advantage, low, high, dual)


def moving_ratio(
    log_ratio: Matrix, advantage: Matrix, low: float | Tensor, high: float | Tensor, dual: float | None = None
) -> Matrix:
    """r = e^log_ratio for `clipped_ratio`, a finite constant on tokens the clip silences or A = 0 leaves alone.

    There the gradient is 0·r, which is NaN once r overflows (in float32 from log r = 89 on). It changes nothing else.
    """
    constant = log_ratio.detach().exp()
    silent = outside(constant, advantage, low, high) | (advantage == 0)
    if dual is not None:
        silent = silent | ((advantage < 0) & (constant > dual))
    constant = constant.clamp(max=torch.finfo(constant.dtype).max)
    return torch.where(silent, constant, torch.where(silent, torch.zeros_like(log_ratio), log_ratio).exp())


def clipped_ratio(
    ratio: Matrix, advantage: Matrix, low: float | Tensor, high: float | Tensor, dual: float | None = None
) -> Matrix:
    """The clipped surrogate of a given ratio (per token or per sequence)."""
    bounded = ratio.clamp(min=1 - low).clamp(max=1 + high)  # one at a time: low may be a number and high a tensor
    loss = torch.maximum(-ratio * advantage, -bounded * advantage)
    if dual is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)


def detached_ratio(
    mask: Mask, logp: Matrix, logp_old: Matrix, advantage: Matrix, floor: float, ceiling: float
) -> Matrix:
    """−sg(clip(r, floor, ceiling)) · A · log π: the gradient reaches every token (CISPO, arXiv 2506.13585)."""
    ratio = log_ratio(mask, logp, logp_old).exp().clamp(floor, ceiling).detach()
    return -ratio * on(mask, advantage) * on(mask, logp)


def pooled(x: Matrix, batch: Batch) -> Matrix:
    """sg(mean of x over the unit's sampled tokens) + x − sg(x): the unit's value with each token's own gradient.

    Under weights and credit that are constant within a unit its gradient is that of the mean itself (GSPO's token form,
    arXiv 2507.18071); otherwise every token answers for its own credit. `batch` must hold all rows of its units: a
    method that pools declares atom="unit".
    """
    mean = unit_sum(x.detach(), batch) / batch.lengths().clamp(min=1)
    return on(batch.mask, mean[batch.unit][:, None] + (x - x.detach()))


def one_sided(log_ratio: Matrix, advantage: Matrix, low: float, high: float) -> Matrix:
    """log r, cut at `high` where A > 0 and at −`low` where A < 0: PPO's clip in log space (GMPO, arXiv 2507.20673)."""
    capped = torch.where(advantage > 0, log_ratio.clamp(max=high), log_ratio)
    return torch.where(advantage < 0, capped.clamp(min=-low), capped)


def nll(mask: Mask, logp: Matrix) -> Matrix:
    """−log π, for demonstrations."""
    return -on(mask, logp)


def kl_k1(mask: Mask, logp: Matrix, logp_ref: Matrix) -> Matrix:
    """log π − log π_ref: unbiased for KL(π‖π_ref) in value; as a loss its gradient has mean 0 (no score term)."""
    return log_ratio(mask, logp, logp_ref)


def kl_k2(mask: Mask, logp: Matrix, logp_ref: Matrix) -> Matrix:
    """(log π − log π_ref)² / 2: biased in value, its gradient under π is that of KL(π‖π_ref)."""
    return log_ratio(mask, logp, logp_ref).square() / 2


def kl_k3(mask: Mask, logp: Matrix, logp_ref: Matrix) -> Matrix:
    """e^d − d − 1 with d = log π_ref − log π: unbiased, never negative; its gradient under π is that of KL(π_ref‖π)."""
    d = -log_ratio(mask, logp, logp_ref)
    return torch.expm1(d) - d


def straight_through(value: Matrix, gradient: Matrix) -> Matrix:
    """The value of one estimator with the gradient of another (verl's "k3+" is kl_k3 with the gradient of kl_k2)."""
    return gradient + (value - gradient).detach()
