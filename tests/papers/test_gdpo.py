"""GDPO: what a sum hides, how it is whitened, and when it is GRPO."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import laws
import reference
from postrl.papers.gdpo import gdpo
from postrl.papers.grpo import grpo

OPTIONS = [
    {"whiten": "token", "singleton": "raw", "missing": "zero", "dual": 3.0},
    {"whiten": "token", "shift_mean": False, "ddof": 0, "eps": 1e-4},
    {"whiten": "response", "shift_mean": False, "singleton": "raw", "whiten_eps": 0.1},
    {"whiten": None, "missing": "zero", "count_empty": True, "high": 0.28},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(gdpo(**options), case, **options), examples=12)


@pytest.mark.parametrize("law", laws.LAWS)
def test_laws(law):
    hold = {name: value for name, value in OPTIONS[0].items() if name != "singleton"}  # a raw lone reward has no shift
    laws.hold(law, gdpo(**hold), examples=5)


def credit(vectors: list[list[float]], groups: list[int], lengths: list[int] | None = None, weights=None, **options):
    """A of each answer's first token, for the given reward vectors."""
    tokens = [[0.5] * n for n in lengths or [1] * len(groups)]
    batch = laws.by_hand(groups, [0.0] * len(groups), tokens, tokens).batch
    rewards = torch.tensor(vectors, dtype=torch.float64)
    weights = torch.ones(rewards.shape[1]) if weights is None else torch.tensor(weights)
    names = tuple(f"r{k}" for k in range(rewards.shape[1]))
    batch = replace(batch, rewards=rewards, reward_weights=weights.double(), reward_names=names)
    return gdpo(**options).advantage(batch)[:, 0], grpo(eps=0.0).advantage(batch)[:, 0]


def test_by_hand():
    """r¹ = 3, 0, 0 → A¹ = (2, −1, −1)/√3;  r² = 0, 1, 2 → A² = (−1, 0, 1).  Unwhitened, weights 1 and ½."""
    got, _ = credit([[3, 0], [0, 1], [0, 2]], [0, 0, 0], weights=[1.0, 0.5], whiten=None, eps=0.0)
    root = 3**-0.5
    laws.equal(got, [2 * root - 0.5, -root, -root + 0.5])


def test_what_a_sum_hides():
    """Two prompts, 0 against one reward met, and 0 against both met: one credit to GRPO, twice the credit to GDPO."""
    vectors, groups = [[0, 0], [1, 0], [0, 0], [1, 1]], [0, 0, 1, 1]
    got, summed = credit(vectors, groups, eps=0.0, whiten_eps=0.0)
    laws.near(summed[1], summed[3], "GRPO's credit")
    laws.near(got[3], 2 * got[1], "GDPO's credit")


def test_equal_sums_are_told_apart():
    """(3, 0, 0), (0, 2, 1), (1, 1, 1): GRPO sees three equal rewards and learns nothing."""
    got, summed = credit([[3, 0, 0], [0, 2, 1], [1, 1, 1]], [5, 5, 5], whiten=None, eps=0.0)
    assert (summed == 0).all()
    wide, narrow = (7 / 3) ** 0.5, (1 / 3) ** 0.5  # deviations of r¹ and r³; that of r² is 1
    wanted = [5 / 3 / wide - 1 - 2 / 3 / narrow, -4 / 3 / wide + 1 + 1 / 3 / narrow, -1 / 3 / wide + 1 / 3 / narrow]
    laws.equal(got, wanted)
    assert got.abs().min() > 0.3


def test_the_scale_of_a_reward_does_not_matter():
    vectors = torch.rand(6, 2, generator=torch.Generator().manual_seed(0)).tolist()
    larger = [[1000 * a - 7, b] for a, b in vectors]
    groups = [0, 0, 0, 1, 1, 1]
    (plain, summed), (scaled, other) = (credit(v, groups, eps=0.0) for v in (vectors, larger))
    laws.near(scaled, plain, "credit")
    assert float((other - summed).abs().max()) > 0.1, "the control: GRPO's credit follows the larger reward"


def test_whitening_over_responses_and_over_tokens():
    """S = ±1/√2 on answers of 1 and 3 tokens: over responses ±1/√2 again; over tokens the mean is −√2/4."""
    vectors, lengths = [[1.0], [0.0]], [1, 3]
    responses, _ = credit(vectors, [0, 0], lengths, eps=0.0, whiten_eps=0.0)
    laws.equal(responses, [2**-0.5, -(2**-0.5)])
    tokens, _ = credit(vectors, [0, 0], lengths, whiten="token", eps=0.0, whiten_eps=0.0)
    laws.equal(tokens, [1.5, -0.5])  # deviations 3/4·√2 and −1/4·√2 over √(½)
    held, _ = credit(vectors, [0, 0], lengths, whiten="token", shift_mean=False, eps=0.0, whiten_eps=0.0)
    laws.equal(held, [1.0, -1.0])


def test_a_shifted_mean_gives_credit_to_a_group_without_any():
    """Group 1 is constant. Over tokens the mean is not 0, so its answers get some; without the shift exactly 0."""
    vectors, groups, lengths = [[1.0], [0.0], [0.4], [0.4]], [0, 0, 1, 1], [1, 3, 1, 1]
    assert (credit(vectors, groups, lengths, whiten="token")[0][2:].abs() > 0.1).all()
    for options in ({"whiten": "token", "shift_mean": False}, {"whiten": "response"}, {"whiten": None}):
        assert (credit(vectors, groups, lengths, **options)[0][2:] == 0).all()


def test_one_reward_unwhitened_is_grpo():
    def check(case):
        one = replace(case.batch, reward_weights=torch.tensor([1.0, 0, 0], dtype=torch.float64))
        laws.same(laws.update(gdpo(whiten=None), one, case.now), laws.update(grpo(), one, case.now))

    laws.over_cases(check)


def test_a_missing_reward_leaves_one_statistic_or_all():
    """r² of the third answer is missing. "zero": r¹ compares all three, r² two. "exclude": two are left everywhere."""
    vectors, half = [[1, 0], [0, 4], [2, torch.nan]], 2**-0.5
    laws.equal(credit(vectors, [0] * 3, whiten=None, eps=0.0, missing="zero")[0], [0 - half, -1 + half, 1])
    got = credit(vectors, [0] * 3, whiten=None, eps=0.0)[0]
    laws.equal(got, [half - half, half - half, 0])


def test_equal_credit_of_all_answers_stays_bounded():
    """Lone answers with nearly equal raw rewards: a deviation of rounding would blow their difference up."""
    options = {"singleton": "raw", "whiten_eps": 0.0}
    got, _ = credit([[0.7], [0.7 + 1e-9], [0.7]], [0, 1, 2], **options)
    assert (got == 0).all()
    assert credit([[0.7], [0.8], [0.7]], [0, 1, 2], **options)[0].abs().max() < 3**0.5


def test_nothing_to_weigh():
    """All rewards have weight 0: no credit, and no failure."""
    got: Tensor = credit([[1.0, 2.0], [0.0, 1.0]], [0, 0], weights=[0.0, 0.0])[0]
    assert (got == 0).all()
