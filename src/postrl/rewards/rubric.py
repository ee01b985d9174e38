"""A rubric: an ordered set of named reward functions. It never sums; papers do."""

import asyncio
import logging
import math
import numbers
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from postrl.batch import Stop
from postrl.errors import UserError
from postrl.rewards.foreign import TimedOut, call
from postrl.rollout import Rollout

Score = float | None  # None = missing: the unit leaves every statistic
RolloutReward = Callable[[Rollout], Score | Awaitable[Score]]
GroupReward = Callable[[Sequence[Rollout]], Sequence[Score] | Awaitable[Sequence[Score]]]

LARGEST = 1e16  # of a score: the squares of a whole group still add up in float32, so that no advantage becomes 0
CALLS = 64  # reward functions and worlds at work at the same time, unless a caller says otherwise
log = logging.getLogger(__name__)


class RewardError(UserError):
    """A reward function raised, or answered something that is no score. The run stops: a bug must not train a model."""

    def __init__(self, component: str, item: str, problem: str, details: str = "") -> None:
        sentence = (
            f"reward {component!r} {problem} on item {item!r}; repair it, or let it return None where there is no score"
        )
        super().__init__(f"{sentence}\n{details}" if details else sentence)
        self.component, self.item, self.details = component, item, details


@dataclass(frozen=True)
class Reward:
    """A named component. `weight` is how much it counts in training (0 = logged only); `per` says what `fn` takes."""

    name: str
    fn: RolloutReward | GroupReward
    weight: float = 1.0
    per: Literal["rollout", "group"] = "rollout"
    timeout: float = 60.0  # seconds; running out of them is a missing score

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise UserError(f"reward {self.name!r} has the weight {self.weight}; give a finite one, 0 to only log it")
        if not self.timeout > 0:
            raise UserError(f"reward {self.name!r} has the timeout {self.timeout}; give seconds above 0")


@dataclass(frozen=True)
class Rubric:
    """The components in order. Raises UserError if there is none or two have one name."""

    rewards: tuple[Reward, ...]

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise UserError(f"the rubric has more than one reward named {twice[0]!r}; give each its own name")
        if not self.rewards:
            raise UserError("the rubric is empty; give it at least one Reward")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(reward.name for reward in self.rewards)


async def score(rubric: Rubric, group: Sequence[Rollout], slots: asyncio.Semaphore | None = None) -> None:
    """Fill `rewards` (raw, by name, in the rubric's order; None = missing) and `reward_weights` of a whole group.

    Every component runs at the same time as the others, at most as many calls as there are `slots`. A component that
    runs out of its time is missing, with a warning in the log. A rollout that ended with an error of its world has no
    score at all. Raises RewardError if a component raises or answers NaN, infinity or a list of the wrong length.
    """
    slots = asyncio.Semaphore(CALLS) if slots is None else slots
    await gather(*(score_rollout(rubric, rollout, slots) for rollout in group))
    await score_group(rubric, group, slots)


async def score_rollout(rubric: Rubric, rollout: Rollout, slots: asyncio.Semaphore) -> None:
    """The components that look at one rollout; those that look at a group are left missing."""
    rollout.rewards = dict.fromkeys(rubric.names)
    rollout.reward_weights = {reward.name: float(reward.weight) for reward in rubric.rewards}
    if rollout.stop == Stop.ERROR:
        return
    single = [reward for reward in rubric.rewards if reward.per == "rollout"]
    scores = await gather(*(_ask(reward, rollout, rollout.item, slots, None) for reward in single))
    for reward, answer in zip(single, scores, strict=True):
        rollout.rewards[reward.name] = _checked(answer, reward.name, rollout.item)


async def score_group(rubric: Rubric, group: Sequence[Rollout], slots: asyncio.Semaphore) -> None:
    """The components that look at a group: they see the rollouts that ended without an error of their world."""
    whole = [rollout for rollout in group if rollout.stop != Stop.ERROR]
    together = [reward for reward in rubric.rewards if reward.per == "group"]
    if not whole or not together:
        return
    item = whole[0].item
    answers = await gather(*(_ask(reward, whole, item, slots, [None] * len(whole)) for reward in together))
    for reward, answer in zip(together, answers, strict=True):
        if isinstance(answer, str) or not isinstance(answer, Sequence) or len(answer) != len(whole):
            what = f"{len(answer)} scores" if isinstance(answer, Sequence) else f"{type(answer).__name__}"
            raise RewardError(reward.name, item, f"returned {what} for a group of {len(whole)} rollouts")
        for rollout, value in zip(whole, answer, strict=True):
            rollout.rewards[reward.name] = _checked(value, reward.name, item)


async def gather(*jobs: Awaitable[object]) -> list[object]:
    """All results in order. The first failure is raised at once, and what still runs is cancelled."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _ask(reward: Reward, subject: object, item: str, slots: asyncio.Semaphore, missing: object) -> object:
    try:
        return await call(reward.fn, subject, reward.timeout, slots)  # pyright: ignore[reportArgumentType]
    except TimedOut:
        log.warning("reward %r took more than %g s on item %r: missing", reward.name, reward.timeout, item)
        return missing
    except Exception as error:
        details = "".join(traceback.format_exception(error))
        raise RewardError(reward.name, item, f"raised {type(error).__name__}", details) from error


def _checked(value: object, component: str, item: str) -> Score:
    if value is None:
        return None
    if not isinstance(value, numbers.Real | np.bool_):  # numpy's other scalars and bool are real numbers
        raise RewardError(component, item, f"returned {value!r:.80}, which is no number,")
    try:
        number = float(value)
    except OverflowError:  # of a whole number
        number = math.inf
    if not abs(number) <= LARGEST:  # NaN too
        raise RewardError(component, item, f"returned {number}, beyond ±{LARGEST:g},")
    return number
