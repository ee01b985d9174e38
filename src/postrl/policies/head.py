"""The language-model head in chunks: log-probability and entropy of n predictions without their [n, V] logits.

logp = log softmax(z)_y and H = −Σ_v p_v log p_v with z = W h / temperature. The backward pass makes each chunk's logits
again: ∂logp/∂z_v = 1[v = y] − p_v and ∂H/∂z_v = −p_v (log p_v + H).
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_BYTES = 64 * 2**20  # of one chunk's logits in float32; each chunk adds to the whole gradient of W
SUM_BYTES = 8 * 2**20  # of one part of that gradient


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
        ctx.set_materialize_grads(False)  # an entropy that is only looked at has no gradient, rather than zeros
        logp = torch.empty(len(hidden), dtype=temperature.dtype, device=hidden.device)
        uncertainty = torch.empty_like(logp) if entropy else None
        scores = _Scores(hidden, weight, temperature, product)
        for part in _chunks(len(hidden), len(weight), logp.element_size(), CHUNK_BYTES):
            chosen = torch.log_softmax(scores[part], 1, dtype=logp.dtype)
            logp[part] = chosen.gather(1, targets[part, None])[:, 0]
            if uncertainty is not None:
                uncertainty[part] = chosen.mul_(chosen.exp()).sum(1).neg_()
        ctx.save_for_backward(hidden, weight, targets, temperature, logp, uncertainty)
        ctx.product = product
        return logp, uncertainty

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_logp, grad_entropy = grads
        hidden, weight, targets, temperature, logp, uncertainty = ctx.saved_tensors
        scores = _Scores(hidden, weight, temperature, ctx.product)
        cast = scores.weight
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(hidden), len(weight), logp.element_size(), CHUNK_BYTES):
            logits = scores[part]
            # The factor of a row goes with its hidden state, so that probabilities come from their logits in one pass.
            if grad_logp is not None:
                factor = (grad_logp[part] / temperature[part])[:, None]
                inner = torch.softmax(logits, 1).neg_().to(cast.dtype)
                inner.scatter_(1, targets[part, None], -logp[part, None].expm1().to(inner.dtype))  # 1 − p_y
                _add_products(grad_hidden, grad_weight, inner, factor, hidden, cast, part)
            if grad_entropy is not None:
                factor = (grad_entropy[part] / temperature[part])[:, None]
                inner = torch.log_softmax(logits, 1, dtype=logp.dtype)
                inner = inner.exp().mul_(inner.add_(uncertainty[part, None])).neg_().to(cast.dtype)
                _add_products(grad_hidden, grad_weight, inner, factor, hidden, cast, part)
        return grad_hidden, grad_weight, None, None, None, None


def _add_products(
    grad_hidden: Tensor,
    grad_weight: Tensor | None,
    inner: Tensor,
    factor: Tensor,
    hidden: Tensor,
    weight: Tensor,
    part: slice,
) -> None:
    """Adds the gradients that factor · inner [n, V], at the logits of `part`, gives the hidden states and W."""
    grad_hidden[part] += (inner @ weight) * factor
    if grad_weight is not None:
        rows = (hidden[part] * factor).to(inner.dtype)
        if inner.dtype == grad_weight.dtype:
            grad_weight.addmm_(inner.T, rows)
        else:  # by parts of the vocabulary, so that what is added is still in the processor's cache
            for words in _chunks(len(grad_weight), grad_weight.shape[1], grad_weight.element_size(), SUM_BYTES):
                grad_weight[words].add_(inner[:, words].T @ rows)


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
    return (hidden @ weight.T.to(hidden.dtype)) / temperature.to(_wide(hidden.dtype))[:, None]


class _Scores:
    """Logits of some rows at a time, over the temperature.

    A sampler divides the product. Dividing the hidden state instead saves a pass over [n, V], but in a type narrower
    than the sums it would round another number than the sampler's, and ratios would depart from 1 for nothing.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, temperature: Tensor, product: torch.dtype) -> None:
        self.hidden, self.weight, self.divisor = hidden.to(product), weight.to(product), None
        if product.itemsize >= temperature.dtype.itemsize:
            self.hidden = self.hidden / temperature[:, None]
        elif not bool((temperature == 1).all()):
            self.divisor = temperature[:, None]

    def __getitem__(self, part: slice) -> Tensor:
        product = self.hidden[part] @ self.weight.T
        return product if self.divisor is None else product.to(self.divisor.dtype).div_(self.divisor[part])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(rows: int, width: int, size: int, most: int) -> list[slice]:
    step = max(1, most // (width * size))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
