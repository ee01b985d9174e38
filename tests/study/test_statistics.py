"""The interval covers, pairing pairs, Holm corrects, and the words change where they should."""

import math
import sys

import numpy as np
import pytest
from scipy.stats import t as student

from postrl.errors import UserError
from postrl.study.definition import Contrast, Measured, per_problem, scalar
from postrl.study.statistics import Estimate, estimate, findings, holm, paired, standard_error, word

UP = Contrast("new", "old", "score", "higher", worth=0.1)
DOWN = Contrast("new", "old", "score", "lower", worth=0.1)


def table(rng: np.random.Generator, seeds: int, problems: int, by_seed: float, by_problem: float, noise: float):
    normal = rng.standard_normal
    return (
        by_seed * normal((seeds, 1)) + by_problem * normal((1, problems)) + noise * normal((seeds, problems))
    )  # mean 0: what an interval should hold


def rows(values: np.ndarray) -> list[Measured]:
    return [per_problem("score", [f"p{i}" for i in range(values.shape[1])], row.tolist()) for row in values]


@pytest.mark.parametrize(
    "layout",
    [(5, 1, 1.0, 0.0, 0.0), (5, 48, 0.1, 0.2, 0.4), (3, 48, 0.1, 0.2, 0.2), (6, 24, 0.0, 0.3, 0.1)],
    ids=["scalar", "all", "three seeds", "problems"],
)
def test_interval_covers_the_truth_as_often_as_it_says(layout: tuple[int, int, float, float, float]):
    """Whatever the chance comes from. 200 simulations: the standard deviation of the share is 0.015."""
    rng, hits, count = np.random.default_rng(1), 0, 200
    for _ in range(count):
        values = table(rng, *layout)
        error, freedom = standard_error(values, resamples=150)
        hits += abs(values.mean()) <= student.ppf(0.975, freedom) * error
    assert 0.915 <= hits / count <= 0.99


def test_interval_is_not_far_wider_than_it_need_be():
    """Where noise within seeds and problems is all there is, counting it twice would be seen as 41 % too wide."""
    rng = np.random.default_rng(2)
    errors = [standard_error(table(rng, 8, 60, 0.0, 0.0, 1.0), resamples=400)[0] for _ in range(60)]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(1 / math.sqrt(8 * 60), rel=0.15)


def test_bootstrap_error_is_that_of_the_random_effects_layout():
    """(MS_seeds + MS_problems − MS_residual) / (S · P) in closed form."""
    values = table(np.random.default_rng(3), 5, 40, 0.3, 0.4, 0.5)
    seeds, problems = values.shape
    centre = values.mean()
    ms_seeds = problems * ((values.mean(1) - centre) ** 2).sum() / (seeds - 1)
    ms_problems = seeds * ((values.mean(0) - centre) ** 2).sum() / (problems - 1)
    residual = values - values.mean(1)[:, None] - values.mean(0)[None] + centre
    ms_residual = (residual**2).sum() / ((seeds - 1) * (problems - 1))
    expected = math.sqrt((ms_seeds + ms_problems - ms_residual) / (seeds * problems))
    assert standard_error(values)[0] == pytest.approx(expected, rel=0.03)


def test_one_number_per_run_gives_the_paired_t_interval():
    values = np.array([0.2, 0.5, 0.1, 0.4, 0.3])
    found = estimate([scalar("score", float(value)) for value in values])
    reach = student.ppf(0.975, 4) * values.std(ddof=1) / math.sqrt(5)
    assert (found.low, found.high) == pytest.approx((values.mean() - reach, values.mean() + reach), rel=0.02)
    assert found.problems == 0 and found.seeds == 5


def test_what_both_arms_of_a_seed_share_does_not_widen_the_interval():
    rng = np.random.default_rng(4)
    old, new = table(rng, 5, 20, 0.0, 0.0, 0.1), 0.3 + table(rng, 5, 20, 0.0, 0.0, 0.1)
    shared = 100 * rng.standard_normal((5, 1)) + 10 * rng.standard_normal((1, 20))

    def effect(a: np.ndarray, b: np.ndarray) -> Estimate:
        return estimate(paired(dict(enumerate(rows(a))), dict(enumerate(rows(b)))))

    alone, together = effect(new, old), effect(new + shared, old + shared)
    assert (together.low, together.high) == pytest.approx((alone.low, alone.high), abs=1e-9)
    assert alone.low > 0.2


