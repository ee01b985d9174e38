"""Arrays of other trainers -> Batch: prompts padded on the left, answers on the right, one row per unit."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from postrl.batch import Batch, Kind, Stop
from postrl.errors import UserError


@dataclass(frozen=True, eq=False)
class Answers:
    """B answers of C columns to prompts of P columns. What a trainer does not know is None."""

    prompt_ids: Int[Tensor, "B P"]  # padded on the left
    prompt_mask: Bool[Tensor, "B P"]  # real token or padding
    completion_ids: Int[Tensor, "B C"]  # padded on the right
    completion_mask: Bool[Tensor, "B C"]  # real token or padding
    sampled: Bool[Tensor, "B C"]  # written by the trained policy; tool output and padding are False
    steps: Int[Tensor, "B C"] | None = None  # number of the step each sampled token belongs to; None: runs are steps
    logp_old: Float[Tensor, "B C"] | None = None
    logp_sampler: Float[Tensor, "B C"] | None = None
    logp_ref: Float[Tensor, "B C"] | None = None

    @property
    def width(self) -> int:
        """Columns of the rows that these make."""
        return self.prompt_ids.shape[1] + self.completion_ids.shape[1]

    def segments(self) -> Int[Tensor, "B C"]:
        """Number of the step of each sampled token, −1 elsewhere: the steps given, or runs of sampled tokens."""
        steps = self.steps
        if steps is None:
            starts = self.sampled & ~torch.cat([torch.zeros_like(self.sampled[:, :1]), self.sampled[:, :-1]], 1)
            steps = starts.long().cumsum(1) - 1
        return torch.where(self.sampled, steps, -1)


@dataclass(frozen=True, eq=False)
class Scores:
    """What is known of N answers besides their tokens. rewards: raw, NaN = missing; reward_weights as in `Batch`."""

    rewards: Float[Tensor, "N K"]
    reward_weights: Float[Tensor, "K"]
    reward_names: tuple[str, ...]
    stop: Int[Tensor, "N"]
    groupings: Mapping[str, Int[Tensor, "N"]]
    step_rewards: Float[Tensor, "N S"] | None = None
    step_groups: Int[Tensor, "N S"] | None = None


def placed(x: Tensor, sampled: Bool[Tensor, "B C"], prompt_length: Int[Tensor, "B"], width: int) -> Tensor:
    """[B, C] of answers -> [B, width] of rows: column c of an answer is column prompt_length + c. 0 off `sampled`."""
    x = torch.where(sampled, x, torch.zeros_like(x))
    column = prompt_length[:, None] + torch.arange(x.shape[1], device=x.device)
    return x.new_zeros(len(x), width).scatter(1, column, x)


def rows(answers: Answers) -> dict[str, Tensor]:
    """The fields of `Batch` over rows, by name, padded on the right; `unit` and `prefix_id` are left to `batch`.

    A log-probability that is not known is NaN on the sampled tokens, so that a method which reads it is stopped and not
    misled; an unknown `logp_ref` is left out.
    """
    prompt_length = answers.prompt_mask.long().sum(1)
    length = prompt_length + answers.completion_mask.long().sum(1)
    column = torch.arange(answers.width, device=length.device)
    ids = torch.cat([answers.prompt_ids, answers.completion_ids], 1)
    shift = answers.prompt_ids.shape[1] - prompt_length
    tokens = ids.gather(1, (column + shift[:, None]) % answers.width)
    valid = column < length[:, None]
    mask = placed(answers.sampled, answers.sampled, prompt_length, answers.width)
    segment = placed(answers.segments(), answers.sampled, prompt_length, answers.width)
    found = {
        "tokens": torch.where(valid, tokens, 0),
        "valid": valid,
        "mask": mask,
        "segment": torch.where(mask, segment, -1).to(torch.int32),
        "prefix_length": prompt_length,
    }
    known = {"logp_old": answers.logp_old, "logp_sampler": answers.logp_sampler, "logp_ref": answers.logp_ref}
    for name, value in known.items():
        if value is not None:
            found[name] = placed(value, answers.sampled, prompt_length, answers.width)
        elif name != "logp_ref":
            found[name] = torch.where(mask, torch.nan, torch.zeros(mask.shape, device=mask.device))
    return found


def batch(fields: Mapping[str, Tensor], scores: Scores, group_size: int, temperature: float, version: int) -> Batch:
    """Rows of all processes, in their order, and their scores -> Batch. Every `group_size` units share a prompt.

    Raises UserError if the number of units is no multiple of the group size.
    """
    units, device = len(fields["tokens"]), fields["tokens"].device
    if units % group_size:
        raise UserError(f"{units} answers are no whole groups of {group_size}; choose a batch that holds whole groups")
    unit = torch.arange(units, device=device)
    own = torch.arange(fields["tokens"].shape[1], device=device) < fields["prefix_length"][:, None]
    prompts = torch.where(own, fields["tokens"], -1)
    tables = [table for table in (scores.step_rewards, scores.step_groups) if table is not None]
    steps = max((table.shape[1] for table in tables), default=0)
    return Batch(
        **fields,
        unit=unit,
        prefix_id=torch.unique(prompts, dim=0, return_inverse=True)[1],
        temperature=torch.full((units,), temperature, device=device),
        groups=torch.stack([unit // group_size, *scores.groupings.values()], 1),
        group_names=("task", *scores.groupings),
        rewards=scores.rewards,
        reward_weights=scores.reward_weights,
        reward_names=scores.reward_names,
        kind=torch.full((units,), int(Kind.ROLLOUT), dtype=torch.int8, device=device),
        version=torch.full((units,), version, dtype=torch.int64, device=device),
        stop=scores.stop,
        step_rewards=widened(scores.step_rewards, steps, torch.nan),
        step_groups=widened(scores.step_groups, steps, -1),
    )


def widened(table: Tensor | None, width: int, fill: float) -> Tensor | None:
    """A table over steps with more columns of `fill`, up to `width`."""
    return table if table is None else torch.nn.functional.pad(table, (0, width - table.shape[1]), value=fill)


def numbered(names: Sequence[Hashable], device: torch.device | None = None) -> Int[Tensor, "N"]:
    """Names -> ids, in order of first appearance: equal names share one."""
    ids: dict[Hashable, int] = {}
    return torch.tensor([ids.setdefault(name, len(ids)) for name in names], dtype=torch.int64, device=device)


def step_table(steps: Sequence[Sequence[float | None]], device: torch.device | None = None) -> Float[Tensor, "N S"]:
    """Ragged rewards of steps -> [N, S], NaN where there is none."""
    width = max((len(row) for row in steps), default=0)
    table = [[torch.nan if x is None else float(x) for x in row] + [torch.nan] * (width - len(row)) for row in steps]
    return torch.tensor(table, dtype=torch.float32, device=device).reshape(len(steps), width)


def step_numbers(steps: Sequence[Sequence[Hashable]], device: torch.device | None = None) -> Int[Tensor, "N S"]:
    """Ragged names of steps -> ids [N, S], shared by equal names of any unit; −1 where there is no step."""
    width = max((len(row) for row in steps), default=0)
    ids: dict[Hashable, int] = {}
    table = [[ids.setdefault(name, len(ids)) for name in row] + [-1] * (width - len(row)) for row in steps]
    return torch.tensor(table, dtype=torch.int64, device=device).reshape(len(steps), width)


def observations(answers: Answers) -> list[list[tuple[int, ...]]]:
    """What each step of each answer answers: the tokens since the step before, which for the first are the prompt's."""
    found = []
    columns = (answers.prompt_ids, answers.prompt_mask, answers.completion_ids, answers.completion_mask)
    for prompt, real, ids, valid, segment in zip(*(x.tolist() for x in (*columns, answers.segments())), strict=True):
        steps: list[tuple[int, ...]] = []
        heard = [token for token, here in zip(prompt, real, strict=True) if here]
        for token, here, step in zip(ids, valid, segment, strict=True):
            if here and step < 0:
                heard.append(token)
            elif here and step == len(steps):
                steps.append(tuple(heard))
                heard = []
        found.append(steps)
    return found


def step_columns(steps: Sequence[Sequence[int]], shape: torch.Size, device: torch.device | None = None) -> Tensor:
    """Step numbers of each answer's tokens -> [B, C]. Raises UserError unless they count 0, 1, … one per token."""
    table = torch.zeros(shape, dtype=torch.int64)
    for place, row in enumerate(steps):
        rising = list(row) == sorted(row) and set(row) == set(range(len(set(row))))
        if len(row) > shape[1] or not rising:
            raise UserError(f"steps of answer {place} are {list(row)[:20]}; give each token a number: 0, …, 0, 1, …")
        table[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return table.to(device)


def stopped(truncated: Sequence[bool], device: torch.device | None = None) -> Int[Tensor, "N"]:
    """How each unit ended: by its own stop token, or at the length limit."""
    ends = [int(Stop.TRUNCATED if cut else Stop.FINISHED) for cut in truncated]
    return torch.tensor(ends, dtype=torch.int8, device=device)
