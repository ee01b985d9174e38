import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from builders import Operations, no_float_casts, poisoned, ragged_batch, units
from postrl import advantages as adv
from postrl.batch import Kind

NAN = math.nan
BASELINES = [adv.centred, adv.zscored, adv.leave_one_out]
groups_of_rewards = st.lists(
    st.tuples(st.integers(-5, 5), st.one_of(st.just(NAN), st.sampled_from([0.0, 1.0]), st.floats(-50, 50))),
    min_size=1,
    max_size=40,
)


def loop(x: list[float], group: list[int], rule: Callable[[float, list[float]], float], singleton: str) -> list[float]:
    """A rule (x_i, present members of its group) -> A_i, with the conventions on missing, lone and constant ones."""
    out = []
    for value, here in zip(x, group, strict=True):
        members = [other for other, there in zip(x, group, strict=True) if there == here and not math.isnan(other)]
        if math.isnan(value):
            out.append(0.0)
        elif len(members) == 1:
            out.append(value if singleton == "raw" else 0.0)
        elif max(members) - min(members) <= 1e-6:
            out.append(0.0)
        else:
            out.append(rule(value, members))
    return out


def mean(members: list[float]) -> float:
    return math.fsum(members) / len(members)


def deviation(members: list[float], ddof: int) -> float:
    centre = mean(members)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in members) / max(len(members) - ddof, 1))


def check(got: Tensor, expected: list[float], scale: float = 1.0) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10 * scale)


@given(groups_of_rewards, st.sampled_from(["zero", "raw"]))
def test_centred_against_a_loop(data: list[tuple[int, float]], singleton: str):
    group, x = [g for g, _ in data], [r for _, r in data]
    expected = loop(x, group, lambda value, members: value - mean(members), singleton)
    got = adv.centred(torch.tensor(x, dtype=torch.float64), torch.tensor(group), singleton=singleton)
    check(got, expected)


@given(groups_of_rewards, st.sampled_from(["zero", "raw"]))
def test_leave_one_out_against_a_loop(data: list[tuple[int, float]], singleton: str):
    group, x = [g for g, _ in data], [r for _, r in data]
    expected = loop(x, group, lambda v, members: v - (math.fsum(members) - v) / (len(members) - 1), singleton)
    got = adv.leave_one_out(torch.tensor(x, dtype=torch.float64), torch.tensor(group), singleton=singleton)
    check(got, expected)


@given(
    groups_of_rewards, st.sampled_from(["zero", "raw"]), st.sampled_from([0, 1]), st.sampled_from([1e-8, 1e-6, 1e-4])
)
def test_zscored_against_a_loop(data: list[tuple[int, float]], singleton: str, ddof: int, eps: float):
    group, x = [g for g, _ in data], [r for _, r in data]
    expected = loop(x, group, lambda v, members: (v - mean(members)) / (deviation(members, ddof) + eps), singleton)
    options = {"ddof": ddof, "eps": eps, "singleton": singleton}
    got = adv.zscored(torch.tensor(x, dtype=torch.float64), torch.tensor(group), **options)
    check(got, expected, scale=1e4)  # rounding of the mean over a deviation as small as 1e-6


@given(groups_of_rewards)
def test_group_mean_against_a_loop(data: list[tuple[int, float]]):
    group, x = [g for g, _ in data], [r for _, r in data]
    expected = []
    for here in group:
        members = [value for value, there in zip(x, group, strict=True) if there == here and not math.isnan(value)]
        expected.append(mean(members) if members else 0.0)
    check(adv.group_mean(torch.tensor(x, dtype=torch.float64), torch.tensor(group)), expected)


def test_hand_worked_groups():
    """Rewards 1, 0, 0, 1 | 2 (alone) | 3, missing, 5: group means 1/2, 2, 4; deviation with ddof 1 is √(1/3), √2."""
    x = torch.tensor([1.0, 2.0, 0.0, 3.0, 0.0, NAN, 1.0, 5.0], dtype=torch.float64)
    group = torch.tensor([7, -1, 7, 30, 7, 30, 7, 30])
    assert adv.centred(x, group).tolist() == [0.5, 0.0, -0.5, -1.0, -0.5, 0.0, 0.5, 1.0]
    check(adv.leave_one_out(x, group), [2 / 3, 0, -2 / 3, -2, -2 / 3, 0, 2 / 3, 2])
    half, root = math.sqrt(3) / 2, 1 / math.sqrt(2)
    check(adv.zscored(x, group, eps=0.0), [half, 0, -half, -root, -half, 0, half, root])


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_lone_sample(baseline: Callable[..., Tensor]):
    """TRL's rule and verl's: no credit, or the raw reward. A unit whose companions are all missing is alone."""
    x, group = torch.tensor([3.0, 2.0, NAN]), torch.tensor([0, 1, 1])
    assert baseline(x, group).tolist() == [0, 0, 0]
    assert baseline(x, group, singleton="raw").tolist() == [3, 2, 0]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize(("value", "size"), [(0.7, 15), (100.3, 16), (0.1, 3), (1e4 / 3, 7)])