def test_problems_are_paired_by_name_and_seeds_by_number():
    old = {0: per_problem("score", ["a", "b"], [0.0, 1.0]), 2: per_problem("score", ["a", "b"], [0.0, 0.0])}
    new = {0: per_problem("score", ["b", "a"], [1.5, 0.25]), 1: per_problem("score", ["a", "b"], [9.0, 9.0])}
    assert paired(new, old) == [Measured("score", (0.5, 0.25), ("b", "a"))]


def test_different_problems_are_compared_by_their_means():
    old = {0: per_problem("score", ["a", "b"], [0.0, 1.0])}
    new = {0: per_problem("score", ["c", "d"], [1.0, 1.0])}
    assert paired(new, old) == [Measured("score", (0.5,))]
    found = estimate([per_problem("score", ["a"], [1.0]), per_problem("score", ["b"], [2.0])])
    assert found.problems == 0 and found.mean == 1.5


def test_what_is_not_defined_is_left_out_and_counted():
    nan = math.nan
    found = estimate([per_problem("score", "abc", [1.0, nan, 3.0]), per_problem("score", "abc", [1.0, 2.0, 3.0])])
    assert (found.mean, found.problems, found.undefined) == (2.0, 2, 1)
    found = estimate([scalar("score", nan), scalar("score", 1.0), scalar("score", 2.0)])
    assert (found.mean, found.seeds, found.undefined) == (1.5, 2, 1)
    found = estimate([scalar("score", nan)])
    assert found.seeds == 0 and math.isnan(found.mean)


def test_differences_that_are_all_equal():
    same = estimate([scalar("score", 0.5)] * 4)
    assert (same.low, same.high, same.p) == (0.5, 0.5, 0.0)
    assert estimate([scalar("score", 0.0)] * 4).p == 1.0
    assert math.isnan(estimate([scalar("score", 0.5)]).low)


def test_holm_by_hand():
    """Sorted 0.01, 0.03, 0.04: 3 × 0.01, 2 × 0.03, and 0.04 no smaller than the one before."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.01, math.nan]) == pytest.approx([0.02, 1.0])
    assert holm([]) == []


@pytest.mark.parametrize(
    ("low", "high", "p", "expected"),
    [
        (0.15, 0.25, 0.01, "supported"),
        (0.01, 0.25, 0.05, "supported"),
        (0.01, 0.25, 0.0501, "too noisy to say"),  # Holm's p, though the interval excludes 0
        (-0.05, 0.25, 0.2, "too noisy to say"),
        (-0.05, 0.1, 0.5, "too noisy to say"),  # a difference that matters is just possible
        (-0.05, 0.0999, 0.5, "not supported"),
        (0.01, 0.09, 0.001, "not supported"),  # there, but smaller than what matters
        (-0.3, -0.1, 0.001, "not supported"),
        (-0.3, 0.12, 0.01, "too noisy to say"),  # the wrong sign is never support
    ],
)
def test_words(low: float, high: float, p: float, expected: str):
    found = Estimate((low + high) / 2, low, high, p, seeds=5, problems=10, undefined=0)
    assert word(UP, found, p) == expected
    turned = Estimate(-(low + high) / 2, -high, -low, p, seeds=5, problems=10, undefined=0)
    assert word(DOWN, turned, p) == expected


def test_two_seeds_never_answer():
    found = Estimate(0.5, 0.5, 0.5, 0.0, seeds=2, problems=10, undefined=0)
    assert word(UP, found, 0.0) == "too noisy to say"


def test_findings_correct_over_the_family_or_not():
    figures = {
        arm: {seed: {"score": scalar("score", level + 0.01 * ((seed * step) % 7))} for seed in range(5)}
        for arm, level, step in (("old", 0.0, 1), ("new", 0.5, 2), ("third", 0.01, 3))
    }
    contrasts = (
        UP,
        Contrast("third", "old", "score", "higher", worth=0.1),
        Contrast("gone", "old", "score", "higher", 0.1),
    )
    corrected, plain = findings(contrasts, figures), findings(contrasts, figures, correct=False)
    assert corrected[0].p == pytest.approx(3 * plain[0].p)
    assert [finding.word for finding in corrected] == ["supported", "not supported", "too noisy to say"]
    assert corrected[2].estimate.seeds == 0


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "statsmodels.stats.multitest", None)
    with pytest.raises(UserError, match=r"postrl\[study\]"):
        holm([0.1])
