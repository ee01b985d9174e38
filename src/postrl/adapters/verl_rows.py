"""verl's arrays -> Batch, and a method's credit -> the advantages that verl hands to a policy loss.

verl's weight of a token is 1 / (a count of the update: tokens or rows). A method's W is another, so the advantage
carries the quotient: A'[b, t] = A · W · count, which is right because the losses are proportional to A. `advantages`
makes A' on the whole rollout batch; `token_losses` is what a micro-batch makes of it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from postrl.adapters import arrays
from postrl.adapters.arrays import Answers
from postrl.adapters.trl_checks import check_finite
from postrl.adapters.verl_settings import VARIABLE, Data
from postrl.adapters.verl_traits import BASES, Traits, kept
from postrl.batch import Batch, Kind, Stop
from postrl.errors import UserError
from postrl.losses import log_ratio
from postrl.method import Forward, Method

Number = Real | np.bool_
PADDING = re.compile(r"pad[0-9a-f]{32}")  # uid of the rows that verl adds to fill a batch


@dataclass(frozen=True, eq=False)
class Given:
    """What verl hands to every estimator."""

    rewards: Float[Tensor, "B C"]  # per token; their sum is the answer's
    mask: Bool[Tensor, "B C"]
    uid: Sequence[str]  # of the prompt


@dataclass(frozen=True, eq=False)
class Known:
    """What our trainer knows besides.

    answers: tokens and log-probabilities. sessions: a row's unit and its number there; the last row has its reward.
    info: verl's reward_extra_info. truncated: cut at the longest answer allowed. minis: rows of each update, None if
    they will be shuffled. counted: tokens by which verl will divide.
    """

    answers: Answers
    sessions: Sequence[tuple[str, int]]
    info: Sequence[Mapping[str, object]]
    truncated: Sequence[bool]
    minis: Sequence[Int[Tensor, " n"]] | None
    counted: Int[Tensor, "B"]


@dataclass(frozen=True, eq=False)
class Credit:
    """scaled: A'. plain: A. batch: the answers without verl's padding. dropped: its units that `keep` left out."""

    scaled: Float[Tensor, "B C"]
    plain: Float[Tensor, "B C"]
    batch: Batch
    dropped: int


def advantages(method: Method, traits: Traits, given: Given, known: Known | None, data: Data) -> Credit:
    """Raises UserError if the method needs more than is known."""
    if known is None and not (traits.plain and traits.base):
        raise UserError(
            f"method {method.name} reads more than verl hands to an estimator (rewards apart, log-probabilities, steps "
            "or what else the update holds): set trainer.v1.trainer_mode=postrl_sync"
        )
    real = torch.tensor([PADDING.fullmatch(str(uid)) is None for uid in given.uid], device=given.mask.device)
    rows = real.nonzero().squeeze(1)
    batch = batch_of(given, known, data, rows)
    keep = kept(method, batch)
    plain = batch.rewards.new_zeros(batch.mask.shape)
    scaled = torch.zeros_like(plain)
    if keep.any():
        held = keep[batch.unit]
        some = batch.select(keep)
        plain[held] = method.advantage(some).to(plain.dtype)
        check_finite(method, "advantage", plain, batch)
        minis, counted = _updates(traits, given, known, real)
        place = torch.cumsum(real, 0) - 1
        weight = torch.zeros_like(plain)
        for mini, count in zip(minis, counted, strict=True):
            part = torch.zeros_like(held).index_fill(0, place[mini[real[mini]]], True) & held
            weight[part] = count * _weights(method, traits, batch, some, part, held)[part]
        check_finite(method, "weight", weight, batch)
        scaled = plain * weight
    whole = given.mask.new_zeros(given.mask.shape, dtype=plain.dtype)
    dropped = int((~keep).sum())
    return Credit(whole.index_copy(0, rows, scaled), whole.index_copy(0, rows, plain), batch, dropped)


def _updates(
    traits: Traits, given: Given, known: Known | None, real: Bool[Tensor, "B"]
) -> tuple[list[Int[Tensor, " n"]], list[int]]:
    """Rows of each update, as far as known, and the count verl divides by in it (whose ratio holds if it is not)."""
    everything = torch.arange(len(real), device=real.device)
    minis = [everything] if known is None or known.minis is None else list(known.minis)
    tokens = given.mask.sum(1) if known is None else known.counted
    counts = [int(tokens[mini].sum()) if traits.base == "tokens" else len(mini) for mini in minis]
    return minis, counts


def _weights(
    method: Method, traits: Traits, batch: Batch, some: Batch, part: Bool[Tensor, "b"], held: Bool[Tensor, "b"]
) -> Float[Tensor, "b C"]:
    """W of an update of the rows `part` of `batch`; `some` are all the units that are kept, `held` their rows.

    From the update alone, as our loop does. Where it cuts a unit, or a group whose answers weigh one another, from the
    whole rollout batch but for the count.
    """
    [term] = method.terms
    weight = torch.zeros_like(batch.logp_old)
    if not part.any():
        return weight
    units = torch.zeros(batch.size, dtype=torch.bool, device=part.device).index_fill(0, batch.unit[part], True)
    rest = held & ~part
    cut = bool(units[batch.unit[rest]].any())
    if not traits.alone and not cut:
        task = batch.group()
        cut = bool(torch.isin(task[batch.unit[rest]], task[batch.unit[part]]).any())
    if not cut:
        weight[units[batch.unit]] = term.weight(batch.select(units)).to(weight.dtype)
        return weight
    if traits.base is None:
        raise UserError(
            f"the weights of method {method.name} depend on all that an update holds, and this one holds parts of "
            "answers or groups: set actor.ppo_mini_batch_size to data.train_batch_size"
        )
    whole = BASES[traits.base](some).max()
    here = batch.rows(part.nonzero().squeeze(1))
    _, unit = torch.unique(here.unit, return_inverse=True)
    ours = BASES[traits.base](replace(here, unit=unit)).max()
    weight[held] = (term.weight(some) / whole * ours).to(weight.dtype)
    return weight


def batch_of(given: Given, known: Known | None, data: Data, rows: Int[Tensor, "b"]) -> Batch:
    """The answers alone, without their prompts: column t of a row is token t of the answer."""
    mask, device = given.mask[rows], given.mask.device
    sessions = [(str(i), 0) for i in range(len(given.uid))] if known is None else known.sessions
    unit = arrays.numbered([sessions[i][0] for i in rows.tolist()], device)
    last: dict[str, int] = {}
    for i in rows.tolist():
        name, number = sessions[i]
        if name not in last or number > sessions[last[name]][1]:
            last[name] = i
    order = list(last.values())
    total = given.rewards.sum(1)[order]
    if (known is None or data.rewards is None) and not bool(torch.isfinite(total).all()):
        raise UserError("the score of an answer is no finite number: look at compute_score")
    columns, weights = ({"reward": total}, {"reward": 1.0}) if known is None else _rewards(total, known, data, order)
    tasks = arrays.numbered([str(given.uid[i]) for i in order], device)
    groupings = {} if known is None else {name: _names(known, key, order) for name, key in data.groupings.items()}
    zeros = torch.zeros(mask.shape, dtype=torch.float32, device=device)
    batch = Batch(
        tokens=torch.zeros(mask.shape, dtype=torch.int64, device=device),
        valid=mask,
        mask=mask,
        segment=torch.where(mask, 0, -1).to(torch.int32),
        prefix_id=tasks[unit],
        prefix_length=torch.zeros_like(unit),
        temperature=torch.ones(len(unit), device=device),
        logp_sampler=zeros,
        logp_old=zeros,
        unit=unit,
        groups=torch.stack([tasks, *(arrays.numbered(found, device) for found in groupings.values())], 1),
        group_names=("task", *groupings),
        rewards=torch.stack([column.float() for column in columns.values()], 1),
        reward_weights=torch.tensor(list(weights.values()), dtype=torch.float32, device=device),
        reward_names=tuple(columns),
        kind=torch.full((len(order),), int(Kind.ROLLOUT), dtype=torch.int8, device=device),
        version=torch.zeros(len(order), dtype=torch.int64, device=device),
        stop=torch.full((len(order),), int(Stop.FINISHED), dtype=torch.int8, device=device),
    )
    return batch if known is None else _with_tokens(batch, known, data, rows, order)


def _with_tokens(batch: Batch, known: Known, data: Data, rows: Int[Tensor, "b"], order: list[int]) -> Batch:
    """What a method may read of the answers themselves."""
    found, device = known.answers, batch.mask.device
    if data.steps is not None:
        given: list[list] = [[] for _ in known.info]
        for i in rows.tolist():
            [given[i]] = _lists(known, data.steps, [i])
        found = replace(found, steps=arrays.step_columns(given, found.sampled.shape, device))
    segment = torch.where(batch.mask, found.segments()[rows], -1)
    ends = arrays.stopped([known.truncated[i] for i in order], device)
    steps = None if data.step_rewards is None else arrays.step_table(_lists(known, data.step_rewards, order), device)
    if data.step_groups is not None:
        groups = arrays.step_numbers(_lists(known, data.step_groups, order), device)
    else:
        heard = arrays.observations(found)
        groups = arrays.step_numbers([heard[i] for i in order], device)
    width = max((x.shape[1] for x in (steps, groups) if x is not None), default=0)
    logps = {"logp_old": found.logp_old, "logp_sampler": found.logp_sampler, "logp_ref": found.logp_ref}
    present = {
        name: torch.where(batch.mask, value[rows].float(), 0.0) for name, value in logps.items() if value is not None
    }
    return replace(
        batch,
        tokens=torch.where(found.completion_mask[rows], found.completion_ids[rows], 0),
        valid=found.completion_mask[rows],
        segment=segment.to(torch.int32),
        stop=ends,
        step_rewards=arrays.widened(steps, width, math.nan),
        step_groups=arrays.widened(groups, width, -1),
        **present,
    )


def _rewards(
    total: Float[Tensor, "N"], known: Known, data: Data, order: list[int]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Columns and weights. Without named rewards: verl's score, and every number beside it with weight 0."""
    if data.rewards is not None:
        columns = {name: _numbers(known, name, order, total) for name in data.rewards}
        return columns, {name: float(weight) for name, weight in data.rewards.items()}
    infos = [known.info[i] for i in order]
    numbers = {
        name
        for name in set().union(*infos)
        if name != "reward" and all(name in info and isinstance(info[name], Number | None) for info in infos)
    }
    columns = {"reward": total, **{name: _numbers(known, name, order, total) for name in sorted(numbers)}}
    return columns, {name: float(name == "reward") for name in columns}


