"""Figures of diversity, by hand and at their limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postrl.probes.diversity import answer_entropy, distinct, distinct_n


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
