"""masked_cispo: what it drops, what it caps, and the two methods it lies between."""

import pytest
import torch

import laws
import reference
from postrl.errors import UserError
from postrl.papers.cispo import cispo
from postrl.papers.grpo import grpo
from postrl.papers.masked_cispo import masked_cispo

OPTIONS = [{"low": 0.1, "high": 0.2, "floor": 0.9, "ceiling": 1.1}, {"low": 0.5, "high": 2.0, "missing": "zero"}]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(masked_cispo(**options), case, **options), examples=8)


def test_by_hand():
    """A = ±1/√2, W = 1/4. Good answer: 1.2 passes, 1.8 is dropped. Bad one: 1.8 is capped at 1.45, 0.2 is dropped."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.5, 0.5], [0.5, 0.5]], new=[[0.6, 0.9], [0.9, 0.1]])
    got = laws.update(masked_cispo(eps=0.0), case.batch, case.now)
    a = 2**-0.5 / 4
    laws.equal(got.gradient["logp"], [[-1.2 * a, 0.0], [1.45 * a, 0.0]])


def test_limits():
    """Ratio never capped: the gradient of PPO's clip. Mask never closed: the token loss of CISPO."""

    def check(case):
        free, clip = (laws.update(m, case.batch, case.now) for m in (masked_cispo(ceiling=1e9), grpo(0.2, 0.3)))
        laws.near(free.gradient["logp"], clip.gradient["logp"], "gradient")
        batch, forward = case.batch, laws.Forward(logp=case.now["logp"])
        open_, plain = (m.terms[0].loss(batch, free.advantage, forward) for m in (masked_cispo(1.0, 1e9), cispo(1.45)))
        laws.near(open_, plain, "token loss")

    laws.over_cases(check, examples=8)


def test_it_drops_what_cispo_keeps():
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.5], [0.5]], new=[[0.9], [0.1]])
    assert (laws.update(masked_cispo(), case.batch, case.now).gradient["logp"] == 0).all()
    assert (laws.update(cispo(), case.batch, case.now).gradient["logp"] != 0).all()


def test_a_ratio_out_of_float32s_reach_stays_finite():
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[1e-42], [0.5]], new=[[0.9], [0.5]])
    batch, now = case.batch.to(dtype=torch.float32), {n: p.float() for n, p in case.now.items()}
    assert torch.isinf((now["logp"] - batch.logp_old).exp()).any()
    assert torch.isfinite(laws.update(masked_cispo(), batch, now).gradient["logp"]).all()


@pytest.mark.parametrize("options", [{"ceiling": 0.45}, {"floor": 1.1}, {"ceiling": float("inf")}, {"low": 1.2}])
def test_offsets_and_bounds_mixed_up_are_refused(options):
    with pytest.raises(UserError, match="masked_cispo: "):
        masked_cispo(**options)
