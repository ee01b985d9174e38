"""Dr. GRPO."""

import pytest

import laws
import reference
from postrl.errors import UserError
from postrl.papers.dr_grpo import dr_grpo


@pytest.mark.parametrize("options", [{"length": 7}, {"singleton": "raw", "missing": "zero"}, {"count_empty": True}])
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(dr_grpo(**options), case, **options))


def test_by_hand():
    """Rewards 1, 0 and L = 4: A = ±1/2, W = 1/8 for every token, long answers included."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.5, 0.5, 0.5], [0.5]], new=[[0.5, 0.5, 0.5], [0.5]])
    got = laws.update(dr_grpo(length=4), case.batch, case.now)
    wanted = [[-1 / 16] * 3, [1 / 16, 0, 0]]
    laws.equal(got.gradient["logp"], wanted)


def test_length_is_checked():
    with pytest.raises(UserError, match="dr_grpo: length is 0"):
        dr_grpo(length=0)
