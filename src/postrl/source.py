"""Where the loop's rollouts come from: sampled on policy, or a data set of pairs, demonstrations or old rollouts.

A source is called once per step (again, if the loop refills) and can be saved and resumed at every such boundary.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from postrl.collect import Limits, collect
from postrl.envs.base import Task, digest
from postrl.errors import UserError
from postrl.policies.base import Policy, Renderer, Sampler, Sampling
from postrl.rollout import Rollout
from postrl.rollout import Source as Source


class OnPolicy:
    """Groups of rollouts of a task, sampled from the policy's present weights.

    The running position in the task's training split numbers the groups: it is never reused, whatever the epoch. Random
    numbers follow from (seed, step, group, sample, turn). limits.max_context is cut to the policy's context.
    answer(rollout) is what a rollout answered (None: nothing); it fills the grouping "answer", which
    reco(typical="empirical") counts. make_sampler() makes a sampler of the policy, by default `policy.sampler()`.
    Raises UserError at once for options that training cannot use: top_p < 1, top_k > 0, temperature 0 (the sampled
    tokens would not come from the distribution whose log-probabilities are trained), or an empty training split.
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        renderer: Renderer,
        *,
        groups_per_step: int,
        group_size: int,
        sampling: Sampling,
        seed: int = 0,
        limits: Limits | None = None,
        answer: Callable[[Rollout], Hashable] | None = None,
        make_sampler: Callable[[], Sampler] | None = None,
    ) -> None:
        check_training(sampling)
        for name, value in (("groups_per_step", groups_per_step), ("group_size", group_size)):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        task.environment("train", 0)  # raises for an empty split, before anything is loaded or trained
        self.task, self.policy, self.renderer = task, policy, renderer
        self.groups_per_step, self.group_size = groups_per_step, group_size
        self.sampling, self.seed, self.position, self.answer = sampling, seed, 0, answer
        self.limits = fit(Limits(max_turns=task.max_turns) if limits is None else limits, policy)
        self._sampler: Sampler | None = None
        self._make_sampler = make_sampler

    def __call__(self, step: int, groups: int | None = None) -> list[Rollout]:
        """The next `groups` (default: groups_per_step) groups, scored, in order; `step` is the policy's version too."""
        return self.part(step, 0, 1, groups)

    def part(self, step: int, rank: int, world: int, groups: int | None = None) -> list[Rollout]:
        """What process `rank` of `world` samples of them: every world-th group, perhaps none."""
        numbers = range(self.position, self.position + (self.groups_per_step if groups is None else groups))
        places = [(group, sample) for group in numbers[rank::world] for sample in range(self.group_size)]
        sampler = self._fresh_sampler()
        rollouts = collect(
            sampler,
            self.renderer,
            [self.task.environment("train", group) for group, _ in places],
            [(self.seed, step, group, sample) for group, sample in places],
            self.sampling,
            self.task.rubric,
            self.limits,
            version=step,
            answer=self.answer,
        )
        # The policy's own is made anew each step: its weights and keys would stand beside the update's activations.
        self._sampler = None if self._make_sampler is None else sampler
        self.position = numbers.stop
        return rollouts

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position, "task": self.task.name, "fingerprint": self.task.fingerprint}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raises UserError if the task's problems are not those of the saved run."""
        if state.get("fingerprint") != self.task.fingerprint:
            raise UserError(
                f"the problems of task {self.task.name!r} are not those of the checkpoint (task {state.get('task')!r}"
                "); resume with the same task, options and data, or start a new run"
            )
        self.position = _whole(state.get("position"))

    def _fresh_sampler(self) -> Sampler:
        # After a failed collection completions may still be under way in a sampler, so it is not used again.
        sampler, self._sampler = self._sampler, None
        if sampler is None:
            sampler = self.policy.sampler() if self._make_sampler is None else self._make_sampler()
        else:
            sampler.refresh()
        return sampler


class Dataset:
    """Given rollouts (pairs, demonstrations, old samples), `per_step` groups at a time, in shuffled epochs.

    Rollouts of one `group` stay together, so both sides of a pair do. A group appears once per epoch; a step may span
    an epoch's end, and then a group that comes twice gets two group numbers.

    The ratio π/π_old of the losses is relative to the policy at the start of the step, not to whoever wrote the
    rollouts: the loop recomputes `logp_old`. How far old samples are from that policy enters only as the factor of
    `importance_cap` on A (1 for pairs and demonstrations). Raises UserError if there are no rollouts.
    """

    def __init__(self, rollouts: Sequence[Rollout], per_step: int, seed: int = 0) -> None:
        if not rollouts:
            raise UserError("the data set has no rollouts; give it at least one")
        if per_step < 1:
            raise UserError(f"per_step is {per_step}; it must be at least 1")
        groups: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group, []).append(rollout)
        self.groups, self.per_step, self.seed, self.position = list(groups.values()), per_step, seed, 0
        # Once: the loop asks for the state at every step, and a data set may be large.
        self.fingerprint = digest([rollout for members in self.groups for rollout in members])

    def __call__(self, step: int, groups: int | None = None) -> list[Rollout]:
        """The next groups; their numbers are running positions, never reused."""
        return self.part(step, 0, 1, groups)

    def part(self, step: int, rank: int, world: int, groups: int | None = None) -> list[Rollout]:
        """What process `rank` of `world` gives of them: every world-th group, perhaps none."""
        numbers = range(self.position, self.position + (self.per_step if groups is None else groups))
        chosen = [(number, self.groups[self._index(number)]) for number in numbers]
        self.position = numbers.stop
        return [replace(rollout, group=number) for number, members in chosen for rollout in members]

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raises UserError if the rollouts are not those of the saved run."""
        if state.get("fingerprint") != self.fingerprint:
            raise UserError(
                "the data set's rollouts are not those of the checkpoint; resume with the same data or start a new run"
            )
        self.position = _whole(state.get("position"))

    def _index(self, number: int) -> int:
        epoch, place = divmod(number, len(self.groups))
        return int(_order(len(self.groups), self.seed, epoch)[place])


@lru_cache(maxsize=4)  # a large data set is not shuffled again for every group
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)


def check_training(sampling: Sampling) -> None:
    """Raises UserError naming the option of `sampling` that training cannot use."""
    if sampling.max_tokens < 1:
        raise UserError(f"max_tokens is {sampling.max_tokens}; training needs answers of at least 1 token")
    for name, value, fine in (
        ("top_p", sampling.top_p, sampling.top_p >= 1),
        ("top_k", sampling.top_k, sampling.top_k == 0),
        ("temperature", sampling.temperature, sampling.temperature > 0),
    ):
        if not fine:
            raise UserError(
                f"{name}={value} is for evaluation only: training needs samples of the whole distribution "
                "(top_p=1, top_k=0, temperature above 0)"
            )


def fit(limits: Limits, policy: Policy) -> Limits:
    """The same limits, with a context no longer than the policy's."""
    return replace(limits, max_context=min(limits.max_context, policy.context_length))


def _whole(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise UserError(f"the checkpoint's data position is {value!r}; it is damaged, resume from another one")
    return value