def test_equal_rewards_give_exactly_zero(baseline: Callable[..., Tensor], value: float, size: int):
    """In float32 the mean of equal rewards is not that reward; dividing the rest by eps once trained on noise."""
    x = torch.full((size,), value)
    assert baseline(x, torch.zeros(size, dtype=torch.int64)).tolist() == [0.0] * size
    nearly = x + torch.linspace(0, 9e-7, size) if value < 1 else x
    assert baseline(nearly, torch.zeros(size, dtype=torch.int64)).tolist() == [0.0] * size


@pytest.mark.parametrize("baseline", BASELINES)
def test_min_spread_is_an_absolute_and_inclusive_bound(baseline: Callable[..., Tensor]):
    x, group = torch.tensor([0.0, 0.5], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    assert baseline(x, group, min_spread=0.5).tolist() == [0.0, 0.0]
    assert baseline(x, group, min_spread=0.499)[1] > 0


def test_one_odd_sample_out_is_bounded():
    """[0, .95 × 7]: with a deviation over the others a peer gave the odd one −2075; a z-score is at most (n−1)/√n."""
    x = torch.tensor([0.0, *[0.95] * 7])
    A = adv.zscored(x, torch.zeros(8, dtype=torch.int64))
    assert A.abs().max() <= 7 / math.sqrt(8)
    assert A[0] == pytest.approx(-7 / math.sqrt(8), rel=1e-4)


class TestMissing:
    """Some, all, one column missing: what leaves the sum, what leaves the statistics."""

    rewards = torch.tensor([[1.0, 0.5], [0.0, NAN], [NAN, NAN], [1.0, NAN], [0.0, 1.0]], dtype=torch.float64)

    def total(self, weights: list[float], missing: str = "exclude", rewards: Tensor | None = None) -> list[float]:
        rewards = self.rewards if rewards is None else rewards
        batch = ragged_batch(0)
        few = batch.select(torch.arange(batch.size) < len(rewards))
        batch = replace(few, rewards=rewards, reward_weights=torch.ones(2).double())
        return adv.total_reward(batch, torch.tensor(weights, dtype=torch.float64), missing).tolist()  # type: ignore

    def test_a_unit_that_lacks_a_component_is_missing(self):
        assert self.total([1.0, 2.0]) == pytest.approx([2.0, NAN, NAN, NAN, 2.0], nan_ok=True)

    def test_a_missing_component_counts_as_zero_if_asked_but_lacking_all_is_missing(self):
        assert self.total([1.0, 2.0], "zero") == pytest.approx([2.0, 0.0, NAN, 1.0, 2.0], nan_ok=True)

    @pytest.mark.parametrize("missing", ["exclude", "zero"])
    def test_a_component_of_no_weight_is_never_missed(self, missing: str):
        assert self.total([2.0, 0.0], missing) == pytest.approx([2.0, 0.0, NAN, 2.0, 0.0], nan_ok=True)

    @pytest.mark.parametrize("missing", ["exclude", "zero"])
    def test_a_whole_column_missing(self, missing: str):
        rewards = torch.tensor([[1.0, NAN], [0.0, NAN]], dtype=torch.float64)
        expected = [NAN, NAN] if missing == "exclude" else [1.0, 0.0]
        assert self.total([1.0, 1.0], missing, rewards) == pytest.approx(expected, nan_ok=True)

    @pytest.mark.parametrize("baseline", BASELINES)
    def test_missing_units_move_nobody(self, baseline: Callable[..., Tensor]):
        x, group = torch.tensor([1.0, 0.0, 0.5, NAN, NAN, NAN]), torch.tensor([0, 0, 0, 0, 1, 1])
        A = baseline(x, group)
        assert torch.equal(A[:3], baseline(x[:3], group[:3])) and A[3:].tolist() == [0, 0, 0]
        assert A[:3].abs().sum() > 0

    def test_default_weights_are_the_batchs(self):
        batch = ragged_batch(1)
        expected = [
            row[0] + 0.5 * row[1]  # the third component is only logged
            for row in batch.rewards.tolist()
        ]
        assert adv.total_reward(batch).tolist() == pytest.approx(expected, nan_ok=True)
        assert batch.rewards[:, 2].isnan().any()


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("rename", [lambda g: g * 1_000_003 - 5, lambda g: 99 - g, lambda g: g + 2**40])
def test_group_names_do_not_matter(baseline: Callable[..., Tensor], rename: Callable[[Tensor], Tensor]):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, dtype=torch.float64, generator=generator)
    group = torch.randint(0, 6, (30,), generator=generator)
    torch.testing.assert_close(baseline(x, rename(group)), baseline(x, group), rtol=0, atol=1e-14)


