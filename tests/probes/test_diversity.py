"""Figures of diversity, by hand and at their limits."""

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postrl.probes.diversity import answer_entropy, distinct, distinct_n, hill_number, rarefied


def test_by_hand():
    assert distinct(["a", "b", "a"]) == 2 and distinct([]) == 0
    assert distinct_n(["the cat sat", "the cat ran"]) == 3 / 4
    assert distinct_n(["a a a a"]) == 1 / 3
    assert distinct_n(["a b", "b a"], n=1) == 2 / 4
    assert answer_entropy(["7", "7", "8", "9"]) == pytest.approx(1.5 * math.log(2))


def test_where_nothing_is_defined():
    assert math.isnan(distinct_n(["one", ""])) and math.isnan(distinct_n([])) and math.isnan(answer_entropy([]))


@given(st.lists(st.text(), min_size=1))
def test_limits(texts):
    entropy = answer_entropy(texts)
    assert 0 <= entropy <= math.log(len(texts)) + 1e-12
    assert (entropy == 0) == (distinct(texts) == 1)
    assert answer_entropy([*texts, *texts]) == pytest.approx(entropy)


def test_hill_numbers_by_hand():
    assert [hill_number([3, 3, 0], order) for order in (0, 1, 2, 5)] == pytest.approx([2, 2, 2, 2])
    assert hill_number([3, 1], 2) == pytest.approx(1 / (0.75**2 + 0.25**2))
    assert hill_number([3, 1], 1) == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))
    assert math.isnan(hill_number([0], 2))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_hill_numbers_fall_with_the_order(counts: list[int]):
    numbers = [hill_number(counts, order) for order in (0, 0.5, 1, 2, 4)]
    assert all(a >= b - 1e-9 for a, b in pairwise(numbers)) and 1 - 1e-9 <= numbers[-1] <= numbers[0] == len(counts)


def test_rarefaction_by_enumeration():
    """Counts 3, 1, 1: the mean number of kinds over every subset of the five observations."""
    observed = "AAABC"
    for k in range(6):
        subsets = list(combinations(observed, k))
        assert rarefied([3, 1, 1], k) == pytest.approx(sum(len(set(s)) for s in subsets) / len(subsets))
    assert math.isnan(rarefied([3, 1, 1], 6))
