"""CISPO."""

import pytest

import laws
import reference
from postrl.errors import UserError
from postrl.papers.cispo import cispo
from postrl.papers.grpo import grpo

OPTIONS = [
    {"high": 0.2, "low": 0.2, "bound": "delta"},
    {"high": 1.2, "low": 0.8, "bound": "absolute"},
    {"high": 1.5, "ddof": 0, "missing": "zero"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(cispo(**options), case, **options))


def test_by_hand():
    """A = ±1/√2 and three tokens, W = 1/3. r = 1.8 is weighed 1.5, r = 0.2 stays 0.2, and nobody loses the gradient."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.5, 0.5], [0.5]], new=[[0.9, 0.1], [0.9]])
    got = laws.update(cispo(high=1.5, eps=0.0), case.batch, case.now)
    a = 2**-0.5
    wanted = [[-1.5 * a / 3, -0.2 * a / 3], [1.5 * a / 3, 0.0]]
    laws.equal(got.gradient["logp"], wanted)


def test_the_same_number_is_two_algorithms():
    """An absolute 1.2 is a delta of 0.2; an absolute 5 is a delta of 4."""

    def check(case):
        both = [laws.update(m, case.batch, case.now) for m in (cispo(5.0), cispo(4.0, bound="delta"))]
        laws.same(*both)

    laws.over_cases(check)
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.1], [0.5]], new=[[0.8], [0.5]])
    absolute, delta = (laws.update(cispo(5.0, bound=b), case.batch, case.now) for b in ("absolute", "delta"))
    assert delta.gradient["logp"][0, 0] == pytest.approx(6 / 5 * float(absolute.gradient["logp"][0, 0]))


@pytest.mark.parametrize("options", [{"high": 0.2}, {"high": 0.28, "low": 0.2}, {"high": -0.5, "bound": "delta"}])
def test_clip_widths_copied_from_ppo_are_refused(options):
    with pytest.raises(UserError, match=r'cispo: high=.*1 must.*bound="delta"'):
        cispo(**options)


def test_tokens_that_ppo_drops_keep_their_gradient():
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.5], [0.5]], new=[[0.9], [0.1]])
    assert (laws.update(grpo(), case.batch, case.now).gradient["logp"] == 0).all()
    assert (laws.update(cispo(), case.batch, case.now).gradient["logp"] != 0).all()
