"""The values and gradients of the terms in expectation are in test_enumeration.py; here: wiring and errors."""

from dataclasses import replace

import pytest
import torch

from builders import poisoned, ragged_batch
from postrl import losses, weights
from postrl.errors import UserError
from postrl.method import Forward, Method, Term, objective
from postrl.terms import entropy_bonus, reference_kl


def nothing(name: str = "nothing") -> Method:
    return Method(name, lambda batch: torch.zeros_like(batch.logp_old), ())


def value(method: Method, batch, forward: Forward) -> float:
    W = tuple(term.weight(batch) for term in method.terms)
    return float(objective(method, batch, forward, W, method.advantage(batch)))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("correct", [False, True])
def test_reference_kl_is_a_weighted_sum_of_its_estimator(estimator, correct: bool):
    batch = ragged_batch(0)
    logp = batch.logp_old - 0.25
    method = nothing().plus(reference_kl(0.1, estimator, weights.sequence_mean, off_policy_correction=correct))
    kl = {"k1": losses.kl_k1, "k2": losses.kl_k2, "k3": losses.kl_k3}[estimator](batch.mask, logp, batch.logp_ref)
    ratio = torch.exp(torch.tensor(-0.25, dtype=torch.float64)) if correct else 1.0
    expected = 0.1 * float((weights.sequence_mean(batch) * ratio * kl).sum())
    assert value(method, batch, Forward(logp)) == pytest.approx(expected, abs=1e-14)


def test_entropy_bonus_is_minus_the_weighted_entropy():
    batch = ragged_batch(0)
    entropy = batch.logp_old.square() + 1
    method = nothing().plus(entropy_bonus(0.01))
    expected = -0.01 * float((weights.token_mean(batch) * entropy).sum())
    assert value(method, batch, Forward(batch.logp_old, entropy=entropy)) == pytest.approx(expected, abs=1e-15)


def test_terms_add_up_and_read_nothing_off_the_mask():
    batch = ragged_batch(3)
    bad = replace(
        batch,
        logp_old=poisoned(batch.mask, batch.logp_old),
        logp_ref=poisoned(batch.mask, batch.logp_ref),
        logp_sampler=poisoned(batch.mask, batch.logp_sampler),
    )
    one, two = reference_kl(0.1, "k3", off_policy_correction=True), entropy_bonus(0.01)
    logp, entropy = batch.logp_old + 0.1, batch.logp_old.square()
    both = value(nothing().plus(one, two), batch, Forward(logp, entropy))
    apart = [value(nothing().plus(term), batch, Forward(logp, entropy)) for term in (one, two)]
    assert both == pytest.approx(sum(apart), abs=1e-15)
    spoilt = Forward(poisoned(batch.mask, logp), poisoned(batch.mask, entropy))
    assert value(nothing().plus(one, two), bad, spoilt) == both


def test_weights_of_the_terms_sum_to_their_total():
    batch = ragged_batch(1)
    for term in (reference_kl(0.1), entropy_bonus(0.1)):
        assert float(term.weight(batch).sum()) == pytest.approx(term.total)


def test_a_loss_of_another_shape_is_refused():
    batch = ragged_batch(0)
    for shape in ((), (batch.mask.shape[1],), (batch.mask.shape[0], 1)):
        wrong = Term("policy", lambda b, a, f, s=shape: torch.ones(s), lambda b: b.mask.double())
        with pytest.raises(UserError, match=r"loss of term 'policy' of method nothing has shape .* give one number"):
            value(nothing().plus(wrong), batch, Forward(batch.logp_old))


def test_what_is_missing_is_named():
    batch = ragged_batch(0)
    with pytest.raises(ValueError, match="reference"):
        value(nothing().plus(reference_kl(0.1)), replace(batch, logp_ref=None), Forward(batch.logp_old))
    with pytest.raises(ValueError, match="entropy"):
        value(nothing().plus(entropy_bonus(0.1)), batch, Forward(batch.logp_old))
