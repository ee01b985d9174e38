"""RLOO."""

import pytest

import laws
import reference
from postrl.papers.rloo import rloo


@pytest.mark.parametrize(
    "options", [{"singleton": "raw"}, {"missing": "zero"}, {"count_empty": True, "min_spread": 0.5}]
)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(rloo(**options), case, **options))


def test_by_hand():
    """Rewards 1, 0, 0.5: A = 1 − 0.25, 0 − 0.75, 0.5 − 0.5, whatever the other group does."""
    case = laws.by_hand([7, 3, 7, 7], [1.0, 9.0, 0.0, 0.5], old=[[0.5]] * 4, new=[[0.5]] * 4)
    got = laws.update(rloo(), case.batch, case.now)
    laws.equal(got.advantage[:, 0], [0.75, 0.0, -0.75, 0.0])


def test_one_odd_answer_keeps_a_bounded_advantage():
    """Dividing by the others' deviation gave −2075 for these rewards in one trainer."""
    case = laws.by_hand([0] * 8, [0.0] + [0.95] * 7, old=[[0.5]] * 8, new=[[0.5]] * 8)
    a = rloo().advantage(case.batch)[:, 0]
    assert a[0] == pytest.approx(-0.95) and a[1:].tolist() == pytest.approx([0.95 / 7] * 7)
