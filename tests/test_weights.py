from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from builders import Operations, no_float_casts, ragged_batch, rollout
from postrl import weights
from postrl.batch import Batch
from postrl.rollout import collate

SEEDS = range(5)
Weight = Callable[[Batch], Tensor]


def fixed(batch: Batch) -> Tensor:
    return weights.fixed_length(batch, 10)


ALL: list[Weight] = [weights.token_mean, weights.sequence_mean, weights.sequence_sum, fixed]


def loop(batch: Batch, rule: Callable[[int, int, int, int], float]) -> Tensor:
    """rule(own length, all tokens, units with tokens, all units) -> weight of each sampled token."""
    B, T = batch.mask.shape
    lengths = [0] * batch.size
    for b in range(B):
        for t in range(T):
            lengths[int(batch.unit[b])] += int(batch.mask[b, t])
    out = torch.zeros(B, T, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            if batch.mask[b, t]:
                counted = sum(length > 0 for length in lengths)
                out[b, t] = rule(lengths[int(batch.unit[b])], sum(lengths), counted, batch.size)
    return out


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("weight", "rule"),
    [
        (weights.token_mean, lambda own, total, counted, units: 1 / total),
        (weights.sequence_mean, lambda own, total, counted, units: 1 / (counted * own)),
        (lambda b: weights.sequence_mean(b, count_empty=True), lambda own, total, counted, units: 1 / (units * own)),
        (weights.sequence_sum, lambda own, total, counted, units: 1 / counted),
        (lambda b: weights.sequence_sum(b, count_empty=True), lambda own, total, counted, units: 1 / units),
        (fixed, lambda own, total, counted, units: 1 / (counted * 10)),
        (lambda b: weights.fixed_length(b, 7, count_empty=True), lambda own, total, counted, units: 1 / (units * 7)),
    ],
)
def test_against_a_loop(seed: int, weight: Weight, rule: Callable[[int, int, int, int], float]):
    batch = ragged_batch(seed)
    torch.testing.assert_close(weight(batch), loop(batch, rule), rtol=0, atol=1e-14)


def test_batches_have_empty_units_and_units_of_several_rows():
    """Or the loop above would test less than it says."""
    batches = [ragged_batch(seed) for seed in SEEDS]
    assert any((batch.lengths() == 0).any() for batch in batches)
    assert all(len(batch.unit) > batch.size for batch in batches)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums(seed: int):
    """Token and sequence means sum to 1; the sum per sequence to the mean length of the units that count."""
    batch = ragged_batch(seed)
    lengths = batch.lengths().double()
    mean_length = float(lengths.sum() / (lengths > 0).sum())
    for weight, total in [(weights.token_mean, 1.0), (weights.sequence_mean, 1.0)]:
        assert float(weight(batch).sum()) == pytest.approx(total, abs=1e-12)
    assert float(weights.sequence_sum(batch).sum()) == pytest.approx(mean_length, abs=1e-12)
    assert float(fixed(batch).sum()) == pytest.approx(mean_length / 10, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count_empty", [False, True])
def test_stated_sums(seed: int, count_empty: bool):
    """`share_counted` and `mean_length`, by which terms state their totals, against the weights and against a loop."""
    batch = ragged_batch(seed)
    counted = loop(batch, lambda own, total, counted, units: 1 / ((units if count_empty else counted) * own)).sum()
    tokens = loop(batch, lambda own, total, counted, units: 1 / (units if count_empty else counted)).sum()
    assert weights.share_counted(batch, count_empty) == pytest.approx(float(counted), abs=1e-12)
    assert weights.mean_length(batch, count_empty) == pytest.approx(float(tokens), abs=1e-12)


@pytest.mark.parametrize("weight", ALL)
def test_zero_off_the_mask(weight: Weight):
    batch = ragged_batch(0)
    W = weight(batch)
    assert (W[~batch.mask] == 0).all() and (W[batch.mask] > 0).all()


@pytest.mark.parametrize("weight", ALL)
def test_nothing_was_sampled(weight: Weight):
    batch = collate([rollout(completion=[]), rollout(sample=1, completion=[])])
    assert weight(batch).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("weight", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_the_batchs_and_nothing_is_cast(weight: Weight, dtype: torch.dtype):
    batch = ragged_batch(0, dtype=dtype)
    with no_float_casts():
        assert weight(batch).dtype == dtype


@pytest.mark.parametrize("weight", ALL)
def test_work_in_torch_operations_does_not_grow_with_the_batch(weight: Weight):
    def operations(groups: int) -> int:
        batch = ragged_batch(0, groups)
        with Operations() as record:
            weight(batch)
        return len(record.names)

    assert operations(2) == operations(80) < 40
