"""GSPO."""

import math
from dataclasses import replace

import pytest
import torch

import laws
import reference
from postrl.method import Forward
from postrl.papers.grpo import grpo
from postrl.papers.gspo import gspo

OPTIONS = [{"low": 0.1, "high": 0.2}, {"low": 0.3, "high": 0.3, "count_empty": True, "missing": "zero"}]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(gspo(**options), case, **options))


@pytest.mark.parametrize("law", laws.LAWS)
def test_laws_with_a_wide_clip(law):
    laws.hold(law, gspo(low=0.2, high=0.2), examples=10)


def test_by_hand():
    """Ratios 2 and 1/2 in one answer: s = 1, so nothing is clipped and every token has slope −A/(N·|o|)."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.3, 0.6], [0.5]], new=[[0.6, 0.3], [0.4]])
    got = laws.update(gspo(eps=0.0), case.batch, case.now)
    a = 2**-0.5
    laws.equal(got.gradient["logp"], [[-a / 4, -a / 4], [0, 0]])
    assert got.loss == pytest.approx(-a / 2 + (1 - 3e-4) * a / 2)


def test_gradient_is_that_of_the_sequence_form():
    """l_i = −min(s·A, clip(s)·A) with s = exp(mean log r) differentiated as a whole by autograd."""

    def check(case):
        method = gspo(low=0.1, high=0.1)
        got = laws.update(method, case.batch, case.now)
        logp = case.now["logp"].clone().requires_grad_()
        lengths = case.batch.lengths()
        loss = torch.zeros((), dtype=torch.float64)
        for n in range(case.batch.size):
            rows = case.batch.unit == n
            mask = case.batch.mask[rows]
            if lengths[n]:
                s = (logp[rows] - case.batch.logp_old[rows])[mask].mean().exp()
                a = got.advantage[rows][mask][0]
                loss = loss - torch.minimum(s * a, s.clamp(0.9, 1.1) * a) / (lengths > 0).sum()
        if loss.requires_grad:
            loss.backward()
            laws.near(got.gradient["logp"], logp.grad, "gradient")

    laws.over_cases(check)


def test_a_ratio_beyond_float32_has_no_gradient_where_the_clip_silences_it():
    case = laws.by_hand([0], [1.0], old=[[0.5, 0.5]], new=[[0.5, 0.5]])
    batch = case.batch.to(dtype=torch.float32)
    batch = replace(batch, logp_old=torch.full_like(batch.logp_old, -100.0))
    logp = torch.full_like(batch.logp_old, -1.0).requires_grad_()
    loss = gspo(low=0.2, high=0.2).terms[0].loss(batch, batch.mask.float(), Forward(logp))
    assert loss[batch.mask].tolist() == pytest.approx([-1.2, -1.2])
    assert torch.equal(torch.autograd.grad(loss.sum(), logp)[0], torch.zeros_like(logp))


def test_one_token_answers_are_the_token_clip():
    old, new = [[0.3], [0.5], [0.2], [0.9]], [[0.6], [0.55], [0.1], [0.5]]
    case = laws.by_hand([0, 0, 1, 1], [1.0, 0.0, 0.0, 1.0], old=old, new=new)
    token, sequence = (laws.update(m, case.batch, case.now) for m in (grpo(), gspo(low=0.2, high=0.2)))
    laws.same(sequence, token)


def test_token_credit_stays_with_its_token():
    """With credit that differs within an answer (a sampler's correction), each token answers for its own."""
    case = laws.by_hand([0], [1.0], old=[[0.5, 0.5]], new=[[0.6, 0.5]])
    advantage = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    weights = (torch.full((1, 2), 0.5, dtype=torch.float64),)
    got = laws.accumulate(gspo(low=0.5, high=0.5), case.batch, case.now, advantage, weights)
    s = math.sqrt(1.2)
    laws.equal(got.gradient["logp"], [[-0.5 * s, -1.5 * s]])
