"""The control of what studies train on: the same rewards, dealt anew, so that they say nothing about an answer."""

from collections.abc import Mapping, Sequence

import numpy as np

from postrl.rollout import Rollout, Source


def deal(rollouts: Sequence[Rollout], key: Sequence[int]) -> None:
    """In place: the rewards of every group go to its members in an order that follows from the key."""
    rng = np.random.default_rng(list(key))
    for group in sorted({rollout.group for rollout in rollouts}):
        members = [rollout for rollout in rollouts if rollout.group == group]
        dealt = [members[int(i)].rewards for i in rng.permutation(len(members))]
        for rollout, rewards in zip(members, dealt, strict=True):
            rollout.rewards = rewards


class Dealt:
    """A source whose rewards are dealt anew in every step."""

    def __init__(self, source: Source, seed: int) -> None:
        self.source, self.seed = source, seed

    def __call__(self, step: int) -> list[Rollout]:
        rollouts = self.source(step)
        deal(rollouts, (self.seed, step))
        return rollouts

    def state_dict(self) -> dict[str, object]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.source.load_state_dict(state)
