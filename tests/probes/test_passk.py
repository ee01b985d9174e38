"""The estimator against exact combinatorics, the released function and simulation; the interval against its purpose."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postrl.errors import UserError
from postrl.probes.passk import bootstrap_interval, pass_at_k


def one(n, c, k):
    return float(pass_at_k(np.array([n]), np.array([c]), k)[0])


@given(st.data())
def test_against_exact_binomials(data):
    n = data.draw(st.integers(1, 300))
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, min(n, 64)))
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert abs(one(n, c, k) - float(exact)) < 1e-13


def test_by_hand():
    assert one(4, 1, 2) == pytest.approx(1 / 2)
    assert one(5, 2, 3) == pytest.approx(0.9)
    assert (one(64, 0, 64), one(64, 1, 64), one(64, 64, 1)) == (0, 1, 1)
    assert one(100_000, 1, 1) == pytest.approx(1e-5, rel=1e-9)


def test_it_is_unbiased_where_the_plug_in_is_not():
    """Expectation over all 2^n outcomes of n samples that succeed with probability p."""
    n, k, p = 6, 3, 0.3
    chance = np.array([math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
    counts = np.arange(n + 1)
    truth = 1 - (1 - p) ** k
    assert chance @ pass_at_k(np.full(n + 1, n), counts, k) == pytest.approx(truth, abs=1e-12)
    assert abs(chance @ (1 - (1 - counts / n) ** k) - truth) > 0.01


def test_the_released_function(vectors):
    meta = json.loads((vectors / "vectors.json").read_text(encoding="utf-8"))["methods"]["pass_at_k"]
    arrays = np.load(vectors / meta["file"])
    n, c = arrays["n"], arrays["c"]
    compared = 0
    for row, k in zip(arrays["pass_at_k"], arrays["k"].tolist(), strict=True):
        enough = n >= k
        assert np.abs(pass_at_k(n[enough], c[enough], k) - row[enough]).max() < 1e-12
        compared += int(enough.sum())
        if not enough.all():  # released: 1.0 even without a correct sample
            with pytest.raises(UserError, match=f"k={k}"):
                pass_at_k(n, c, k)
    assert compared > 60


def test_what_makes_no_sense_is_refused():
    for k in (0, -1, 5):
        with pytest.raises(UserError, match="number of samples per problem \\(4\\)"):
            one(4, 2, k)
    for c in (-1, 5):
        with pytest.raises(ValueError, match="between 0"):
            one(4, c, 1)
    assert pass_at_k(np.array([], dtype=int), np.array([], dtype=int), 3).shape == (0,)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(300):
        low, high = bootstrap_interval(rng.beta(0.6, 1.4, size=40), resamples=500, seed=trial)
        hits += low <= 0.3 <= high
    assert 0.89 <= hits / 300 <= 0.99, "nominal 0.95; percentile intervals of 40 skewed values fall a little short"


def test_the_interval_is_the_resampled_means_quantiles():
    values = np.array([0.0, 0.0, 1.0, 0.5, 0.25, 1.0])
    rng = np.random.default_rng(1)
    means = values[rng.integers(0, 6, size=(100_000, 6))].mean(1)
    assert np.allclose(bootstrap_interval(values, resamples=100_000), np.quantile(means, [0.025, 0.975]), atol=0.01)
    wide, narrow = (bootstrap_interval(values, confidence=c) for c in (0.99, 0.5))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_the_interval_of_constants_nothing_and_a_seed():
    assert bootstrap_interval(np.full(5, 0.25)) == (0.25, 0.25)
    assert all(math.isnan(bound) for bound in bootstrap_interval(np.array([])))
    values = np.random.default_rng(0).random(30)
    assert (
        bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)
    )
