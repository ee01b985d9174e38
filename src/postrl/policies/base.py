"""The seams of a policy: how the trainer reads it, and how anything samples from it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from postrl.batch import Batch, Stop
from postrl.errors import UserError
from postrl.method import Forward
from postrl.rollout import Message

Key = tuple[int, ...]  # (seed, step, group, sample[, turn]): what the random numbers of one completion depend on


@dataclass(frozen=True)
class Sampling:
    """How to sample. top_p < 1, top_k > 0 and temperature 0 (greedy) are for evaluation only; training refuses them.

    Raises UserError naming the option that cannot be right."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    max_tokens: int = 64
    stop: frozenset[int] = frozenset()  # any of these ends a completion, and is part of it

    def __post_init__(self) -> None:
        for name, value, fine, what in (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "a number of at least 0"),
            ("top_p", self.top_p, 0 <= self.top_p <= 1, "between 0 and 1"),
            ("top_k", self.top_k, self.top_k >= 0, "at least 0; 0 means all"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 0, "at least 0"),
        ):
            if not fine:
                raise UserError(f"option {name}={value} of sampling must be {what}")


@dataclass(frozen=True)
class Completion:
    """A finished completion. `logp` is per token, at the sampling temperature, before top-p and top-k."""

    session: int
    key: Key
    tokens: list[int]
    logp: list[float]
    stop: Stop  # FINISHED by a stop token, TRUNCATED by max_tokens or the context's end


@runtime_checkable
class Sampler(Protocol):
    """Draws completions with random numbers from `numpy.random.default_rng(key)`: results do not depend on batching."""

    def submit(
        self, tokens: Sequence[int], key: Key, sampling: Sampling, session: int | None = None, keep: bool = False
    ) -> int:
        """Queue a completion and return its session. With `session`, `tokens` extend that session's context (its keys
        and values are still there). keep=True leaves the session open after the completion; `close` it."""
        ...

    def poll(self) -> list[Completion]:
        """Work until at least one completion is finished and return the finished ones; [] if nothing is queued."""
        ...

    def close(self, session: int) -> None:
        """Free a kept session."""
        ...

    def refresh(self) -> None:
        """The policy's weights have changed: drop whatever was derived from the old ones. No session may be open."""
        ...


@runtime_checkable
class Policy(Protocol):
    """A language model as the trainer sees it; in practice a `torch.nn.Module`."""

    @property
    def context_length(self) -> int: ...

    def __call__(self, batch: Batch, want: frozenset[str] = frozenset()) -> Forward:
        """Log-probabilities of the masked tokens at the rows' temperature; `want` names further parts of `Forward`."""
        ...

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...

    def sampler(self) -> Sampler:
        """A sampler that draws from this policy's present weights."""
        ...

    def save(self, folder: Path) -> None:
        """A Hugging Face folder (or a PEFT adapter folder) that `load` of the same class reads back."""
        ...


def layers_of(model: nn.Module, count: int | None = None) -> nn.ModuleList:
    """A model's layers, in order: its longest list of modules that lies in no other (a layer's experts are such a list
    too). count: how many there must be, where that is known. Raises UserError if there is no such list."""
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, module))
    fitting = [module for _, module in found if len(module) == count or (count is None and len(module))]
    if not fitting:
        much = "" if count is None else f"{count} "
        kind = type(model).__name__
        raise UserError(f"a {kind} has no list of {much}layers: none can be chosen, hooked or sharded")
    return max(fitting, key=len)


@runtime_checkable
class Renderer(Protocol):
    """Text <-> tokens. A turn that exists as tokens is never tokenised again."""

    @property
    def stop(self) -> frozenset[int]:
        """Every token that ends a completion."""
        ...

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The opening context, ready for the policy to write."""
        ...

    def extend(self, context: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Tokens that follow `context` (which ends with a sampled turn) so that the policy can answer `messages`."""
        ...

    def answer(self, text: str) -> list[int]:
        """A completion as it would be sampled: the tokens of a text that exists already, and one that ends the turn."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Readable text of a completion, without stop tokens."""
        ...
