"""GRPO."""

import math
from dataclasses import replace

import pytest
import torch

import laws
import reference
from postrl.papers.grpo import grpo

OPTIONS = [
    {"low": 0.1, "high": 0.3},
    {"dual": 1.5},
    {"ddof": 0, "eps": 1e-4},
    {"singleton": "raw", "missing": "zero"},
    {"count_empty": True, "min_spread": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(grpo(**options), case, **options))


def test_by_hand():
    """Rewards 1, 0: mean 1/2, Bessel's deviation 1/√2, so A = ±1/√2 (eps aside).

    The first answer's first token rises from 0.5 to 0.9 (r = 1.8 > 1.2: no gradient), its second falls (r = 0.5: kept);
    the second answer's token falls to r = 0.9. W = 1/(2·2) and 1/(2·1).
    """
    case = laws.by_hand([4, 4], [1.0, 0.0], old=[[0.5, 0.8], [0.5]], new=[[0.9, 0.4], [0.45]])
    got = laws.update(grpo(eps=0.0), case.batch, case.now)
    a = 1 / math.sqrt(2)
    laws.equal(got.gradient["logp"], [[0, -0.5 * a / 4], [0.9 * a / 2, 0]])
    assert got.loss == pytest.approx(-1.2 * a / 4 - 0.5 * a / 4 + 0.9 * a / 2)


def test_one_odd_answer_among_equals_is_bounded():
    """Rewards [0, 0.95 × 7]: |A| ≤ (G − 1)/√G, the largest standard score there is."""
    case = laws.by_hand([0] * 8, [0.0] + [0.95] * 7, old=[[0.5]] * 8, new=[[0.5]] * 8)
    assert grpo().advantage(case.batch).abs().max() <= 7 / math.sqrt(8)


def test_variance_that_only_rounding_makes_is_none():
    """15 rewards of 0.7 in float32: the mean is off by one bit, and a quotient of rounding errors would be 0.1."""
    case = laws.by_hand([0] * 15, [0.7] * 15, old=[[0.5]] * 15, new=[[0.5]] * 15)
    single = case.batch.to(dtype=torch.float32)
    assert (grpo().advantage(single) == 0).all()
    rewards = single.rewards[:, 0]
    naive = (rewards - rewards.sum() / 15) / ((rewards - rewards.sum() / 15).std() + 1e-6)
    assert naive.abs().max() > 0, "the case shows nothing any more"


def test_singleton_has_two_readings():
    case = laws.by_hand([0, 1, 1], [3.0, 1.0, 0.0], old=[[0.5]] * 3, new=[[0.5]] * 3)
    assert grpo().advantage(case.batch)[0, 0] == 0
    assert grpo(singleton="raw").advantage(case.batch)[0, 0] == 3


@pytest.mark.parametrize(
    ("missing", "wanted"),
    [("exclude", [0.0, -1.0, 1.0, 0.0, 0.0, 0.0]), ("zero", [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0])],
)
def test_missing_rewards(missing, wanted):
    """Unit 0 lacks one of two components, unit 3 both, group 1 all. Missing is not zero unless asked."""
    case = laws.by_hand([0, 0, 0, 0, 1, 1], [0.0] * 6, old=[[0.5]] * 6, new=[[0.5]] * 6)
    nan = torch.nan
    rewards = torch.tensor([[0.0, nan], [0.5, 0.5], [1, 1], [nan, nan], [nan, nan], [nan, nan]], dtype=torch.float64)
    batch = replace(case.batch, rewards=rewards, reward_names=("a", "b"), reward_weights=torch.ones(2).double())
    got = grpo(missing=missing, eps=0.0).advantage(batch)[:, 0]
    scale = 1 / math.sqrt(2) if missing == "exclude" else 1.0
    torch.testing.assert_close(got, scale * torch.tensor(wanted, dtype=torch.float64), atol=1e-12, rtol=0)
