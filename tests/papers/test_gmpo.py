"""GMPO."""

import math

import pytest
import torch

import laws
import reference
from postrl.papers.gmpo import gmpo

OPTIONS = [{"low": 0.1, "high": 0.2}, {"count_empty": True, "missing": "zero", "ddof": 0}]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(gmpo(**options), case, **options))


def test_by_hand():
    """Ratios 4 and 1 with A > 0 and bound e^0.4: the mean is √(e^0.4) = e^0.2 and only the second token has a slope."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.2, 0.5], [0.5]], new=[[0.8, 0.5], [0.5]])
    got = laws.update(gmpo(eps=0.0), case.batch, case.now)
    a = 2**-0.5
    wanted = [[0.0, -a * math.exp(0.2) / 4], [a / 2, 0.0]]
    laws.equal(got.gradient["logp"], wanted)


def test_bounds_are_in_log_space_and_one_sided():
    """A falling token of a good answer, and a rising one of a bad answer, are never cut: PPO's min, in logs."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.8], [0.1]], new=[[0.1], [0.8]])
    got = laws.update(gmpo(), case.batch, case.now)
    a = got.advantage[:, 0]
    torch.testing.assert_close(got.gradient["logp"][:, 0], -a * torch.tensor([1 / 8, 8.0]).double() / 2)


def test_no_single_token_moves_the_answer():
    """One ratio of 1000 among ten: the arithmetic mean is 100, the geometric with the paper's bound 1.04."""
    old, new = [[0.0005] + [0.5] * 9, [0.5]], [[0.5] + [0.5] * 9, [0.5]]
    case = laws.by_hand([0, 0], [1.0, 0.0], old=old, new=new)
    got = laws.update(gmpo(eps=0.0), case.batch, case.now)
    assert got.gradient["logp"][0, 1] == pytest.approx(-(2**-0.5) * math.exp(0.04) / 20)
