"""What a decoder is built from, and its way from and to Hugging Face's config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from postrl.errors import UserError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts: "linear" divides all of them by `factor`, "llama3" only
    the low ones (Llama 3.1), with a ramp between wavelengths original_context / high and original_context / low."""

    kind: str
    factor: float
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a Llama, SmolLM2, Qwen2 or Qwen3 decoder. Sizes are in numbers of floats, the context in tokens."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    context: int = 2048
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    model_type: str = "llama"

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> Self:
        """Raises UserError naming a model type, activation, rotary scaling or attention this decoder does not have."""
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            have = ", ".join(ARCHITECTURES)
            raise UserError(f"model_type {kind!r} is not one of the decoder's ({have}); load it with engine 'hf'")
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            rope = _rope(config)
            _refuse_foreign(config)
            llama_bias = kind != "qwen2" and bool(config.get("attention_bias", False))
            return cls(
                vocabulary=config["vocab_size"],
                hidden=hidden,
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_size=config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads),
                intermediate=config["intermediate_size"],
                context=config.get("max_position_embeddings", 2048 if kind == "llama" else 32768),
                norm_eps=config.get("rms_norm_eps", 1e-6),
                rope_theta=float(rope.get("rope_theta", 10000.0)),
                rope_scaling=_scaling(rope, config),
                tied=config.get("tie_word_embeddings", False),
                qkv_bias=kind == "qwen2" or llama_bias,
                output_bias=llama_bias,
                mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
                qk_norm=kind == "qwen3",
                model_type=kind,
            )
        except KeyError as error:
            raise UserError(f"the model's config.json lacks {error}; is it a causal language model?") from error

    def to_huggingface(self, dtype: torch.dtype) -> dict[str, Any]:
        """A config.json that transformers reads."""
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        if self.model_type != "qwen2":
            config["attention_bias"] = self.qkv_bias
        if self.model_type == "llama":
            config["mlp_bias"] = self.mlp_bias
        if self.rope_scaling is not None:
            config["rope_scaling"] = _scaling_dict(self.rope_scaling)
        return config


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` beside `rope_scaling`."""
    old = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    return {**old, **(config.get("rope_parameters") or {})}


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope["factor"])
    if kind == "llama3":
        original = rope.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        return RopeScaling("llama3", rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original)
    raise UserError(f"rope_scaling {kind!r} is not one of the decoder's (default, linear, llama3); use engine 'hf'")


def _scaling_dict(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original_context,
    }


def _refuse_foreign(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act {config['hidden_act']!r} is not silu, the decoder's; load it with engine 'hf'")
    sliding = config.get("use_sliding_window", False) or "sliding_attention" in (config.get("layer_types") or [])
    if sliding:
        raise UserError("the model uses sliding-window attention, which the decoder has not; load it with engine 'hf'")
    if config.get("quantization_config"):
        raise UserError("the model is quantised; give an unquantised checkpoint, or a GGUF file to be converted")
    if config.get("pretraining_tp", 1) != 1:
        raise UserError("pretraining_tp other than 1 is not the decoder's; load it with engine 'hf'")


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """float32 [head_size / 2]: radians per position of each rotated pair."""
    steps = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
    frequencies = 1.0 / config.rope_theta**steps
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_context * frequencies / (2 * math.pi)
    ramp = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return frequencies * (ramp + (1 - ramp) / scaling.factor)