@pytest.mark.parametrize("baseline", [*BASELINES, adv.group_mean])
def test_no_units(baseline: Callable[..., Tensor]):
    assert baseline(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("baseline", [*BASELINES, adv.group_mean])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_nothing_is_cast(baseline: Callable[..., Tensor], dtype: torch.dtype):
    x, group = torch.tensor([1.0, 0.0, NAN, 2.0], dtype=dtype), torch.tensor([0, 0, 1, 1])
    with no_float_casts():
        assert baseline(x, group).dtype == dtype


@pytest.mark.parametrize("baseline", [*BASELINES, adv.group_mean])
def test_work_in_torch_operations_does_not_grow_with_the_number_of_groups(baseline: Callable[..., Tensor]):
    def operations(units: int) -> int:
        with Operations() as record:
            baseline(torch.arange(units).double(), torch.arange(units) // 4)
        return len(record.names)

    assert operations(8) == operations(4000) < 100


@pytest.mark.parametrize("seed", range(3))
def test_unit_mean_against_a_loop(seed: int):
    batch = ragged_batch(seed)
    expected = [math.fsum(values) / max(len(values), 1) for values in units(batch, batch.logp_old)]
    check(adv.unit_mean(poisoned(batch.mask, batch.logp_old), batch), expected)


@pytest.mark.parametrize("seed", range(3))
def test_truncated_importance_against_a_loop(seed: int):
    batch = ragged_batch(seed)
    old, sampler = (poisoned(batch.mask, x) for x in (batch.logp_old, batch.logp_sampler))
    poison = replace(batch, logp_old=old, logp_sampler=sampler)
    factor = adv.truncated_importance(poison, cap=1.1)
    for b in range(factor.shape[0]):
        for t in range(factor.shape[1]):
            ratio = math.exp(batch.logp_old[b, t] - batch.logp_sampler[b, t]) if batch.mask[b, t] else 1.0
            assert factor[b, t] == pytest.approx(min(ratio, 1.1), abs=1e-12)
    assert (factor == 1.1).any() and (factor < 1).any()


def test_pairs_and_demonstrations_have_no_sampler_to_correct_for():
    """Their zeros for log-probabilities would read as a sampler that was certain: a factor near 0 on every token."""
    batch = ragged_batch(0)
    kind = torch.arange(batch.size) % 3
    batch = replace(batch, kind=kind, logp_sampler=torch.zeros_like(batch.logp_sampler))
    factor = adv.truncated_importance(batch, cap=2.0)
    drawn = batch.mask & (kind == Kind.ROLLOUT)[batch.unit][:, None]
    assert (factor[~drawn] == 1).all() and (~drawn & batch.mask).any()
    torch.testing.assert_close(factor[drawn], batch.logp_old[drawn].exp().clamp(max=2.0))


def test_truncated_importance_bounds_the_variance_of_a_mismatched_sampler():
    """Noise of 3 nats between sampler and trainer: the plain factor's second moment explodes, the truncated stays."""
    batch = ragged_batch(0, groups=60)
    noise = torch.randn(batch.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batch = replace(batch, logp_old=batch.logp_sampler + 3 * noise)
    capped = adv.truncated_importance(batch, cap=2.0)[batch.mask]
    plain = adv.truncated_importance(batch, cap=math.inf)[batch.mask]
    assert capped.max() <= 2 and capped.square().mean() <= 4 < 100 < plain.square().mean()
    far = replace(batch, logp_old=batch.logp_sampler + 1e4)
    assert (adv.truncated_importance(far, cap=2.0)[batch.mask] == 2).all()


class TestManyRewards:
    """Credit of each reward by itself, and whitening of their sum."""

    @staticmethod
    def batch(rewards: list[list[float]], weights: list[float], group: list[int]):
        batch = ragged_batch(0)
        batch = batch.select(torch.arange(batch.size) < len(rewards))
        groups = torch.tensor(group)[:, None].expand(len(group), len(batch.group_names))
        values = {"rewards": torch.tensor(rewards).double(), "reward_weights": torch.tensor(weights).double()}
        return replace(batch, groups=groups, **values)

    def test_each_reward_is_scored_alone_and_weighed_after(self):
        batch = self.batch([[1.0, 0.0, 9.0], [0.0, 30.0, NAN], [5.0, 5.0, 5.0]], [2.0, -1.0, 0.0], [0, 0, 1])
        half = 1 / math.sqrt(2)
        got = adv.credit_per_reward(batch, eps=0.0)
        check(got.flatten(), [2 * half, half, -2 * half, -half, 0.0, 0.0])

    def test_a_missing_reward(self):
        batch = self.batch([[1.0, 0.0], [0.0, NAN], [4.0, 1.0], [NAN, NAN]], [1.0, 1.0], [0] * 4)
        excluded, zero = (adv.credit_per_reward(batch, missing=m) for m in ("exclude", "zero"))
        assert excluded.isnan().all(1).tolist() == [False, True, False, True]
        assert zero.isnan().all(1).tolist() == [False, False, False, True]
        assert torch.equal(excluded[[0, 2], 0], adv.zscored(torch.tensor([1.0, 4.0]).double(), torch.zeros(2).long()))
        assert torch.equal(zero[:3, 0], adv.zscored(torch.tensor([1.0, 0.0, 4.0]).double(), torch.zeros(3).long()))
        assert zero[1, 1] == 0

    @pytest.mark.parametrize("shift", [True, False])
    @pytest.mark.parametrize("whiten", ["response", "token", None])
    def test_whitening_against_a_loop(self, whiten: str | None, shift: bool):
        batch = ragged_batch(3)
        a = torch.randn(batch.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
        a[1] = NAN
        got = adv.spread_whitened(a, batch, whiten, 0.01, shift)  # type: ignore[arg-type]
        repeats = batch.lengths().tolist() if whiten == "token" else [1] * batch.size
        entries = [x for x, n in zip(a.tolist(), repeats, strict=True) for _ in range(n) if not math.isnan(x)]
        centre = mean(entries) if shift else 0.0
        variance = math.fsum((x - centre) ** 2 for x in entries) / (len(entries) - shift)
        scale = {"token": math.sqrt(variance + 1e-4), "response": math.sqrt(variance) + 0.01, None: 1.0}[whiten]
        centre = 0.0 if whiten is None else centre
        expected = [0.0 if math.isnan(x) else (x - centre) / scale for x in a.tolist()]
        rows = torch.tensor(expected, dtype=torch.float64)[batch.unit][:, None].expand(batch.mask.shape)
        check(got, rows.masked_fill(~batch.mask, 0.0).tolist())

    @pytest.mark.parametrize("a", [[], [NAN, NAN], [0.7, 0.7, 0.7], [2.0], [0.0, 0.0]])
    @pytest.mark.parametrize("shift", [True, False])
    def test_whitening_of_nothing_and_of_constants_is_finite_without_eps(self, a: list[float], shift: bool):
        x = torch.tensor(a, dtype=torch.float32)
        got = adv.whitened_units(x, eps=0.0, shift_mean=shift)
        assert got.isfinite().all() and (shift is False or (got == 0).all())
        batch = ragged_batch(0, dtype=torch.float32)
        zero = torch.zeros_like(batch.logp_old)
        assert (adv.whitened(zero, batch, eps=0.0, shift_mean=shift) == 0).all()


@pytest.mark.parametrize("baseline", BASELINES)
def test_missing_units_do_not_change_a_bit_of_the_others(baseline: Callable[..., Tensor]):
    """Their sums run over the same numbers in the same order, whether a missing unit stands between them or not."""
    generator = torch.Generator().manual_seed(1)
    x, group = torch.randn(200, generator=generator), torch.randint(-3, 9, (200,), generator=generator)
    gone = torch.rand(200, generator=generator) < 0.3
    with_gaps = baseline(torch.where(gone, NAN, x), group)
    assert torch.equal(with_gaps[~gone], baseline(x[~gone], group[~gone])) and (with_gaps[gone] == 0).all()


def test_missing_units_read_what_their_group_knows():
    groups = adv.Groups(torch.tensor([1.0, NAN, 3.0, NAN]), torch.tensor([4, 4, 4, 7]))
    assert groups.mean().tolist() == [2, 2, 2, 0] and groups.count.tolist() == [2, 2, 2, 0]
    assert groups.spread().tolist() == [2, 2, 2, -math.inf]
    assert groups.sum(torch.full((4,), NAN).index_fill(0, torch.tensor([0, 2]), 5.0)).tolist() == [10, 10, 10, 0]
