"""Question and answer: a whole task from a list of problems and a rubric."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from postrl.envs.base import SPLIT_NUMBER, Split, Step, content_hash, digest, split_of
from postrl.errors import UserError
from postrl.rewards.rubric import Rubric
from postrl.rollout import Message


@dataclass(frozen=True)
class Problem:
    """A question and what its rewards need to know (plain JSON values)."""

    question: str
    info: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class SingleTurn:
    """The world that asks once and is done with the first answer."""

    item: str
    messages: tuple[Message, ...]
    info: Mapping[str, object]

    def prompt(self) -> list[Message]:
        return [dict(message) for message in self.messages]

    def step(self, text: str) -> Step:
        return Step()


def ask(question: str, template: str = "{question}", system: str | None = None) -> tuple[Message, ...]:
    """The opening messages: the question in its template, after a system message if there is one.

    Raises UserError for a template without "{question}": every problem would read the same.
    """
    if "{question}" not in template:
        raise UserError(f"option template={template!r} must contain {{question}}, which stands for the problem")
    user = {"role": "user", "content": template.replace("{question}", question)}
    return (user,) if system is None else ({"role": "system", "content": system}, user)


class Problems:
    """A task made of a finite list of problems, for example

        problems = [Problem(f"{a} + {b} =", {"answer": str(a + b)}) for a in range(10) for b in range(10)]
        task = Problems("sums", problems, Rubric((Reward("correct", lambda r: r.completion == r.info["answer"]),)))

    Problems with one text are one problem; which are held out follows from their text (`split_of`). Every epoch is in
    a new order, a function of `seed`. Raises UserError if a split is asked for a problem and has none.
    """

    max_turns = 1

    def __init__(
        self,
        name: str,
        problems: Sequence[Problem],
        rubric: Rubric,
        *,
        template: str = "{question}",
        system: str | None = None,
        test_share: float = 0.1,
        seed: int = 0,
    ) -> None:
        ask("", template)  # refuses a template without a place for the problem, before anything is loaded
        self.name, self.rubric, self.seed = name, rubric, seed
        self._template, self._system = template, system
        self._items: dict[Split, list[tuple[str, Problem]]] = {"train": [], "test": []}
        for item, problem in {content_hash(p.question): p for p in problems}.items():
            self._items[split_of(item, test_share)].append((item, problem))

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @functools.cached_property  # asked for after every step, and there may be many problems
    def _fingerprint(self) -> str:
        problems = [[item, dict(problem.info)] for items in self._items.values() for item, problem in items]
        return digest([self.name, self.seed, self._template, self._system, self.rubric.names, problems])

    def size(self, split: Split) -> int:
        return len(self._items[split])

    def environment(self, split: Split, index: int) -> SingleTurn:
        items = self._items[split]
        if not items:
            raise UserError(f"task {self.name!r} has no {split} problems; give it more problems or another test_share")
        item, problem = items[epoch_position(index, len(items), self.seed, split)]
        return SingleTurn(item, ask(problem.question, self._template, self._system), dict(problem.info))


def epoch_position(index: int, size: int, seed: int, split: Split) -> int:
    """Running number -> position in a supply of `size` problems: each once per epoch, in the epoch's own order."""
    epoch, position = divmod(index, size)
    return int(_order(epoch, size, seed, split)[position])


@functools.lru_cache(maxsize=16)
def _order(epoch: int, size: int, seed: int, split: Split) -> np.ndarray:
    return np.random.default_rng([seed, SPLIT_NUMBER[split], epoch]).permutation(size)
