"""A world of two turns: a secret is told only after the first answer, and the second answer must repeat it.

The prompt says nothing about the secret, so a policy that does better than chance has read the world's message.
"""

from itertools import product

from postrl.envs.base import Split, Step, content_hash, digest, split_of
from postrl.envs.single_turn import epoch_position
from postrl.errors import UserError
from postrl.rewards.rubric import Reward, Rubric
from postrl.rollout import Message, Rollout


def correct(rollout: Rollout) -> float:
    """1 if the last turn is the secret, exactly."""
    return float(rollout.completion.strip() == rollout.info["answer"])


class Secret:
    """Asks for anything, tells the secret, hears the second turn. Step rewards: 0, then whether it was right."""

    def __init__(self, item: str, opening: str, secret: str) -> None:
        self.item, self.info = item, {"answer": secret}
        self._opening, self._secret, self._told = opening, secret, False

    def prompt(self) -> list[Message]:
        return [{"role": "user", "content": self._opening}]

    def step(self, text: str) -> Step:
        if self._told:
            return Step(reward=float(text.strip() == self._secret))
        self._told = True
        return Step(messages=({"role": "user", "content": self._secret},), done=False, reward=0.0)


class TwoTurn:
    """Every secret of `length` characters of `alphabet`, in seeded epochs; the opening is the same for all."""

    max_turns = 2
    rubric = Rubric((Reward("correct", correct),))

    def __init__(
        self, length: int = 1, alphabet: str = "abcd", *, opening: str = "?", test_share: float = 0.1, seed: int = 0
    ) -> None:
        self.name, self.seed, self._opening = f"secret of {length} of {alphabet}", seed, opening
        self._secrets: dict[Split, list[str]] = {"train": [], "test": []}
        for letters in product(alphabet, repeat=length):
            self._secrets[split_of(content_hash("".join(letters)), test_share)].append("".join(letters))

    @property
    def fingerprint(self) -> str:
        return digest([self.name, self.seed, self._opening, self._secrets])

    def size(self, split: Split) -> int:
        return len(self._secrets[split])

    def environment(self, split: Split, index: int) -> Secret:
        secrets = self._secrets[split]
        if not secrets:
            raise UserError(f"task {self.name!r} has no {split} problems; use a longer secret or another test_share")
        secret = secrets[epoch_position(index, len(secrets), self.seed, split)]
        return Secret(content_hash(secret), self._opening, secret)
