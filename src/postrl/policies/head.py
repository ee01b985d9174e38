"""The language-model head in chunks: log-probability and entropy of n predictions without their [n, V] logits.

logp = z_y − log Σ_v e^{z_v} and H = log Σ_v e^{z_v} − Σ_v p_v z_v with z = W h / temperature. The backward pass makes
each chunk's logits again: ∂logp/∂z_v = 1[v = y] − p_v and ∂H/∂z_v = −p_v (log p_v + H).
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_BYTES = 32 * 2**20  # of one chunk's logits


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        product: torch.dtype,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        logp = torch.empty(len(hidden), dtype=_wide(hidden.dtype), device=hidden.device)
        uncertainty = torch.empty_like(logp) if entropy else None
        total = torch.empty_like(logp)
        cast = weight.to(product)
        for part in _chunks(len(hidden), len(weight), logp.element_size()):
            logits = _logits(hidden[part], cast, temperature[part])
            chosen = logits.gather(1, targets[part, None])[:, 0]
            top = logits.amax(1)
            raw = logits if uncertainty is None else logits.clone()
            total[part] = raw.sub_(top[:, None]).exp_().sum(1).log_().add_(top)
            logp[part] = chosen - total[part]
            if uncertainty is not None:
                mean = torch.linalg.vecdot(raw, logits) / raw.sum(1)
                uncertainty[part] = total[part] - mean
        ctx.save_for_backward(hidden, weight, targets, temperature, total, uncertainty)
        ctx.product = product
        return logp, uncertainty

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_logp, grad_entropy = grads
        hidden, weight, targets, temperature, total, uncertainty = ctx.saved_tensors
        cast = weight.to(ctx.product)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(hidden), len(weight), total.element_size()):
            logits = _logits(hidden[part], cast, temperature[part]).sub_(total[part, None])
            grad = -grad_logp[part] if grad_logp is not None else torch.zeros_like(total[part])
            if uncertainty is None or grad_entropy is None:
                inner = logits.exp_().mul_((grad / temperature[part])[:, None])
            else:
                slope = grad[:, None] - grad_entropy[part, None] * (logits + uncertainty[part, None])
                inner = logits.exp_().mul_(slope).div_(temperature[part, None])
            inner.scatter_add_(1, targets[part, None], (-grad / temperature[part])[:, None])
            inner = inner.to(cast.dtype)
            grad_hidden[part] = inner @ cast
            if grad_weight is not None:
                _add_product(grad_weight, inner, hidden[part])
        return grad_hidden, grad_weight, None, None, None, None


def head(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "V d"],
    targets: Int[Tensor, "n"],
    temperature: Float[Tensor, "n"],
    entropy: bool = False,
    product: torch.dtype | None = None,
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"] | None]:
    """Log-probability (nats) of each target and, if asked for, the entropy (nats) of each prediction; both have
    gradients. `product` is the type of the matrix products; sums are float32 at least."""
    temperature = temperature.to(_wide(hidden.dtype))
    return _ChunkedHead.apply(hidden, weight, targets, temperature, product or weight.dtype, entropy)


def logits(hidden: Float[Tensor, "n d"], weight: Float[Tensor, "V d"], temperature: Float[Tensor, "n"]) -> Tensor:
    """[n, V] logits over temperature, for the few callers that need every entry."""
    return (hidden @ weight.T.to(hidden.dtype)) / temperature.to(hidden.dtype)[:, None]


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    return (hidden.to(weight.dtype) @ weight.T).to(temperature.dtype).div_(temperature[:, None])


def _add_product(total: Tensor, inner: Tensor, hidden: Tensor) -> None:
    if inner.dtype == total.dtype:
        total.addmm_(inner.T, hidden.to(total.dtype))
    else:
        total.add_(inner.T @ hidden.to(inner.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(rows: int, width: int, size: int) -> list[slice]:
    step = max(1, CHUNK_BYTES // (width * size))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
