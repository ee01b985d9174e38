"""Attention over packed tokens in which rows that begin alike share their beginning.

A token that follows a shared prefix attends to the prefix's keys and to its own row's keys. The two parts are computed
apart and merged by their log-sum-exp; given the merged output and log-sum-exp, the backward pass of each part is exact
on its own, so the keys and values of a prefix exist once whatever the number of rows that read them.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from postrl.policies.packing import Packed


def rotate(x: Float[Tensor, "P H D"], cos: Float[Tensor, "P D"], sin: Float[Tensor, "P D"]) -> Float[Tensor, "P H D"]:
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864) of each head's first half against its second, with the signed
    sines of `angles`; computed in their type."""
    wide = x.to(cos.dtype)
    return (wide * cos[:, None]).addcmul_(wide.roll(x.shape[-1] // 2, -1), sin[:, None]).to(x.dtype)


def angles(
    positions: Int[Tensor, " P"], frequencies: Float[Tensor, " half"], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos [P, D] and sin [P, D] of the rotation to each position; the sine of the first half is negative."""
    turned = positions[:, None].float() * frequencies.float()
    cos, sin = turned.cos().to(dtype), turned.sin().to(dtype)
    return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ/√D + bias)·v and the log-sum-exp of its scores.

    q [b, L, H, D]; k, v [b, M, kv, D], where H is a multiple of kv; bias broadcasts to [b, H, L, M].
    Returns [b, L, H, D] and [b, L, H] (float32 if the inputs are bfloat16).
    """
    kernel = _flash if q.device.type == "cpu" else _plain
    out, lse = kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, bias)
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` for q, k and v; shapes as there. `out` and `lse` may be those of a larger attention of
    which these keys are a part. Scores are computed again."""
    kernel = _flash_backward if q.device.type == "cpu" else _plain_backward
    grad, q, k, v, out, lse = (x.transpose(1, 2) for x in (grad, q, k, v, out, lse))
    grads = kernel(grad, q, k, v, out, lse, causal, bias)
    return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)


# Kernels: heads before tokens. The CPU's flash kernel is called by its own name because scaled_dot_product_attention
# does not return the log-sum-exp; elsewhere plain products do the same.


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    backward, dtype = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, q.dtype
    if dtype in (torch.bfloat16, torch.float16):  # in these the kernel takes up to four times as long, measured
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
        bias = None if bias is None else bias.float()
    grads = backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias)
    return grads[0].to(dtype), grads[1].to(dtype), grads[2].to(dtype)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, bias)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(q.dtype) @ _repeat(v, q.shape[1]), lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    weights = (_scores(q, k, causal, bias) - lse[..., None]).exp()
    inner = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    weights, inner = weights.to(q.dtype), inner.to(q.dtype)
    return inner @ keys, _gather(inner.mT @ q, k.shape), _gather(weights.mT @ grad, k.shape)


def _scores(q: Tensor, k: Tensor, causal: bool, bias: Tensor | None) -> Tensor:
    scores = (q @ _repeat(k, q.shape[1]).mT) / math.sqrt(q.shape[-1])
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _gather(x: Tensor, shape: torch.Size) -> Tensor:
    return x.unflatten(1, (shape[1], -1)).sum(2)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys -> attention over both. Outputs [..., H, D], log-sum-exps [..., H]."""
    (a, lse_a), (b, lse_b) = first, second
    lse = torch.logaddexp(lse_a, lse_b)
    weight = (lse_b - lse).exp_()[..., None].to(a.dtype)
    return torch.lerp(a, b, weight), lse


class PackedAttention(torch.autograd.Function):
    """Rotary causal attention of packed q [P, H, D], k and v [P, kv, D] -> [P, H, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, packed: Packed) -> Tensor:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        outs, lses = [], []
        for block, part in ((packed.prefixes, packed.prefix_part), (packed.rows, packed.row_part)):
            if block.tokens:
                out, lse = attend(*(block.pad(x[part]) for x in (q, k, v)), causal=True)
                outs.append(block.unpad(out))
                lses.append(block.unpad(lse))
        out, lse = _cat(outs), _cat(lses)
        if packed.cross.tokens:
            queries, prefix = packed.cross.pad(q[packed.cross_part]), packed.prefix_part
            keys, values = packed.prefixes.pad(k[prefix]), packed.prefixes.pad(v[prefix])
            far = attend(queries, keys, values, bias=packed.bias(q.dtype))
            near = out[packed.cross_part], lse[packed.cross_part]
            both = merge(near, (packed.cross.unpad(far[0]), packed.cross.unpad(far[1])))
            near[0].copy_(both[0])
            near[1].copy_(both[1])
        ctx.save_for_backward(q, k, v, out, lse, cos, sin)
        ctx.packed = packed
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad: Tensor = grads[0]
        q, k, v, out, lse, cos, sin = ctx.saved_tensors
        packed: Packed = ctx.packed
        parts = []
        for block, part in ((packed.prefixes, packed.prefix_part), (packed.rows, packed.row_part)):
            if block.tokens:
                padded = (block.pad(x[part]) for x in (grad, q, k, v, out, lse))
                parts.append([block.unpad(x) for x in attend_backward(*padded, causal=True)])
        grad_q, grad_k, grad_v = (_cat(list(x)) for x in zip(*parts, strict=True))
        if packed.cross.tokens:
            cross, prefix = packed.cross_part, packed.prefix_part
            padded_grad, queries, outs, lses = (packed.cross.pad(x[cross]) for x in (grad, q, out, lse))
            keys, values = packed.prefixes.pad(k[prefix]), packed.prefixes.pad(v[prefix])
            far = attend_backward(padded_grad, queries, keys, values, outs, lses, False, packed.bias(q.dtype))
            grad_q[cross] += packed.cross.unpad(far[0])
            grad_k[prefix] += packed.prefixes.unpad(far[1])
            grad_v[prefix] += packed.prefixes.unpad(far[2])
        return rotate(grad_q, cos, -sin), rotate(grad_k, cos, -sin), grad_v, None, None, None


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
