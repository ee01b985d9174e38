"""REINFORCE."""

import pytest

import laws
import reference
from postrl.papers.reinforce import reinforce


@pytest.mark.parametrize("options", [{"missing": "zero"}, {"count_empty": True}])
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(reinforce(**options), case, **options))


def test_by_hand():
    """Rewards 2 and −1, answers of two and one tokens: W = 1/2, gradient −R/2 on every token."""
    case = laws.by_hand([0, 0], [2.0, -1.0], old=[[0.5, 0.5], [0.25]], new=[[0.5, 0.5], [0.25]])
    got = laws.update(reinforce(), case.batch, case.now)
    laws.equal(got.gradient["logp"], [[-1.0, -1.0], [0.5, 0.0]])
    assert got.loss == pytest.approx(-1.0 * 2 * -0.6931471805599453 + 0.5 * -1.3862943611198906)
