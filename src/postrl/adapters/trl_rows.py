"""TRL's record of some answers, a dict of arrays, and what our functions add to it."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from postrl.adapters import arrays
from postrl.adapters.arrays import Answers, Scores
from postrl.errors import UserError

Rows = dict[str, Any]  # tensors [n, ...], lists of n, or one number for all


@dataclass(frozen=True)
class Extras:
    """What is known of answers besides rewards. Each is called like a TRL reward function, by keywords only (prompts,
    completions, completion_ids, every column), and returns one value per answer.

    groupings: further groupings, a hashable name. step_rewards: a list with one number or None per step. step_groups: a
    list with one hashable name per step; by default the tokens it answers. steps: a list that gives every token of the
    completion the number of its step; by default a step is a run of sampled tokens between tool outputs.
    """

    groupings: Mapping[str, Callable[..., Sequence[Hashable]]] = field(default_factory=dict)
    step_rewards: Callable[..., Sequence[Sequence[float | None]]] | None = None
    step_groups: Callable[..., Sequence[Sequence[Hashable]]] | None = None
    steps: Callable[..., Sequence[Sequence[int]]] | None = None

    def functions(self) -> list[Callable[..., Sequence]]:
        """Those that are given."""
        named = (self.step_rewards, self.step_groups, self.steps)
        return [*self.groupings.values(), *(function for function in named if function is not None)]


def scores_of(
    extras: Extras,
    rewards: Tensor,
    weights: Tensor,
    names: Sequence[str],
    ends: set[int],
    columns: Mapping[str, Sequence],
    everywhere: Callable[[Sequence], list],
) -> Scores:
    """Scores of the answers of all processes. columns: what the functions are told of those that are here; ends: tokens
    that end an answer; everywhere: values of this process's answers -> those of all, in their order."""
    device, number = rewards.device, len(columns["completion_ids"])

    def ask(name: str, function: Callable[..., Sequence]) -> list:
        values = function(**columns)
        if len(values) != number:
            raise UserError(
                f"function {name!r} returned {len(values)} values for {number} answers; return one for each"
            )
        return everywhere(values)

    rewarded, grouped = extras.step_rewards, extras.step_groups
    cut = everywhere([not ids or ids[-1] not in ends for ids in columns["completion_ids"]])
    return Scores(
        rewards=rewards,
        reward_weights=weights.to(device),
        reward_names=tuple(names),
        stop=arrays.stopped(cut, device),
        groupings={name: arrays.numbered(ask(name, f), device) for name, f in extras.groupings.items()},
        step_rewards=None if rewarded is None else arrays.step_table(ask("step_rewards", rewarded), device),
        step_groups=None if grouped is None else arrays.step_numbers(ask("step_groups", grouped), device),
    )


def answers_of(found: Rows) -> Answers:
    completion = found["completion_mask"].bool()
    tools = found.get("tool_mask")
    return Answers(
        prompt_ids=found["prompt_ids"],
        prompt_mask=found["prompt_mask"].bool(),
        completion_ids=found["completion_ids"],
        completion_mask=completion,
        sampled=completion if tools is None else completion & tools.bool(),
        steps=found.get("steps"),
        logp_old=found.get("old_per_token_logps"),
        logp_sampler=found.get("sampling_per_token_logps"),
        logp_ref=found.get("ref_per_token_logps"),
    )


def taken(found: Rows, index: Tensor) -> Rows:
    """The rows at `index`; what there is once for all stays."""

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[index] if value.dim() else value
        return [value[i] for i in index.tolist()] if isinstance(value, list) else value

    return {name: take(value) for name, value in found.items()}


def filled(x: Tensor, keep: Tensor) -> Tensor:
    """[kept rows, T] -> [rows, T], zero where not kept."""
    return x.new_zeros(len(keep), x.shape[1]).masked_scatter(keep[:, None].expand(-1, x.shape[1]), x)