def _numbers(known: Known, name: str, order: list[int], like: Tensor) -> Float[Tensor, "N"]:
    """An entry of reward_extra_info; None is a missing reward."""
    found = []
    for i in order:
        if name not in known.info[i]:
            there = ", ".join(sorted(known.info[i])) or "nothing"
            raise UserError(
                f"{VARIABLE}: an answer has no reward {name!r}: let compute_score return it (None if it is missing) "
                f"beside its score; this answer has: {there}"
            )
        value = known.info[i][name]
        if value is not None and (not isinstance(value, Number) or not math.isfinite(value)):
            raise UserError(f"reward {name!r} of an answer is {value!r}: return a number, or None for a missing one")
        found.append(math.nan if value is None else float(value))
    return torch.tensor(found, dtype=torch.float32, device=like.device)


def _names(known: Known, key: str, order: list[int]) -> list[str]:
    return [str(_entry(known.info[i], key)) for i in order]


def _lists(known: Known, key: str, order: Sequence[int]) -> list[list]:
    return [list(_entry(known.info[i], key)) for i in order]  # type: ignore[call-overload]


def _entry(info: Mapping[str, object], key: str) -> object:
    if key not in info:
        there = ", ".join(sorted(info)) or "nothing"
        raise UserError(f"{VARIABLE}: an answer has no entry {key!r} in reward_extra_info; it has: {there}")
    return info[key]


