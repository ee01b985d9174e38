from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from builders import poisoned, ragged_batch, rollout, units
from postrl.batch import ROW_FIELDS, UNIT_FIELDS, Batch, spread, unit_sum
from postrl.errors import UserError
from postrl.rollout import collate

SEEDS = range(5)


def tensors(batch: Batch) -> dict[str, Tensor]:
    return {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}


def full(seed: int) -> Batch:
    """A batch with every optional field filled, each row and unit recognisable."""
    batch = ragged_batch(seed)
    B, T = batch.mask.shape
    rows = torch.arange(B, dtype=torch.float64)[:, None].expand(B, T).clone()
    steps = torch.arange(batch.size)[:, None].expand(batch.size, 3).clone()
    return replace(
        batch,
        values=rows,
        returns=rows + 0.1,
        observed=rows + 0.2,
        value_after=rows[:, 0] + 0.3,
        step_rewards=steps.double(),
        step_groups=steps,
        teacher_logp=rows[:, :, None].repeat(1, 1, 4),
    )


def test_every_tensor_field_is_over_rows_or_units():
    assert set(tensors(full(0))) == set(ROW_FIELDS) | set(UNIT_FIELDS) | {"reward_weights"}


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_take_row_fields_and_leave_unit_fields(seed: int):
    batch = full(seed)
    index = torch.randperm(len(batch.unit), generator=torch.Generator().manual_seed(seed))[: len(batch.unit) // 2]
    part = batch.rows(index)
    for name, value in tensors(part).items():
        whole = getattr(batch, name)
        torch.testing.assert_close(value, whole[index] if name in ROW_FIELDS else whole, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_there_and_back(seed: int):
    batch = full(seed)
    order = torch.randperm(len(batch.unit), generator=torch.Generator().manual_seed(seed))
    back = batch.rows(order).rows(torch.argsort(order))
    for name, value in tensors(back).items():
        torch.testing.assert_close(value, getattr(batch, name), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_select_keeps_whole_units_in_order(seed: int):
    batch = full(seed)
    keep = torch.rand(batch.size, generator=torch.Generator().manual_seed(seed)) < 0.6
    part = batch.select(keep)
    kept = keep.nonzero().squeeze(1).tolist()
    assert part.size == len(kept)
    assert part.groups.tolist() == [batch.groups[unit].tolist() for unit in kept]
    new, old = units(part, part.logp_old), units(batch, batch.logp_old)
    assert new == [old[unit] for unit in kept]
    assert part.unit.tolist() == [kept.index(unit) for unit in batch.unit.tolist() if unit in kept]


def test_select_all_and_none():
    batch = full(0)
    same = batch.select(torch.ones(batch.size, dtype=torch.bool))
    for name, value in tensors(same).items():
        torch.testing.assert_close(value, getattr(batch, name), equal_nan=True, rtol=0, atol=0)
    nothing = batch.select(torch.zeros(batch.size, dtype=torch.bool))
    assert nothing.size == 0 and len(nothing.unit) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_unit_sum_and_lengths_against_a_loop(seed: int):
    batch = ragged_batch(seed)
    lists = units(batch, batch.logp_old)
    sums = unit_sum(poisoned(batch.mask, batch.logp_old), batch)
    assert sums.tolist() == pytest.approx([sum(values) for values in lists], abs=1e-12)
    assert batch.lengths().tolist() == [len(values) for values in lists]


@pytest.mark.parametrize("seed", SEEDS)
def test_spread_puts_a_units_credit_on_its_sampled_tokens_only(seed: int):
    batch = ragged_batch(seed)
    credit = torch.randn(batch.size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    A = spread(credit, batch)
    assert (A[~batch.mask] == 0).all()
    for unit, values in enumerate(units(batch, A)):
        assert all(value == credit[unit] for value in values)


def test_names_that_are_not_there_are_named():
    batch = collate([rollout(groups={"siblings": 3}, rewards={"correct": 1.0, "form": 0.0})])
    assert batch.group().tolist() == [0] and batch.group("siblings").tolist() == [3]
    assert batch.reward("form").tolist() == [0.0]
    with pytest.raises(UserError, match=r"no reward component 'corect'; it has: correct, form"):
        batch.reward("corect")
    with pytest.raises(UserError, match=r"no grouping 'role'; it has: task, siblings"):
        batch.group("role")


def test_to_changes_floating_point_only():
    batch = ragged_batch(0, dtype=torch.float32)
    double = batch.to(dtype=torch.float64)
    for name, value in tensors(double).items():
        before = getattr(batch, name).dtype
        assert value.dtype == (torch.float64 if before.is_floating_point else before), name


def test_to_device_moves_every_tensor():
    assert all(value.device.type == "meta" for value in tensors(full(0).to(device="meta")).values())
