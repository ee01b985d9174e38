"""Rollouts: completed interactions on the host, readable, and their way into tensors.

A rollout is one unit. It has one context (a list of turns that extend one another token by token) unless its history
was edited on the way; then each context becomes a row of its own.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from postrl.batch import Batch, Kind, Stop
from postrl.errors import UserError
from postrl.files import as_fields

Message = dict[str, str]  # {"role": ..., "content": ...}


@dataclass
class Turn:
    """A run of tokens from one writer: the trained policy (`sampled`) or anything else (prompt, tool, user)."""

    tokens: list[int]
    sampled: bool
    text: str = ""
    logp: list[float] = field(default_factory=list)  # of each token, by the sampler; only if sampled

    def __post_init__(self) -> None:
        if self.sampled and len(self.logp) != len(self.tokens):
            raise ValueError(f"a sampled turn has {len(self.tokens)} tokens but {len(self.logp)} log-probabilities")


@dataclass
class Rollout:
    """One completed interaction.

    item: stable name of the problem (content hash). group: which rollouts it is compared with, and sample its number
    among them. groups: further groupings by name. rewards: raw components by name, None = missing. reward_weights: how
    much each counts in training; 1 where not named, 0 = only logged. info: what the environment knows (the answer, …).
    """

    item: str
    group: int
    sample: int
    contexts: list[list[Turn]]
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward_weights: dict[str, float] = field(default_factory=dict)
    step_rewards: list[float] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)
    kind: Kind = Kind.ROLLOUT
    stop: Stop = Stop.FINISHED
    version: int = 0
    temperature: float = 1.0
    messages: list[Message] = field(default_factory=list)
    info: dict[str, object] = field(default_factory=dict)

    @property
    def completion(self) -> str:
        """Text of the last sampled turn; the answer of a single-turn rollout."""
        return next((t.text for t in reversed(self.contexts[-1]) if t.sampled), "") if self.contexts else ""

    def sampled_tokens(self) -> int:
        return sum(len(t.tokens) for turns in self.contexts for t in turns if t.sampled)


@runtime_checkable
class Source(Protocol):
    """What the loop asks for rollouts, once per step or more often. `state_dict` is plain JSON."""

    def __call__(self, step: int) -> list[Rollout]: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


def from_json(fields: Mapping[str, Any]) -> Rollout:
    """A rollout from its fields (`as_fields`, `asdict`), through JSON or not. Raises what its constructors raise."""
    contexts = [[Turn(**turn) for turn in turns] for turns in fields["contexts"]]
    rest = {name: value for name, value in fields.items() if name not in ("contexts", "kind", "stop")}
    return Rollout(contexts=contexts, kind=Kind(fields["kind"]), stop=Stop(fields["stop"]), **rest)


def write_jsonl(path: Path, rollouts: Iterable[Rollout]) -> None:
    """One rollout per line."""
    with path.open("w", encoding="utf-8") as file:
        for rollout in rollouts:
            file.write(json.dumps(rollout, default=as_fields, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[Rollout]:
    """What `write_jsonl` wrote. Raises UserError naming the file and line that is not a rollout."""
    rollouts = []
    # As bytes, whose lines end at "\n" only: text may hold other separators (U+2028) that text lines would be cut at.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                rollouts.append(from_json(json.loads(line)))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise UserError(f"{path}, line {number}: not a rollout ({error})") from error
    return rollouts


def collate(rollouts: Sequence[Rollout]) -> Batch:
    """Rollouts -> Batch. `logp_old` starts as the sampler's; the loop replaces it by the training forward's.

    `step_groups` numbers the observation that each sampled turn answers, over all rollouts; −1 where there is no turn.

    Raises ValueError naming the item if a turn's log-probabilities are not one per token, or the rollouts name
    different reward components, weights or groupings; and if there are no rollouts, or no tokens in any.
    """
    if not any(turn.tokens for rollout in rollouts for turns in rollout.contexts for turn in turns):
        raise ValueError(f"{len(rollouts)} rollouts without a single token: nothing to collate")
    first = rollouts[0]
    for rollout in rollouts:
        for turn in (turn for turns in rollout.contexts for turn in turns if turn.sampled):
            if len(turn.logp) != len(turn.tokens):
                counts = f"{len(turn.tokens)} tokens but {len(turn.logp)} log-probabilities"
                raise ValueError(f"item {rollout.item!r}, sample {rollout.sample}: a sampled turn has {counts}")
        for what in ("rewards", "reward_weights", "groups"):
            here, there = getattr(first, what), getattr(rollout, what)
            if (list(here) != list(there)) if what != "reward_weights" else (here != there):
                raise ValueError(f"item {rollout.item!r} has {what} {there}, item {first.item!r} has {here}")
    rows = [(unit, turns) for unit, rollout in enumerate(rollouts) for turns in rollout.contexts]
    names = tuple(first.rewards)
    rewards = [[torch.nan if r.rewards[n] is None else r.rewards[n] for n in names] for r in rollouts]
    anchors = _anchors(rollouts)
    steps = max(max(len(r.step_rewards), len(a)) for r, a in zip(rollouts, anchors, strict=True))
    padded = [r.step_rewards + [torch.nan] * (steps - len(r.step_rewards)) for r in rollouts]
    groups = [[rollout.group, *rollout.groups.values()] for rollout in rollouts]
    return Batch(
        **_token_fields(rows, [rollouts[unit].temperature for unit, _ in rows]),
        unit=torch.tensor([unit for unit, _ in rows], dtype=torch.int64),
        groups=torch.tensor(groups, dtype=torch.int64),
        rewards=torch.tensor(rewards, dtype=torch.float32).reshape(len(rollouts), len(names)),
        reward_weights=torch.tensor([first.reward_weights.get(n, 1.0) for n in names], dtype=torch.float32),
        kind=torch.tensor([r.kind for r in rollouts], dtype=torch.int8),
        version=torch.tensor([r.version for r in rollouts], dtype=torch.int64),
        stop=torch.tensor([r.stop for r in rollouts], dtype=torch.int8),
        group_names=("task", *first.groups),
        reward_names=names,
        step_rewards=torch.tensor(padded, dtype=torch.float32) if any(r.step_rewards for r in rollouts) else None,
        step_groups=torch.tensor([a + [-1] * (steps - len(a)) for a in anchors], dtype=torch.int64) if steps else None,
    )


def _anchors(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """For each rollout, the number of the observation that each step answers: equal observations, equal numbers.

    An observation is what others wrote since the turn before: its text, or its tokens where no text was kept. The steps
    of a rollout with several contexts are those of the first context that has them.
    """
    numbers: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
    out = []
    for rollout in rollouts:
        steps: list[int] = []
        for turns in rollout.contexts:
            number, heard = 0, []
            for turn in turns:
                if not turn.sampled:
                    heard.append(turn)
                    continue
                key = tuple(t.text for t in heard), tuple(i for t in heard if not t.text for i in t.tokens)
                if number == len(steps):
                    steps.append(numbers.setdefault(key, len(numbers)))
                number, heard = number + 1, []
        out.append(steps)
    return out


def _token_fields(rows: list[tuple[int, list[Turn]]], temperature: list[float]) -> Mapping[str, Tensor]:
    B, T = len(rows), max((sum(len(t.tokens) for t in turns) for _, turns in rows), default=0)
    # numpy's: a tensor takes ten times as long to be told a slice
    tokens, segment = np.zeros((B, T), np.int64), np.full((B, T), -1, np.int32)
    valid, mask, logp = np.zeros((B, T), bool), np.zeros((B, T), bool), np.zeros((B, T), np.float32)
    prefixes: dict[tuple[int, ...], int] = {}
    prefix_id, prefix_length = [], []
    for b, (_, turns) in enumerate(rows):
        ids = [token for turn in turns for token in turn.tokens]
        tokens[b, : len(ids)], valid[b, : len(ids)] = ids, True
        start, number = 0, 0
        for turn in turns:
            end = start + len(turn.tokens)
            if turn.sampled:
                mask[b, start:end], segment[b, start:end] = True, number
                logp[b, start:end] = turn.logp
                number += 1
            start = end
        prefix = tuple(token for turn in takewhile(lambda turn: not turn.sampled, turns) for token in turn.tokens)
        prefix_id.append(prefixes.setdefault(prefix, len(prefixes)))
        prefix_length.append(len(prefix))
    return {
        "tokens": torch.from_numpy(tokens),
        "valid": torch.from_numpy(valid),
        "mask": torch.from_numpy(mask),
        "segment": torch.from_numpy(segment),
        "prefix_id": torch.tensor(prefix_id, dtype=torch.int64),
        "prefix_length": torch.tensor(prefix_length, dtype=torch.int64),
        "temperature": torch.tensor(temperature, dtype=torch.float32),
        "logp_sampler": torch.from_numpy(logp),
        "logp_old": torch.from_numpy(logp.copy()),
    }
