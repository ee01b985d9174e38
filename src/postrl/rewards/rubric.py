"""A rubric: an ordered set of named reward functions. It never sums; papers do."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from postrl.rollout import Rollout

Score = float | None  # None = missing: the unit leaves every statistic
RolloutReward = Callable[[Rollout], Score | Awaitable[Score]]
GroupReward = Callable[[Sequence[Rollout]], Sequence[Score] | Awaitable[Sequence[Score]]]


@dataclass(frozen=True)
class Reward:
    """A named component. `weight` is how much it counts in training (0 = logged only); `per` says what `fn` takes."""

    name: str
    fn: RolloutReward | GroupReward
    weight: float = 1.0
    per: Literal["rollout", "group"] = "rollout"
    timeout: float = 60.0  # seconds; running out of them is a missing score


@dataclass(frozen=True)
class Rubric:
    """The components in order."""

    rewards: tuple[Reward, ...]
