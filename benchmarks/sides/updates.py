"""What an optimiser did, seen from outside and in the same way on every side. Imports torch and safetensors only."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

# Many weights, some of them next to 0: a small update moves one even where all are bfloat16.
WATCHED = "model.layers.0.self_attn.q_proj.weight"
SHOWN = ("embed_tokens", "layers.0.", "norm.weight")  # parts of the names whose gradients are written


class Updates:
    """Counts updates of a model with Hugging Face's names and looks whether its weights moved; with `folder`, the first
    update's gradients go to a file there."""

    def __init__(self, model: nn.Module, folder: Path | None = None) -> None:
        self._model, self._folder = model, folder
        self._weight: Tensor = model.get_parameter(WATCHED)
        self._count, self._before = 0, self._weight.detach().clone()
        self._norm: float | None = None
        register_optimizer_step_pre_hook(self._see)

    def facts(self) -> dict[str, object]:
        """Since the last call: how many updates there were, and whether they changed the weights."""
        facts: dict[str, object] = {"updates": self._count, "moved": not torch.equal(self._before, self._weight)}
        if self._norm is not None:
            facts["whole_gradient_norm"] = self._norm
        self._count, self._before = 0, self._weight.detach().clone()
        return facts

    def _see(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._count += 1
        if self._folder is None or self._norm is not None:
            return
        gradients = {name: p.grad.float() for name, p in self._model.named_parameters() if p.grad is not None}
        self._norm = float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
        shown = {name: g.contiguous() for name, g in gradients.items() if any(part in name for part in SHOWN)}
        save_file(shown, self._folder / "gradients.safetensors")
