"""Worlds: an environment is one problem, used once; a task is a numbered supply of them."""

import hashlib
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from postrl.files import as_fields
from postrl.rewards.rubric import Rubric
from postrl.rollout import Message

Split = Literal["train", "test"]
SPLIT_NUMBER: Mapping[Split, int] = {"train": 0, "test": 1}  # for seeds


@dataclass(frozen=True)
class Step:
    """The world's answer to a turn: messages the policy reads next (masked in training), or the end."""

    messages: tuple[Message, ...] = ()
    done: bool = True
    reward: float | None = None  # of this step, for methods with turn-level credit


@runtime_checkable
class Environment(Protocol):
    """One problem, used once. Everything it draws comes from `default_rng([seed, split, index])`."""

    @property
    def item(self) -> str:
        """Stable name: a hash of the content, the same in every run."""
        ...

    @property
    def info(self) -> Mapping[str, object]:
        """What the rewards need to know (the right answer, …); plain JSON values."""
        ...

    def prompt(self) -> list[Message]: ...

    def step(self, text: str) -> Step | Awaitable[Step]: ...


@runtime_checkable
class Task(Protocol):
    """A numbered supply of problems. `environment(split, i)` is a fresh environment each time, the same problem for the
    same i; distinct problems until the supply is exhausted, then a new epoch."""

    @property
    def name(self) -> str: ...

    @property
    def rubric(self) -> Rubric: ...

    @property
    def max_turns(self) -> int:
        """Most turns of the policy in one environment; 1 for question and answer."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of all that the problems and their order depend on: a resumed run must meet the same ones."""
        ...

    def size(self, split: Split) -> int | None:
        """Number of distinct problems; None if unbounded. May take time: a generated task draws them to count them."""
        ...

    def environment(self, split: Split, index: int) -> Environment: ...


def digest(value: object) -> str:
    """SHA-256, in hexadecimal digits, of plain JSON and records (dataclasses) of it, which count as their fields."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=as_fields).encode()).hexdigest()


def content_hash(text: str) -> str:
    """Name of a problem: 16 hexadecimal digits of the SHA-256 of its text, whatever its white space."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


def split_of(item: str, test_share: float = 0.1) -> Split:
    """The split of a problem, from its content hash alone: the same in every run, for every seed and every order."""
    return "test" if int(item, 16) / 16**16 < test_share else "train"
