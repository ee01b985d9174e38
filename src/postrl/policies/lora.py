"""Low-rank adapters (LoRA, arXiv:2106.09685) on the decoder, in PEFT's files.

A target weight W [out, in] acts as W + (alpha / rank) · B A with A [rank, in] and B [out, rank]; only A and B train.
B starts at zero, so an adapted policy starts as its base.
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from postrl.batch import Batch
from postrl.errors import UserError
from postrl.method import Forward
from postrl.policies import checkpoint_io as files
from postrl.policies.decoder import Decoder
from postrl.policies.interventions import Intervention

if TYPE_CHECKING:
    from postrl.policies.sampler import DecoderSampler

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of the tensors' names in PEFT's file
_PLAIN = {"bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False}  # what else is not read


@dataclass(frozen=True)
class LoRA:
    """What to adapt. `targets` are the last parts of the Hugging Face names of linear layers.

    dropout is of the adapter's input, in the passes of an update only: sampling, evaluation and `logp_old` have none.
    Above 0, the ratio π/π_old is therefore not 1 before the first update, and clips act on that noise too; with one
    update a step logp_old is that update's own pass, so the ratio is 1, but importance_cap sees the noise.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.targets or not 0 <= self.dropout < 1:
            raise UserError(f"LoRA needs rank ≥ 1, targets and 0 ≤ dropout < 1, not rank {self.rank}, targets "
                            f"{self.targets}, dropout {self.dropout}")  # fmt: skip


