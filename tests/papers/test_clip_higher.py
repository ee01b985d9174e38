"""clip_higher: GRPO's loss with the upper bound alone moved."""

from dataclasses import replace

import pytest

import laws
import reference
from postrl.errors import UserError
from postrl.papers.clip_higher import clip_higher
from postrl.papers.dapo import dapo
from postrl.papers.grpo import grpo

OPTIONS = [{"high": 0.3, "dual": 3.0}, {"low": 0.1, "high": 1.5, "eps": 1e-4, "count_empty": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(clip_higher(**options), case, **options), examples=8)


def test_by_hand():
    """A = ±1/√2, W = 1/2. r = 1.26 is past GRPO's upper bound and inside this one; 0.74 is past both lower ones."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.5], [0.5]], new=[[0.63], [0.37]])
    got, plain = (laws.update(m(eps=0.0), case.batch, case.now).gradient["logp"] for m in (clip_higher, grpo))
    laws.equal(got, [[-1.26 / 2 * 2**-0.5], [0.0]])
    assert (plain == 0).all()


def test_limits():
    """Equal widths: GRPO. DAPO's weight: DAPO without filter, penalty and refills."""

    def check(case):
        same = [laws.update(m, case.batch, case.now) for m in (clip_higher(0.2, 0.2), grpo())]
        laws.same(*same)
        whole = dapo(correct=None, penalty=0.0)
        part = replace(clip_higher(), terms=(replace(clip_higher().terms[0], weight=whole.terms[0].weight),))
        laws.same(laws.update(part, case.batch, case.now), laws.update(whole, case.batch, case.now))

    laws.over_cases(check, examples=8)
    assert clip_higher().keep is None


@pytest.mark.parametrize("options", [{"low": 0.3, "high": 0.2}, {"low": 1.2, "high": 1.28}])
def test_bounds_and_swapped_widths_are_refused(options):
    with pytest.raises(UserError, match=r"clip_higher: low=.*offsets from 1"):
        clip_higher(**options)
