"""A sampler that plays a script, worlds made of functions, and a renderer of characters, for tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from postrl.batch import Stop
from postrl.envs.base import Step
from postrl.policies.base import Completion, Key, Sampling
from postrl.policies.chat import Characters

CHARACTERS = Characters("abcdefghijklmnopqrstuvwxyz?!.0123456789 ")
END = Characters.end


def ids(text: str, end: bool = True) -> list[int]:
    return CHARACTERS.prompt([{"role": "user", "content": text}]) + ([END] if end else [])


@dataclass
class Scripted:
    """`script(text of the context, key) -> text of the completion`; one completion per poll, the youngest first.

    It refuses whatever a real sampler could not do: extend an unknown session, leave one open at a refresh.
    """

    script: Callable[[str, Key], str]
    newest_first: bool = True
    contexts: dict[int, list[int]] = field(default_factory=dict)
    queue: list[tuple[int, Key, Sampling, bool]] = field(default_factory=list)
    submitted: list[tuple[list[int], Key, int, bool]] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)  # kept open between turns
    polls: int = 0

    def submit(
        self, tokens: Sequence[int], key: Key, sampling: Sampling, session: int | None = None, keep: bool = False
    ) -> int:
        if session is None:
            session = len(self.submitted)
            self.contexts[session] = []
        else:
            self.waiting.remove(session)
        self.contexts[session].extend(tokens)
        self.submitted.append((list(tokens), key, session, keep))
        self.queue.append((session, key, sampling, keep))
        return session

    def poll(self) -> list[Completion]:
        if not self.queue:
            return []
        self.polls += 1
        session, key, sampling, keep = self.queue.pop(-1 if self.newest_first else 0)
        tokens = ids(self.script(CHARACTERS.text(self.contexts[session]), key))
        cut = tokens[: sampling.max_tokens]
        self.contexts[session].extend(cut)
        if keep:
            self.waiting.add(session)
        stop = Stop.FINISHED if cut and cut[-1] in sampling.stop else Stop.TRUNCATED
        return [Completion(session, key, cut, [-0.5] * len(cut), stop)]

    def close(self, session: int) -> None:
        self.waiting.remove(session)

    def refresh(self) -> None:
        assert not self.waiting, "a session is still open"


@dataclass
class World:
    """An environment whose `step` is any function of the text; it counts its steps."""

    answer: Callable[[str], object] = lambda text: Step()
    item: str = "item"
    opening: str = "hello"
    info: dict[str, object] = field(default_factory=dict)
    steps: int = 0

    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.opening}]

    def step(self, text: str):
        self.steps += 1
        return self.answer(text)
