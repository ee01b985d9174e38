"""The decoder's arithmetic while sampling: prompts and extensions (many tokens each), decode steps (one token each)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from postrl.policies.attention import angles, attend, merge, rotate
from postrl.policies.cache import Cache, Prefix
from postrl.policies.decoder import Decoder, Layer, Norm
from postrl.policies.interventions import Places, changed
from postrl.policies.products import Product, product


@dataclass(frozen=True, eq=False)
class LayerWeights:
    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    layer: Layer  # for its norms


@runtime_checkable
class Linear(Protocol):
    """nn.Linear, or an adapter around one whose `weight` and `bias` are what the two amount to now."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


def fuse(*linears: Linear, dtype: torch.dtype, rows: int) -> Product:
    """Linear layers of one input as one product, made for about `rows` rows."""
    weights = [linear.weight.detach().to(dtype) for linear in linears]
    biases = [linear.bias.detach().to(dtype) for linear in linears if linear.bias is not None]
    if len(weights) == 1:
        return product(weights[0], biases[0] if biases else None, rows)
    return product(torch.cat(weights), torch.cat(biases) if biases else None, rows)


@dataclass(frozen=True, eq=False)
class Span:
    """New tokens of one context: `past` keys and values [layers, kv, m, D] come before them. The first of them may be
    a `sampled` one that had not run yet."""

    tokens: list[int]
    past: tuple[Tensor, Tensor] | None = None
    sampled: bool = False

    @property
    def start(self) -> int:
        return 0 if self.past is None else self.past[0].shape[2]


@dataclass(frozen=True, eq=False)
class Shared:
    """Which of n decoding rows read which prefix: rows `order[a:b]` read `prefix`, for each (prefix, a, b)."""

    order: Tensor  # int64 [m]
    parts: list[tuple[Prefix, int, int]]


class Engine:
    """The weights of a decoder, fused for sampling about `rows` completions at once. Made anew when they change."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self.decoder, self.device = decoder, decoder.head_weight.device
        self.dtype = decoder.compute_dtype or decoder.head_weight.dtype
        config = decoder.config
        self.heads, self.kv, self.size = config.heads, config.kv_heads, config.head_size
        self.layers = [self._layer(cast(Layer, layer), rows) for layer in decoder.model.layers]
        self.head = product(decoder.head_weight.detach().to(self.dtype), None, rows)

    def _layer(self, layer: Layer, rows: int) -> LayerWeights:
        attention, mlp, dtype = layer.self_attn, layer.mlp, self.dtype
        return LayerWeights(
            qkv=fuse(attention.q_proj, attention.k_proj, attention.v_proj, dtype=dtype, rows=rows),
            out=fuse(attention.o_proj, dtype=dtype, rows=rows),
            gate_up=fuse(mlp.gate_proj, mlp.up_proj, dtype=dtype, rows=rows),
            down=fuse(mlp.down_proj, dtype=dtype, rows=rows),
            layer=layer,
        )

    def _project(self, weights: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = weights.layer.self_attn
        qkv = weights.qkv(_norm(weights.layer.input_layernorm, x).to(self.dtype)).unflatten(-1, (-1, self.size))
        qk, v = qkv.split((self.heads + self.kv, self.kv), 1)
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = qk.split((self.heads, self.kv), 1)
            qk = torch.cat((_norm(attention.q_norm, q), _norm(attention.k_norm, k)), 1)
        q, k = rotate(qk, cos, sin).split((self.heads, self.kv), 1)
        return q, k, v

    def _rest(self, weights: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        x = x + weights.out(attended.flatten(1))
        gate, up = weights.gate_up(_norm(weights.layer.post_attention_layernorm, x).to(self.dtype)).chunk(2, -1)
        return x + weights.down(F.silu(gate).mul_(up))

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.head(_norm(self.decoder.model.norm, x).to(self.dtype))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _start(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.embedding(tokens, self.decoder.model.embed_tokens.weight)
        return x, *angles(positions, self.decoder.frequencies, x.dtype)

    @torch.no_grad()
    def prefill(self, spans: Sequence[Span]) -> tuple[Float[Tensor, "spans V"], list[tuple[Tensor, Tensor]]]:
        """Logits after each span's last token; keys and values [layers, kv, tokens, D] of its tokens."""
        device, lengths = self.device, [len(span.tokens) for span in spans]
        tokens = torch.tensor([token for span in spans for token in span.tokens], device=device)
        places = [torch.arange(span.start, span.start + len(span.tokens), device=device) for span in spans]
        changes, known = self.decoder.interventions, None
        positions, ends = torch.cat(places), torch.tensor(lengths, device=device).cumsum(0) - 1
        if changes:
            known = _span_places(spans, tokens, positions, ends)
        x, cos, sin = self._start(tokens, positions)
        if 0 in changes:
            x = changed(x, changes[0], known)
        made: list[list[tuple[Tensor, Tensor]]] = [[] for _ in spans]
        for number, weights in enumerate(self.layers):
            q, k, v = self._project(weights, x, cos, sin)
            attended = []
            for i, parts in enumerate(zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)):
                attended.append(_attend_span(*parts, spans[i], number))
                # Copies: a view would keep this layer's queries until the last layer has run.
                made[i].append((parts[1].transpose(0, 1).clone(), parts[2].transpose(0, 1).clone()))
            x = self._rest(weights, x, torch.cat(attended))
            if number + 1 in changes:
                x = changed(x, changes[number + 1], known)
        stacked = [(torch.stack([k for k, _ in own]), torch.stack([v for _, v in own])) for own in made]
        return self._logits(x[ends]), stacked

    @torch.no_grad()
    def decode(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, cache: Cache, shared: Shared | None
    ) -> Float[Tensor, "n V"]:
        """Logits after one more token in each of the first n slots.

        tokens, positions, lengths int64 [n]: the token, its position in the context, tokens already in its slot.
        """
        n, room = len(tokens), cache.room
        x, cos, sin = self._start(tokens, positions)
        changes, known = self.decoder.interventions, None
        if changes:
            yes = torch.ones(n, dtype=torch.bool, device=tokens.device)
            known = Places(tokens, positions, yes, ~yes)
        if 0 in changes:
            x = changed(x, changes[0], known)
        longest = int(lengths.max()) + 1
        rows = torch.arange(n * self.kv, device=tokens.device).view(n, self.kv) * room
        place = (rows + lengths[:, None]).flatten()
        hidden = torch.arange(longest, device=tokens.device) > lengths[:, None]
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=tokens.device).masked_fill_(hidden, -torch.inf)
        bias = bias[:, None, None]
        for number, weights in enumerate(self.layers):
            q, k, v = self._project(weights, x, cos, sin)
            keys, values = cache.keys[number], cache.values[number]
            keys.view(-1, self.size).index_copy_(0, place, k.reshape(-1, self.size))
            values.view(-1, self.size).index_copy_(0, place, v.reshape(-1, self.size))
            keys, values = keys[:n, :, :longest].transpose(1, 2), values[:n, :, :longest].transpose(1, 2)
            # The query heads of one key head as its rows: with two threads the kernel takes a third less time.
            together = q.unflatten(1, (self.kv, -1)).transpose(1, 2)
            out, lse = attend(together, keys, values, bias=bias)
            out, lse = out.transpose(1, 2).flatten(1, 2), lse.transpose(1, 2).flatten(1)
            if shared is not None:
                out = _attend_shared(q, out, lse, shared, number)
            x = self._rest(weights, x, out)
            if number + 1 in changes:
                x = changed(x, changes[number + 1], known)
        return self._logits(x)


