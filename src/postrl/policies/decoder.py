"""The fast decoder: Llama, SmolLM2, Qwen2 and Qwen3 in one short file, for training and (in sampler.py) sampling.

Modules and parameters carry Hugging Face's names, so checkpoints are read and written bit for bit and adapters find
their layers. Training runs on packed tokens: no padding, shared prefixes once, and only positions that predict a
sampled token meet the head.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from postrl.batch import Batch
from postrl.errors import UserError
from postrl.method import Forward
from postrl.policies import checkpoint_io as files
from postrl.policies.attention import PackedAttention, angles
from postrl.policies.decoder_config import DecoderConfig, inverse_frequencies
from postrl.policies.head import head, logits
from postrl.policies.interventions import NONE, Changes, Intervention, Reader, changed, scope
from postrl.policies.packing import Packed, pack
from postrl.policies.remade import remade

if TYPE_CHECKING:
    from postrl.policies.sampler import DecoderSampler

PARTS = frozenset({"entropy", "logits", "hidden"})


class Norm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467), computed in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return _Normalise.apply(x, self.weight, self.eps)[0]

    def again(self, x: Tensor, product: torch.dtype) -> tuple[Tensor, AbstractContextManager[object]]:
        """`self(x)` in the type of the products that read it, and a context in which they need not keep it."""
        y, scale = _Normalise.apply(x, self.weight, self.eps)
        y, x, weight = y.to(product), x.detach(), self.weight.detach()
        return y, remade(y, lambda: _normalised(x, scale, weight).to(product))


def _normalised(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    return (x * scale).to(x.dtype).mul_(weight)


class _Normalise(torch.autograd.Function):
    """y = w·x·r with r = 1/√(mean x² + ε), and r; by hand, because autograd would keep three more copies of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        scale = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.mark_non_differentiable(scale)
        return _normalised(x, scale, weight), scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, scale = ctx.saved_tensors
        unit, grad = x * scale, grads[0]
        grad_weight = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        inner = (grad * weight).to(unit.dtype)
        mean = torch.linalg.vecdot(inner, unit).div_(x.shape[-1])[..., None]
        return inner.sub_(unit.mul_(mean)).mul_(scale).to(x.dtype), grad_weight, None