def updates(rows: int, ranks: int, size: int) -> list[Int[Tensor, " n"]]:
    """Rows of each update, as verl deals them out unshuffled: a contiguous share per rank, which every update goes
    through side by side. size: rows of an update over all ranks. Raises UserError if it does not divide."""
    if size % ranks or rows % size:
        raise UserError(f"{rows} rows do not make whole updates of {size} rows over {ranks} ranks")
    return list(torch.arange(rows).reshape(ranks, rows // size, size // ranks).transpose(0, 1).reshape(-1, size))


# ---------------------------------------------------------------- a micro-batch


def token_losses(
    method: Method,
    old: Float[Tensor, "b C"],
    logp: Float[Tensor, "b C"],
    scaled: Float[Tensor, "b C"],
    mask: Bool[Tensor, "b C"],
) -> tuple[Float[Tensor, "b C"], dict[str, float]]:
    """Token losses of A' and what to log: the distance to the policy that sampled, and the share of tokens with an
    advantage that get no gradient."""
    batch = _micro(old, mask)
    if method.observe is not None:
        batch = replace(batch, observed=method.observe(batch, logp.detach()))
    loss = _loss(method, batch, logp, scaled)
    leaf = logp.detach().requires_grad_()
    with torch.enable_grad():
        push = torch.autograd.grad(_loss(method, batch, leaf, scaled).sum(), leaf)[0]
    pushed = mask & (scaled != 0)
    clipped = float((pushed & (push == 0)).sum()) / max(1, int(pushed.sum()))
    gap = log_ratio(mask, logp.detach(), batch.logp_old)
    return loss, {"actor/pg_clipfrac": clipped, "actor/ppo_kl": float(-gap.sum()) / max(1, int(mask.sum()))}


def _loss(method: Method, batch: Batch, logp: Tensor, scaled: Tensor) -> Tensor:
    loss = method.terms[0].loss(batch, scaled, Forward(torch.where(batch.mask, logp, torch.zeros_like(logp))))
    return torch.where(scaled != 0, loss, torch.zeros_like(loss))


def _micro(old: Float[Tensor, "b C"], mask: Bool[Tensor, "b C"]) -> Batch:
    """What a loss may read of its micro-batch: each row is a unit."""
    number = torch.arange(len(mask), device=mask.device)
    old = torch.where(mask, old, torch.zeros_like(old))
    return Batch(
        tokens=torch.zeros(mask.shape, dtype=torch.int64, device=mask.device),
        valid=mask,
        mask=mask,
        segment=torch.where(mask, 0, -1),
        prefix_id=number,
        prefix_length=torch.zeros_like(number),
        temperature=torch.ones(len(mask), device=mask.device),
        logp_sampler=old,
        logp_old=old,
        unit=number,
        groups=number[:, None],
        group_names=("task",),
        rewards=torch.zeros(len(mask), 1, device=mask.device),
        reward_weights=torch.ones(1, device=mask.device),
        reward_names=("reward",),
        kind=torch.zeros_like(number),
        version=torch.zeros_like(number),
        stop=torch.zeros_like(number),
    )
