"""Reading and changing the hidden states of a policy, for as long as a `with` block lasts.

    with policy.with_interventions(steer(12, 4 * direction, at=sampled)):
        completions = sample(policy.sampler(), prompts, n, sampling, seed)
        logp = policy(batch).logp  # the same change, with gradients through it

Layer 0 is the embeddings, layer l the residual stream after block l; the last one is before the final norm. Every token
passes each layer once: a prompt that several completions share is changed once, for all of them. The change sees a flat
list of tokens, in whatever order suits the fast path, and must treat each token by itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from postrl.batch import Batch
from postrl.errors import UserError


@dataclass(frozen=True, eq=False)
class Places:
    """What a change may know of the n tokens it is given.

    A context's prompt ends before its first sampled token; one without sampled tokens is prompt throughout.
    """

    tokens: Int[Tensor, "n"]
    positions: Int[Tensor, "n"]  # in the context, from 0
    sampled: Bool[Tensor, "n"]  # drawn by the policy (batch.mask)
    prompt_end: Bool[Tensor, "n"]  # last token of the prompt


Change = Callable[[Tensor, Places], Tensor]
Selector = Callable[[Places], Tensor]


@dataclass(frozen=True, eq=False)
class Intervention:
    """change(hidden [n, d], places) -> [n, d] of the same type and device, differentiable, not in place."""

    layer: int
    change: Change


Changes = Mapping[int, tuple[Change, ...]]
NONE: Changes = {}


@runtime_checkable
class Intervenable(Protocol):
    """What holds interventions; no change for a layer means no work for it."""

    interventions: Changes


def everywhere(places: Places) -> Bool[Tensor, "n"]:
    return torch.ones_like(places.sampled)


def sampled(places: Places) -> Bool[Tensor, "n"]:
    """Tokens that the policy drew."""
    return places.sampled


def observed(places: Places) -> Bool[Tensor, "n"]:
    """Prompts and whatever else the policy did not draw."""
    return ~places.sampled


def prompt_end(places: Places) -> Bool[Tensor, "n"]:
    """The last token of the prompt, which predicts the first sampled one."""
    return places.prompt_end


def steer(layer: int, vector: Float[Tensor, " d"], at: Selector = everywhere) -> Intervention:
    """h + vector, for the tokens chosen by `at`; its gradient reaches `vector` too."""

    def change(hidden: Tensor, places: Places) -> Tensor:
        return hidden + at(places)[:, None] * vector.to(hidden)

    return Intervention(layer, change)


def ablate(layer: int, vector: Float[Tensor, " d"], at: Selector = everywhere) -> Intervention:
    """h − v̂ v̂ᵀ h with v̂ = vector / ‖vector‖, for the tokens chosen by `at`."""

    def change(hidden: Tensor, places: Places) -> Tensor:
        unit = torch.nn.functional.normalize(vector.to(hidden), dim=0)
        return hidden - torch.where(at(places), hidden @ unit, 0)[:, None] * unit

    return Intervention(layer, change)


class Reader:
    """Keeps what passes a layer: `hidden` [n, d] and `places` of every pass so far, in `passes`."""

    def __init__(self, layer: int) -> None:
        self.passes: list[tuple[Tensor, Places]] = []
        self.intervention = Intervention(layer, self._read)

    def _read(self, hidden: Tensor, places: Places) -> Tensor:
        self.passes.append((hidden, places))
        return hidden


@contextmanager
def scope(owner: Intervenable, layers: int, interventions: Sequence[Intervention]) -> Iterator[None]:
    """Inside, `owner` has these interventions besides those it has; afterwards, whatever happens, what it had before.

    Of one layer's changes the outer scope's come first. Raises UserError for a layer outside 0 … layers.
    """
    before, now = owner.interventions, dict(owner.interventions)
    for intervention in interventions:
        if not 0 <= intervention.layer <= layers:
            raise UserError(f"an intervention at layer {intervention.layer}: this policy has the layers 0 to {layers}")
        now[intervention.layer] = (*now.get(intervention.layer, ()), intervention.change)
    owner.interventions = now
    try:
        yield
    finally:
        owner.interventions = before


def changed(hidden: Float[Tensor, "n d"], changes: Sequence[Change], places: Places | None) -> Float[Tensor, "n d"]:
    """The hidden states after one layer's changes, in full precision under autocast too.

    Raises ValueError if the places are not known, or if a change gives another shape or type."""
    if places is None:
        raise ValueError("these tokens were packed without their places, which interventions need")
    with torch.autocast(hidden.device.type, enabled=False):
        for change in changes:
            new = change(hidden, places)
            if new.shape != hidden.shape or new.dtype != hidden.dtype:
                old, found = ((list(x.shape), x.dtype) for x in (hidden, new))
                raise ValueError(f"an intervention made {found} of hidden states {old}")
            hidden = new
    return hidden


def prompt_ends(batch: Batch) -> Bool[Tensor, "B T"]:
    """The last token of each row's prompt."""
    first = torch.where(batch.mask.any(1), batch.mask.int().argmax(1), batch.valid.sum(1))
    return torch.arange(batch.tokens.shape[1], device=first.device) == first[:, None] - 1


def apart(batch: Batch) -> Batch:
    """Rows share a prefix only if the places of its tokens are the same in all of them."""
    places = (batch.mask.int() + 2 * prompt_ends(batch).int()).tolist()
    new: dict[tuple[int, ...], int] = {}
    keys = [
        (number, *row[:length])
        for number, length, row in zip(batch.prefix_id.tolist(), batch.prefix_length.tolist(), places, strict=True)
    ]
    ids = [new.setdefault(key, len(new)) for key in keys]
    return replace(batch, prefix_id=torch.tensor(ids, dtype=torch.int64, device=batch.prefix_id.device))