class LoRALinear(nn.Module):
    """A frozen linear layer and its adapter. `weight` is the merged one, for whoever reads weights (the sampler)."""

    def __init__(self, base: nn.Linear, lora: LoRA, generator: torch.Generator) -> None:
        super().__init__()
        dtype = torch.promote_types(base.weight.dtype, torch.float32)  # the adapter trains in float32 at least
        bound = base.in_features**-0.5
        first = torch.empty(lora.rank, base.in_features, dtype=dtype).uniform_(-bound, bound, generator=generator)
        device = base.weight.device
        self.base = base
        self.lora_A = nn.Parameter(first.to(device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, lora.rank, dtype=dtype, device=device))
        self.scale = lora.alpha / lora.rank
        self.dropout = nn.Dropout(lora.dropout)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """W + (alpha / rank) · B A."""
        return self.base.weight + (self.scale * (self.lora_B @ self.lora_A)).to(self.base.weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(self.dropout(x).to(self.lora_A.dtype), self.lora_A)
        out = self.base(x)
        return out + (self.scale * F.linear(low, self.lora_B)).to(out.dtype)


class LoRADecoder(nn.Module):
    """A decoder of which only an adapter trains: a policy (policies/base.py) that saves PEFT's two files.

    The decoder given is changed: its weights are frozen and its target layers wrapped. `base` is what PEFT will find as
    the base model's folder or name. Raises UserError naming a target the decoder has not.
    """

    def __init__(self, decoder: Decoder, lora: LoRA, base: Path | str, seed: int = 0) -> None:
        super().__init__()
        linear = [name for name, module in decoder.named_modules() if isinstance(module, nn.Linear)]
        have = sorted({_last(name) for name in linear})
        if foreign := [target for target in lora.targets if target not in have]:
            raise UserError(f"LoRA's target {foreign[0]} is no linear layer of this decoder; it has {', '.join(have)}")
        self.decoder, self.lora, self.base = decoder, lora, str(base)
        self.adapters = _wrap(decoder, [name for name in linear if _last(name) in lora.targets], lora, seed)

    @classmethod
    def load(cls, folder: Path, decoder: Decoder, base: Path | str) -> Self:
        """An adapter in PEFT's files (ours or PEFT's) onto its base decoder, to be trained further.

        Raises UserError naming the file that is missing or damaged, or the kind of adapter that is not read here.
        """
        config, tensors = files.read_json(folder / CONFIG), _read_tensors(folder / WEIGHTS)
        lora = _read_lora(folder / CONFIG, config, tensors)
        wrapped = cls.__new__(cls)
        nn.Module.__init__(wrapped)
        linear = {name for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
        names = sorted({name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors})
        if foreign := [name for name in names if name not in linear]:
            raise UserError(
                f"{folder / WEIGHTS} adapts {foreign[0]!r}, which is no linear layer of the base model {base}"
            )
        wrapped.decoder, wrapped.lora, wrapped.base = decoder, lora, str(base)
        wrapped.adapters = _wrap(decoder, names, lora, seed=0)
        for name, parameter in wrapped.tensors().items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                found = list(tensors[name].shape) if name in tensors else "missing"
                raise UserError(
                    f"{folder / WEIGHTS}: {name} is {found}, the base model {base} needs {list(parameter.shape)}"
                )
            parameter.data.copy_(tensors[name])
        return wrapped

    @property
    def context_length(self) -> int:
        return self.decoder.context_length

    def forward(self, batch: Batch, want: frozenset[str] = frozenset()) -> Forward:
        """As the decoder's."""
        return self.decoder(batch, want)

    def sampler(self, slots: int | None = None) -> "DecoderSampler":
        """As the decoder's; it samples from merged weights."""
        return self.decoder.sampler(slots)

    def with_interventions(self, *interventions: Intervention) -> AbstractContextManager[None]:
        """As the decoder's."""
        return self.decoder.with_interventions(*interventions)

    def activations(self, batch: Batch, layers: Sequence[int], at: Bool[Tensor, "B T"]) -> Float[Tensor, "layers n d"]:
        """As the decoder's."""
        return self.decoder.activations(batch, layers, at)

    def tensors(self) -> dict[str, nn.Parameter]:
        """The adapter's parameters under PEFT's names."""
        found: dict[str, nn.Parameter] = {}
        for name in self.adapters:
            layer = self.decoder.get_submodule(name)
            assert isinstance(layer, LoRALinear)
            found[f"{_PREFIX}{name}.lora_A.weight"] = layer.lora_A
            found[f"{_PREFIX}{name}.lora_B.weight"] = layer.lora_B
        return found

    def save(self, folder: Path) -> None:
        """adapter_config.json and adapter_model.safetensors, which PEFT loads onto the transformers model."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: parameter.detach().contiguous() for name, parameter in self.tensors().items()}
        files.write_file(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": self.lora.dropout,
            "target_modules": self.adapters,
            "inference_mode": True,
            **_PLAIN,
        }
        files.write_json(folder / CONFIG, config)

    def merged(self) -> Decoder:
        """A plain decoder with the adapter in its weights, for export; all of it trains again."""
        plain = copy.deepcopy(self.decoder)
        for name in self.adapters:
            layer = plain.get_submodule(name)
            assert isinstance(layer, LoRALinear)
            layer.base.weight = nn.Parameter(layer.weight.detach())
            plain.set_submodule(name, layer.base)
        return plain.requires_grad_(True)


def _wrap(decoder: Decoder, names: Sequence[str], lora: LoRA, seed: int) -> list[str]:
    """Freeze `decoder` and put adapters on the layers called `names`; returns them."""
    generator = torch.Generator().manual_seed(seed)
    decoder.requires_grad_(False)
    for name in names:
        layer = decoder.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        decoder.set_submodule(name, LoRALinear(layer, lora, generator))
    return list(names)


def _read_lora(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> LoRA:
    """The options of PEFT's adapter_config.json. Raises UserError for anything but A and B on linear layers."""
    odd = {key: config[key] for key, value in _PLAIN.items() if config.get(key, value) != value}
    odd |= {key: config[key] for key in ("rank_pattern", "alpha_pattern", "modules_to_save") if config.get(key)}
    odd |= {} if config.get("peft_type") == "LORA" else {"peft_type": config.get("peft_type")}
    foreign = [name for name in tensors if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    odd |= {"tensors": foreign} if foreign else {}
    if odd:
        key, value = next(iter(odd.items()))
        raise UserError(f"{path} is an adapter with {key} = {value!r}, which only the engine 'hf' reads")
    try:
        targets = tuple(sorted({_last(name.rpartition(".lora_")[0]) for name in tensors}))
        return LoRA(config["r"], config["lora_alpha"], config.get("lora_dropout", 0.0), targets)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged (no usable {error}); restore the adapter") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); save the adapter again as safetensors") from error


def _last(name: str) -> str:
    return name.rpartition(".")[2]
