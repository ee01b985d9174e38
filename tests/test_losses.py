import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from builders import no_float_casts, poisoned, ragged_batch, units
from postrl import losses

POISON = [math.nan, math.inf, -math.inf]


class Inputs(NamedTuple):
    """Arguments of a token loss, [b, t]; log-probabilities far enough from the old ones to meet every clip."""

    mask: Tensor
    logp: Tensor
    other: Tensor  # old or reference
    advantage: Tensor


def inputs(seed: int, dtype: torch.dtype = torch.float64) -> Inputs:
    batch = ragged_batch(seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(batch.mask.shape, generator=generator, dtype=torch.float64).to(dtype)

    return Inputs(batch.mask, batch.logp_old + noise(0.7), batch.logp_old, noise(1.0))


class Case(NamedTuple):
    name: str
    loss: Callable[[Inputs], Tensor]
    rule: Callable[[float, float, float], float]  # (logp, other, A) -> l
    slope: Callable[[float, float, float], float]  # (logp, other, A) -> dl/dlogp


def clip(low: float, high: float, dual: float | None = None) -> Case:
    def rule(logp: float, old: float, A: float) -> float:
        r = math.exp(logp - old)
        surrogate = min(r * A, min(max(r, 1 - low), 1 + high) * A)
        return -max(surrogate, dual * A) if dual is not None and A < 0 else -surrogate

    def slope(logp: float, old: float, A: float) -> float:
        r = math.exp(logp - old)
        past = (A > 0 and r > 1 + high) or (A < 0 and r < 1 - low)
        past |= dual is not None and A < 0 and r > dual
        return 0.0 if past else -r * A

    name = f"clipped {low} {high} {dual}"
    return Case(name, lambda x: losses.clipped(x.mask, x.logp, x.other, x.advantage, low, high, dual), rule, slope)


CASES = [
    Case(
        "reinforce",
        lambda x: losses.reinforce(x.mask, x.logp, x.advantage),
        lambda logp, old, A: -A * logp,
        lambda logp, old, A: -A,
    ),
    clip(0.2, 0.2),
    clip(0.2, 0.28),
    clip(0.2, 0.2, dual=1.5),
    Case(
        "detached ratio",
        lambda x: losses.detached_ratio(x.mask, x.logp, x.other, x.advantage, 0.5, 1.2),
        lambda logp, old, A: -min(max(math.exp(logp - old), 0.5), 1.2) * A * logp,
        lambda logp, old, A: -min(max(math.exp(logp - old), 0.5), 1.2) * A,
    ),
    Case("nll", lambda x: losses.nll(x.mask, x.logp), lambda logp, old, A: -logp, lambda logp, old, A: -1.0),
    Case(
        "k1",
        lambda x: losses.kl_k1(x.mask, x.logp, x.other),
        lambda logp, ref, A: logp - ref,
        lambda logp, ref, A: 1.0,
    ),
    Case(
        "k2",
        lambda x: losses.kl_k2(x.mask, x.logp, x.other),
        lambda logp, ref, A: (logp - ref) ** 2 / 2,
        lambda logp, ref, A: logp - ref,
    ),
    Case(
        "k3",
        lambda x: losses.kl_k3(x.mask, x.logp, x.other),
        lambda logp, ref, A: math.exp(ref - logp) - (ref - logp) - 1,
        lambda logp, ref, A: 1 - math.exp(ref - logp),
    ),
    Case(
        "k3 with the gradient of k2",
        lambda x: losses.straight_through(losses.kl_k3(x.mask, x.logp, x.other), losses.kl_k2(x.mask, x.logp, x.other)),
        lambda logp, ref, A: math.exp(ref - logp) - (ref - logp) - 1,
        lambda logp, ref, A: logp - ref,
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_against_a_loop(case: Case, seed: int):
    x = inputs(seed)
    logp = x.logp.clone().requires_grad_()
    loss = case.loss(x._replace(logp=logp))
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    for b, t in torch.cartesian_prod(*map(torch.arange, x.mask.shape)).tolist():
        arguments = (float(x.logp[b, t]), float(x.other[b, t]), float(x.advantage[b, t]))
        expected = (case.rule(*arguments), case.slope(*arguments)) if x.mask[b, t] else (0.0, 0.0)
        assert (float(loss.detach()[b, t]), float(gradient[b, t])) == pytest.approx(expected, abs=1e-12)


def test_inputs_meet_every_branch_of_the_clip():
    """Or the loop above would test less than it says."""
    x = inputs(0)
    r, A = torch.exp(x.logp - x.other)[x.mask], x.advantage[x.mask]
    for side in (A > 0, A < 0):
        assert (side & (r > 1.5)).any() and (side & (r < 0.8)).any() and (side & (r > 0.8) & (r < 1.2)).any()


@every_case
@pytest.mark.parametrize("poison", POISON)
def test_nothing_is_read_off_the_mask(case: Case, poison: float):
    """0 · NaN is NaN: masks by multiplication let it through, in the value or in the gradient."""
    x = inputs(0)

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        logp = x.logp.clone().requires_grad_()
        loss = case.loss(x._replace(logp=logp))
        return loss, torch.autograd.grad(loss.sum(), logp)[0]

    clean = run(x)
    bad = [poisoned(x.mask, part, poison) for part in x[1:]]
    for got, expected in zip(run(Inputs(x.mask, *bad)), clean, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert (got[~x.mask] == 0).all()


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_nothing_is_cast(case: Case, dtype: torch.dtype):
    x = inputs(0, dtype)
    with no_float_casts():
        assert case.loss(x).dtype == dtype


@pytest.mark.parametrize(
    ("A", "dual", "expected"),
    [(1.0, None, -1.2), (0.0, None, 0.0), (1.0, 3.0, -1.2), (-1.0, 3.0, 3.0), (-2.0, 3.0, 6.0), (0.0, 3.0, 0.0)],
)
def test_a_ratio_beyond_float32_has_no_gradient_where_the_clip_silences_it(
    A: float, dual: float | None, expected: float
):
    """log r = 99: e^99 is inf in float32, and 0·inf in the backward pass would be NaN for the whole update."""
    logp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old, advantage = torch.tensor([[-100.0, -1.0]]), torch.tensor([[A, 1.0]])
    loss = losses.clipped(torch.ones(1, 2, dtype=torch.bool), logp, old, advantage, 0.2, 0.2, dual)
    assert loss.tolist() == [pytest.approx([expected, -1.0])]
    assert torch.autograd.grad(loss.sum(), logp)[0].tolist() == [[0.0, -1.0]]


def test_ties_of_the_clip_are_shared_as_before():
    """At r = 1 + high exactly, and at r = dual, the plain surrogate of the same ratio says what the gradient is."""
    log_r = torch.tensor([[math.log(2.0), math.log(0.5), math.log(4.0), 0.0]], dtype=torch.float64)
    high, low, dual = float(log_r[0, 0].exp()) - 1, 1 - float(log_r[0, 1].exp()), float(log_r[0, 2].exp())
    advantage = torch.tensor([[1.0, -1.0, -1.0, 0.0]], dtype=torch.float64)
    zero, mask = torch.zeros_like(log_r), torch.ones(1, 4, dtype=torch.bool)
    first, second = (log_r.clone().requires_grad_() for _ in range(2))
    loss = losses.clipped(mask, first, zero, advantage, low, high, dual)
    plain = losses.clipped_ratio(second.exp(), advantage, low, high, dual)
    gradient = torch.autograd.grad(loss.sum(), first)[0]
    assert torch.equal(loss, plain) and torch.equal(gradient, torch.autograd.grad(plain.sum(), second)[0])
    assert (gradient[0, :3] != 0).all()


def test_bounds_may_be_numbers_or_matrices():
    x = inputs(0)
    bound = torch.full_like(x.logp, 0.2)
    expected = losses.clipped(x.mask, x.logp, x.other, x.advantage, 0.2, 0.3)
    for low, high in [(bound, bound + 0.1), (0.2, bound + 0.1), (bound, 0.3)]:
        got = losses.clipped(x.mask, x.logp, x.other, x.advantage, low, high)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-15)


def test_outside_is_where_the_clip_has_no_gradient():
    x = inputs(1)
    logp = x.logp.clone().requires_grad_()
    loss = losses.clipped(x.mask, logp, x.other, x.advantage, 0.2, 0.28)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    ratio = losses.log_ratio(x.mask, x.logp, x.other).exp()
    outside = losses.outside(ratio, losses.on(x.mask, x.advantage), 0.2, 0.28)
    assert torch.equal(outside[x.mask], (gradient == 0)[x.mask]) and outside.any()
    assert not outside[~x.mask].any()


def test_at_the_old_policy_every_surrogate_has_the_policy_gradient():
    x = inputs(2)
    for loss in (
        lambda logp: losses.clipped(x.mask, logp, x.other, x.advantage, 0.2, 0.2),
        lambda logp: losses.clipped(x.mask, logp, x.other, x.advantage, 0.2, 0.2, dual=3.0),
        lambda logp: losses.detached_ratio(x.mask, logp, x.other, x.advantage, 0.5, 2.0),
        lambda logp: losses.reinforce(x.mask, logp, x.advantage),
    ):
        logp = x.other.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(logp).sum(), logp)
        torch.testing.assert_close(gradient, -losses.on(x.mask, x.advantage), rtol=0, atol=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_pooled_is_the_units_mean_with_each_tokens_own_gradient(seed: int):
    batch = ragged_batch(seed)
    x = poisoned(batch.mask, batch.logp_old).requires_grad_()
    pooled = losses.pooled(x, batch)
    means = [math.fsum(values) / max(len(values), 1) for values in units(batch, batch.logp_old)]
    expected = torch.tensor(means, dtype=torch.float64)[batch.unit][:, None]
    torch.testing.assert_close(pooled, losses.on(batch.mask, expected.expand(pooled.shape)), rtol=0, atol=1e-14)
    share = torch.arange(pooled.numel(), dtype=torch.float64).reshape(pooled.shape)
    (gradient,) = torch.autograd.grad((share * pooled).sum(), x)
    assert torch.equal(gradient, losses.on(batch.mask, share))


@pytest.mark.parametrize(
    ("A", "expected"), [(1.0, [-0.5, 0.1, 0.3]), (-1.0, [-0.2, 0.1, 0.5]), (0.0, [-0.5, 0.1, 0.5])]
)
def test_one_sided_cuts_where_the_advantage_pushes(A: float, expected: list[float]):
    x = torch.tensor([[-0.5, 0.1, 0.5]], dtype=torch.float64)
    assert losses.one_sided(x, torch.full_like(x, A), low=0.2, high=0.3).tolist() == [expected]


def test_k3_is_exact_for_nearly_equal_policies():
    """In float32, exp(d) − 1 − d loses everything near 0; expm1 does not, and the estimate stays ≥ 0."""
    d = torch.tensor([[1e-4, -1e-4, 1e-3, 0.0]])
    k3 = losses.kl_k3(torch.ones_like(d, dtype=torch.bool), -d, torch.zeros_like(d))
    exact = torch.expm1(d.double()) - d.double()
    assert (k3 >= 0).all()
    torch.testing.assert_close(k3.double(), exact, rtol=2e-3, atol=0)


def test_on_fills_and_stops_gradients():
    mask = torch.tensor([[True, False]])
    x = torch.tensor([[2.0, math.nan]], requires_grad=True)
    y = losses.on(mask, x, fill=-1.0)
    assert y.tolist() == [[2.0, -1.0]]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [[1.0, 0.0]]