def _span_places(spans: Sequence[Span], tokens: Tensor, positions: Tensor, ends: Tensor) -> Places:
    sampled, prompt_end = (torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device) for _ in range(2))
    for span, end in zip(spans, ends.tolist(), strict=True):
        if span.sampled:
            sampled[end + 1 - len(span.tokens)] = True
        elif span.past is None:
            prompt_end[end] = True
    return Places(tokens, positions, sampled, prompt_end)


def _norm(norm: Norm, x: Tensor) -> Tensor:
    """`norm(x)` without a gradient, in half the time."""
    return F.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.eps)


def _attend_span(q: Tensor, k: Tensor, v: Tensor, span: Span, layer: int) -> Tensor:
    """[n, H, D] for one span's n tokens."""
    if span.past is None:
        return attend(q[None], k[None], v[None], causal=True)[0][0]
    past_k, past_v = (x[layer].transpose(0, 1) for x in span.past)
    n, start = len(q), span.start
    later = torch.ones(n, start + n, dtype=torch.bool, device=q.device).triu(start + 1)
    bias = torch.zeros(later.shape, dtype=q.dtype, device=q.device).masked_fill_(later, -torch.inf)
    keys, values = torch.cat([past_k, k])[None], torch.cat([past_v, v])[None]
    return attend(q[None], keys, values, bias=bias[None, None])[0][0]


def _attend_shared(q: Tensor, out: Tensor, lse: Tensor, shared: Shared, layer: int) -> Tensor:
    """Attention over a row's own keys -> over those and its prefix's. q, out [n, H, D], lse [n, H]."""
    queries = q[shared.order]
    far = [
        attend(queries[None, a:b], prefix.keys[layer].transpose(0, 1)[None], prefix.values[layer].transpose(0, 1)[None])
        for prefix, a, b in shared.parts
    ]
    outs, lses = (torch.cat([part[i][0] for part in far]) for i in (0, 1))
    near = out[shared.order], lse[shared.order]
    both = merge(near, (outs, lses))[0]
    return out.index_copy(0, shared.order, both)