class _Gate(torch.autograd.Function):
    """silu(gate)·up (Shazeer 2020, arXiv 2002.05202); keeps its two inputs and nothing else."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gate, up), grad = ctx.saved_tensors, grads[0]
        grad_up = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, wide, narrow = config.head_size, config.heads * config.head_size, config.kv_heads * config.head_size
        self.size = size
        self.q_proj = nn.Linear(config.hidden, wide, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden, narrow, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden, narrow, bias=config.qkv_bias)
        self.o_proj = nn.Linear(wide, config.hidden, bias=config.output_bias)
        self.q_norm = Norm(size, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(size, config.norm_eps) if config.qk_norm else None

    def forward(
        self, x: Tensor, again: AbstractContextManager[object], cos: Tensor, sin: Tensor, packed: Packed
    ) -> Tensor:
        with again:
            q, k, v = (project(x).unflatten(-1, (-1, self.size)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(PackedAttention.apply(q, k, v, cos, sin, packed).flatten(1))


class Mlp(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor, again: AbstractContextManager[object], lean: bool) -> Tensor:
        with again:
            gate, up = self.gate_proj(x), self.up_proj(x)
        y = _Gate.apply(gate, up)
        gate, up = gate.detach(), up.detach()
        with remade(y, lambda: _gated(gate, up)) if lean else nullcontext():
            return self.down_proj(y)


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed, product: torch.dtype, lean: bool) -> Tensor:
        """lean: keep less for the backward pass and make it again there, for about 1 % of a pass."""
        y, again = self.input_layernorm.again(x, product)
        x = x + self.self_attn(y, again if lean else nullcontext(), cos, sin, packed)
        y, again = self.post_attention_layernorm.again(x, product)
        return x + self.mlp(y, again if lean else nullcontext(), lean)


class Trunk(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config.hidden, config.norm_eps)


class Decoder(nn.Module):
    """A policy (policies/base.py). Make one with `load` or `random`.

    compute_dtype: of the matrix products (None: the weights'); weights, residual stream, norms and sums keep theirs.
    recompute: run each layer again in the backward pass instead of keeping its activations.
    """

    frequencies: Tensor

    def __init__(
        self, config: DecoderConfig, compute_dtype: torch.dtype | None = None, recompute: bool = False
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.recompute = config, compute_dtype, recompute
        self.source: Path | None = None
        self.interventions: Changes = NONE
        self.model = Trunk(config)
        self.lm_head = None if config.tied else nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.register_buffer("frequencies", inverse_frequencies(config), persistent=False)

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        recompute: bool = False,
    ) -> Self:
        """A Hugging Face folder; dtype None keeps the stored type of most weights.

        Raises UserError naming the file, option or tensor that does not fit.
        """
        config = DecoderConfig.from_huggingface(files.read_json(folder / "config.json"))
        tensors = _fitting(files.read_tensors(folder), config, folder)
        dtype = dtype or files.storage(tensors)
        with torch.device("meta"):
            decoder = cls(config, compute_dtype, recompute)
        decoder.frequencies = inverse_frequencies(config)
        wanted = {name: parameter.shape for name, parameter in decoder.named_parameters()}
        for name, shape in wanted.items():
            if name not in tensors:
                raise UserError(f"{folder} has no tensor {name!r}, which its config.json calls for")
            if tensors[name].shape != shape:
                raise UserError(
                    f"{folder}: {name!r} is {list(tensors[name].shape)}, its config.json says {list(shape)}"
                )
        if extra := sorted(set(tensors) - set(wanted)):
            raise UserError(
                f"{folder} holds {extra[0]!r}, which a {config.model_type} decoder has not; use engine 'hf'"
            )
        decoder.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
        decoder.requires_grad_(True)
        decoder.source = folder
        return decoder

    @classmethod
    def random(cls, config: DecoderConfig, seed: int, dtype: torch.dtype = torch.float32) -> Self:
        """Normal weights of standard deviation 0.02 (smaller before the residual stream, as in GPT-2), zero biases."""
        decoder = cls(config).to(dtype)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in decoder.named_parameters():
            inner = name.endswith(("o_proj.weight", "down_proj.weight"))
            if parameter.ndim == 2:
                deviation = 0.02 / (2 * config.layers) ** 0.5 if inner else 0.02
                nn.init.normal_(parameter, std=deviation, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        return decoder

    @property
    def context_length(self) -> int:
        return self.config.context

    @property
    def head_weight(self) -> Tensor:
        """[V, hidden]."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, batch: Batch, want: frozenset[str] = frozenset()) -> Forward:
        """Log-probabilities [B, T] (nats) of masked tokens at the rows' temperature (0 is read as 1), 0 elsewhere.

        want: "entropy" [B, T] nats, "hidden" [B, T, d] and "logits" [B, T, V] that predict each masked token.
        Raises ValueError for an unknown wish or a batch that `packing.pack` refuses.
        """
        if unknown := want - PARTS:
            raise ValueError(f"the decoder cannot give {sorted(unknown)}; it has {sorted(PARTS)}")
        packed = pack(batch, places=bool(self.interventions))
        hidden = self.hidden(packed).index_select(0, packed.source)
        temperature = batch.temperature[packed.row]
        temperature = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
        targets = batch.tokens[packed.row, packed.column]
        product = self.compute_dtype or self.head_weight.dtype
        logp, entropy = head(hidden, self.head_weight, targets, temperature, "entropy" in want, product)
        whole = logits(hidden, self.head_weight, temperature) if "logits" in want else None
        return Forward(
            logp=packed.grid(logp, batch),
            entropy=None if entropy is None else packed.grid(entropy, batch),
            logits=None if whole is None else packed.grid(whole, batch),
            hidden=packed.grid(hidden, batch) if "hidden" in want else None,
        )

    def with_interventions(self, *interventions: Intervention) -> AbstractContextManager[None]:
        """Inside the `with` block, training and sampling read or change hidden states (policies/interventions.py)."""
        return scope(self, self.config.layers, interventions)

    def activations(self, batch: Batch, layers: Sequence[int], at: Bool[Tensor, "B T"]) -> Float[Tensor, "layers n d"]:
        """Hidden states after these layers (0: the embeddings) at the n tokens chosen by `at`, in the order of
        `at.nonzero()`; with gradients, and after the interventions in force. Tokens after a row's last choice and
        layers after the last one do not run. Raises UserError for a layer this decoder has not, ValueError as `pack`.
        """
        readers = [Reader(layer) for layer in layers]
        with self.with_interventions(*(reader.intervention for reader in readers)):
            packed = pack(batch, at, places=True)
            self._residual(packed, max(layers, default=0))
        return torch.stack([reader.passes[0][0].index_select(0, packed.source) for reader in readers])

    def hidden(self, packed: Packed) -> Float[Tensor, "P d"]:
        """Normalised last hidden state of every packed token."""
        return self.model.norm(self._residual(packed, self.config.layers))

    def _residual(self, packed: Packed, layers: int) -> Float[Tensor, "P d"]:
        """Hidden state of every packed token after the first `layers` layers."""
        cos, sin = angles(packed.positions, self.frequencies, self.model.norm.weight.dtype)
        x, changes = self.model.embed_tokens(packed.tokens), self.interventions
        product = self.compute_dtype or x.dtype
        recompute = self.recompute and torch.is_grad_enabled()
        lean = torch.is_grad_enabled() and not recompute
        with torch.autocast(x.device.type, dtype=product, enabled=product != x.dtype):
            if 0 in changes:
                x = changed(x, changes[0], packed.places)
            for number, layer in enumerate(self.model.layers[:layers] if len(x) else (), 1):
                given = x, cos, sin, packed, product, lean
                x = checkpoint(layer, *given, use_reentrant=False) if recompute else layer(*given)
                if number in changes:
                    x = changed(x, changes[number], packed.places)
        return x

    def sampler(self, slots: int | None = None) -> "DecoderSampler":
        """Samples from the present weights, `slots` completions at a time (None: as many as pay)."""
        from postrl.policies.sampler import DecoderSampler

        return DecoderSampler(self, slots)

    def save(self, folder: Path, shard_bytes: int = 5 * 10**9) -> None:
        """A Hugging Face folder. Tokenizer and generation config come from the folder this decoder was loaded from."""
        folder.mkdir(parents=True, exist_ok=True)
        dtype = self.model.norm.weight.dtype
        if self.source is not None:
            files.copy_rest(self.source, folder)
            config = files.read_json(self.source / "config.json")
            kept = "dtype" if "dtype" in config else "torch_dtype"
            files.write_json(folder / "config.json", {**config, kept: str(dtype).removeprefix("torch.")})
        else:
            files.write_json(folder / "config.json", self.config.to_huggingface(dtype))
        files.write_tensors(folder, dict(self.named_parameters()), shard_bytes)


def _fitting(tensors: Mapping[str, Tensor], config: DecoderConfig, folder: Path) -> dict[str, Tensor]:
    """Without what some checkpoints repeat: a tied head, rotary frequencies."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    head = kept.pop("lm_head.weight", None) if config.tied else None
    if head is not None and not torch.equal(head, kept["model.embed_tokens.weight"]):
        raise UserError(f"{folder}: config.json ties the head to the embeddings, but its tensors differ")
    return kept


@lru_cache
def choose_compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 if its matrix products are at least 1.5 times as fast as float32's on this machine, else float32.

    Measured once per process, for a moment; keep the answer in a checkpoint, since numbers depend on it.
    """
    seconds = {dtype: _seconds(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    return torch.bfloat16 if seconds[torch.float32] > 1.5 * seconds[torch.bfloat16] else torch.float32


def _seconds(device: torch.device, dtype: torch.dtype) -> float:
    """The best of several products like a layer's."""
    x, weight = torch.ones(256, 768, device=device, dtype=dtype), torch.ones(2048, 768, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        F.linear(x, weight)[0, 0].item()  # the item waits for an accelerator
        best = min(best, time.perf_counter() - start)
    return best
