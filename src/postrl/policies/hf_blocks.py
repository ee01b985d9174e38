"""Interventions on a Hugging Face model: hooks on its blocks that exist during one forward pass and no longer."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from transformers import PreTrainedModel

from postrl.errors import UserError
from postrl.policies.base import layers_of
from postrl.policies.interventions import Change, Changes, Places, changed


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The model's layers, in order. Raises UserError if they are not found where every usual architecture has them."""
    return layers_of(model.base_model, model.config.get_text_config().num_hidden_layers)


@contextmanager
def hooked(model: PreTrainedModel, changes: Changes, places: Places, real: Bool[Tensor, "b t"]) -> Iterator[None]:
    """Inside, forward passes over [b, t] tokens go through `changes`. places: of the tokens where `real` (no padding),
    in row-major order."""
    with ExitStack() as stack:
        for layer, block in enumerate(blocks(model), 1) if changes else ():
            if layer == 1 and 0 in changes:
                before = partial(_before, changes[0], places, real)
                stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            if layer in changes:
                stack.callback(block.register_forward_hook(partial(_after, changes[layer], places, real)).remove)
        yield


@torch.no_grad()
def check_blocks(model: PreTrainedModel) -> None:
    """Raises UserError if what passes between the blocks is not what transformers calls their hidden states."""
    device = next(model.parameters()).device
    tokens = (torch.arange(6, device=device) % model.config.get_text_config().vocab_size)[None]
    seen: list[Tensor] = []

    def read(hidden: Tensor, places: Places) -> Tensor:
        seen.append(hidden)
        return hidden

    flags = torch.zeros(6, dtype=torch.bool, device=device)
    places = Places(tokens[0], torch.arange(6, device=device), flags, flags)
    everything = {layer: (read,) for layer in range(len(blocks(model)) + 1)}
    with hooked(model, everything, places, torch.ones_like(tokens, dtype=torch.bool)):
        expected = model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    # The last of transformers' hidden states is after the final norm, so it is not compared.
    same = len(seen) == len(everything) and all(
        torch.equal(x, y[0]) for x, y in zip(seen[:-1], expected[:-1], strict=False)
    )
    if not same:
        kind = model.config.model_type
        raise UserError(f"the hidden states of a {kind} model cannot be reached through its blocks: use another model")


def _before(
    changes: Sequence[Change], places: Places, real: Tensor, block: nn.Module, args: tuple, options: dict
) -> Any:
    if args:
        return (_grid(args[0], changes, places, real), *args[1:]), options
    return args, {**options, "hidden_states": _grid(options["hidden_states"], changes, places, real)}


def _after(changes: Sequence[Change], places: Places, real: Tensor, block: nn.Module, args: tuple, out: Any) -> Any:
    if isinstance(out, tuple):
        return (_grid(out[0], changes, places, real), *out[1:])
    return _grid(out, changes, places, real)


def _grid(hidden: Tensor, changes: Sequence[Change], places: Places, real: Tensor) -> Tensor:
    """[b, t, d] with the real tokens changed."""
    return hidden.masked_scatter(real[..., None], changed(hidden[real], changes, places))
