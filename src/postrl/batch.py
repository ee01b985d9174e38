"""The only tensor record of postrl.

Column t of every [B, T] tensor speaks of token t: `logp[b, t]` is the log-probability (nats) of
`tokens[b, t]` given the tokens before it. Only a policy's `forward` shifts. Rows are padded on the right.
Statistics count units (N), never rows (B).
"""

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from postrl.errors import UserError


class Kind(IntEnum):
    """What a unit is: sampled by a policy, one side of a preference pair, or given by a demonstrator."""

    ROLLOUT = 0
    PAIR = 1
    DEMONSTRATION = 2


class Stop(IntEnum):
    """How a unit ended: by its own stop token or its environment, at a length limit, or by an error."""

    FINISHED = 0
    TRUNCATED = 1
    ERROR = 2


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of T tokens that belong to N units, with K raw rewards and M ways of grouping the units.

    Shapes and meanings are those of the class body. `rewards` are raw and unweighted; NaN means missing
    (the reward function answered None or timed out), and `reward_weights` says how much each component
    counts in training (0 = only logged). Optional fields are None until an enricher fills them.
    """

    tokens: Int[Tensor, "B T"]
    valid: Bool[Tensor, "B T"]  # real token (True) or padding; made from lengths, never from ids
    mask: Bool[Tensor, "B T"]  # sampled by the trained policy; prompt, tool output and padding are False
    segment: Int[Tensor, "B T"]  # turn or step index, -1 off mask
    prefix_id: Int[Tensor, "B"]  # rows with one prefix_id begin with the same prefix_length tokens
    prefix_length: Int[Tensor, "B"]
    temperature: Float[Tensor, "B"]  # at sampling
    logp_sampler: Float[Tensor, "B T"]  # what the sampler reported
    logp_old: Float[Tensor, "B T"]  # the training forward at the weights that sampled
    unit: Int[Tensor, "B"]  # row -> unit
    groups: Int[Tensor, "N M"]
    rewards: Float[Tensor, "N K"]
    reward_weights: Float[Tensor, "K"]
    kind: Int[Tensor, "N"]
    version: Int[Tensor, "N"]  # version of the policy that sampled
    stop: Int[Tensor, "N"]
    group_names: tuple[str, ...]
    reward_names: tuple[str, ...]
    logp_ref: Float[Tensor, "B T"] | None = None
    values: Float[Tensor, "B T"] | None = None
    returns: Float[Tensor, "B T"] | None = None
    value_after: Float[Tensor, "B"] | None = None  # of the state after a row that was cut off; 0 where it ended
    observed: Float[Tensor, "B T"] | None = None
    step_rewards: Float[Tensor, "N S"] | None = None
    step_groups: Int[Tensor, "N S"] | None = None
    teacher_logp: Float[Tensor, "B T _"] | None = None

    @property
    def size(self) -> int:
        """Number of units, N."""
        return self.groups.shape[0]

    def group(self, name: str | None = None) -> Int[Tensor, "N"]:
        """The column of `groups` called `name`; the first one if no name is given."""
        return self.groups[:, 0 if name is None else _position(name, self.group_names, "grouping")]

    def reward(self, name: str) -> Float[Tensor, "N"]:
        """The raw reward component called `name`. Raises UserError naming the components there are."""
        return self.rewards[:, _position(name, self.reward_names, "reward component")]

    def lengths(self) -> Int[Tensor, "N"]:
        """Sampled tokens of each unit, over all its rows."""
        return unit_sum(self.mask.long(), self)

    def rows(self, index: Tensor) -> Self:
        """Some rows, for a micro-batch. Fields over units stay whole, so `x[batch.unit]` still works."""
        return replace(self, **{name: value[index] for name, value in self._tensors(ROW_FIELDS)})

    def select(self, keep: Bool[Tensor, "N"]) -> Self:
        """Some units with all their rows; units are renumbered in order. Groups keep their ids."""
        number = torch.cumsum(keep, 0) - 1
        smaller = self.rows(keep[self.unit].nonzero().squeeze(1))
        units = {name: value[keep] for name, value in self._tensors(UNIT_FIELDS)}
        return replace(smaller, **units, unit=number[smaller.unit])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Every tensor on `device`; floating-point ones as `dtype`."""

        def move(value: Tensor) -> Tensor:
            return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

        tensors = [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]
        return replace(self, **{name: move(getattr(self, name)) for name in tensors})

    def _tensors(self, names: tuple[str, ...]) -> list[tuple[str, Tensor]]:
        return [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]


ROW_FIELDS = (
    *("tokens", "valid", "mask", "segment", "prefix_id", "prefix_length", "temperature", "logp_sampler"),
    *("logp_old", "unit", "logp_ref", "values", "returns", "value_after", "observed", "teacher_logp"),
)
UNIT_FIELDS = ("groups", "rewards", "kind", "version", "stop", "step_rewards", "step_groups")


def _position(name: str, names: tuple[str, ...], what: str) -> int:
    if name not in names:
        raise UserError(f"this batch has no {what} {name!r}; it has: {', '.join(names) or 'none'}")
    return names.index(name)


def unit_sum(x: Tensor, batch: Batch) -> Tensor:
    """[B, T] -> [N]: the sum over each unit's sampled tokens, whatever stands elsewhere."""
    rows = torch.where(batch.mask, x, torch.zeros_like(x)).sum(1)
    return torch.zeros(batch.size, dtype=rows.dtype, device=rows.device).index_add(0, batch.unit, rows)


def spread(a: Float[Tensor, "N"], batch: Batch) -> Float[Tensor, "B T"]:
    """Credit of a unit -> each of its sampled tokens; zero elsewhere."""
    return torch.where(batch.mask, a[batch.unit][:, None], torch.zeros_like(a[:1]))
