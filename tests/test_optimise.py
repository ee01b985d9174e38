"""One update through the real `update`: the same gradient however it is cut, nothing moved by groups without variance,
the old log-probabilities by either route, the sampler's mismatch on A only, and no step on what is not finite."""

import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator

from builders import ragged_batch
from postrl.advantages import total_reward, truncated_importance, zscored
from postrl.batch import Batch, spread
from postrl.enrich import forward_all
from postrl.errors import UserError
from postrl.method import Method, Term
from postrl.optimise import Seen, Trainer, update
from postrl.papers import method, methods
from postrl.papers.grpo import grpo
from postrl.policies.tabular import Tabular
from postrl.settings import Settings
from postrl.terms import entropy_bonus, reference_kl

VOCABULARY = 7
PROVIDED = {"logp_old", "logp_ref", "entropy"}  # what the batches and the policy here have


class Counting(Tabular):
    """Counts its forward passes, with and without gradients."""

    forwards = 0
    gradients = 0

    def forward(self, batch: Batch, want: frozenset[str] = frozenset()):
        self.forwards += 1
        self.gradients += torch.is_grad_enabled()
        return super().forward(batch, want)


def policy_of(dtype: torch.dtype = torch.float64) -> Counting:
    return Counting.random(VOCABULARY, 2, 64, key=(1,), dtype=dtype)


def one_update(
    method: Method,
    batch: Batch,
    policy: Tabular,
    free_old: bool = False,
    advantage=None,
    rows=None,
    whole=None,
    **options,
) -> Seen:
    """`update` over a batch as one mini-batch, all of it or `rows` of `whole`; its gradient is `policy.table.grad`."""
    settings = Settings(**{"max_gradient_norm": math.inf, "importance_cap": None, "learning_rate": 0.0} | options)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    policy.table.grad = torch.zeros_like(policy.table)
    trainer = Trainer(method, policy, optimizer, Accelerator(), settings, free_old)
    old = (batch if whole is None else whole).logp_old
    seen = Seen(torch.ones_like(old), torch.zeros_like(old), old.clone())
    advantage = method.advantage(batch) if advantage is None else advantage
    rows = torch.arange(len(batch.unit)) if rows is None else rows
    update(trainer, batch, rows, advantage, settings.learning_rate, seen)
    return seen


def shelf_method(name: str) -> Method:
    built = method(name)
    lacking = built.needs - PROVIDED
    if lacking:
        pytest.skip(f"{name} needs {', '.join(sorted(lacking))}, which the tabular policy and this batch lack")
    return built


# ---------------------------------------------------------------- normalisation


def gradients_of_cuts(built: Method, batch: Batch, policy: Counting) -> list[torch.Tensor]:
    gradients, passes = [], []
    for budget in (10**6, 60, 17, 1):
        policy.gradients = 0
        seen = one_update(built, batch, policy, token_budget=budget)
        assert seen.skipped == 0
        gradients.append(policy.table.grad.clone())
        passes.append(policy.gradients)
    assert passes[0] == 1 and passes[-1] > 4, "the budgets must cut differently for the comparison to mean anything"
    return gradients


@pytest.mark.parametrize("name", methods())
@pytest.mark.parametrize("seed", [0, 1])
def test_token_budget_does_not_change_the_gradient(name: str, seed: int):
    """TRL #3021, verl #906, #5614, #7321: uneven lengths, several contexts, every method of the shelf."""
    whole, *cut = gradients_of_cuts(shelf_method(name), ragged_batch(seed, groups=6), policy_of())
    largest = float(whole.abs().max())
    assert largest > 0
    for gradient in cut:
        torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-10 * min(1.0, largest))


@pytest.mark.parametrize("name", methods())
def test_token_budget_in_float32(name: str):
    batch = ragged_batch(2, groups=6, dtype=torch.float32)
    whole, *cut = gradients_of_cuts(shelf_method(name), batch, policy_of(torch.float32))
    for gradient in cut:
        assert (gradient - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_token_budget_with_penalties():
    built = grpo().plus(reference_kl(0.1), entropy_bonus(0.01), needs=frozenset({"entropy"}))
    whole, *cut = gradients_of_cuts(built, ragged_batch(3, groups=6), policy_of())
    for gradient in cut:
        torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-10)


def test_the_comparison_can_fail():
    """A token mean of each micro-batch, as the trainers in question had it."""

    def wrong_loss(batch: Batch, advantage: torch.Tensor, forward):
        return -advantage * forward.logp / batch.mask.sum()

    wrong = Method("wrong", grpo().advantage, (Term("policy", wrong_loss, lambda b: b.mask.to(b.logp_old.dtype)),))
    whole, *cut = gradients_of_cuts(wrong, ragged_batch(0, groups=6), policy_of())
    assert all((gradient - whole).abs().max() > 1e-3 for gradient in cut)


# ---------------------------------------------------------------- groups without variance


def constant_batch() -> Batch:
    batch = ragged_batch(0)
    return replace(batch, rewards=torch.full_like(batch.rewards, 0.7))


@pytest.mark.parametrize("name", [n for n in methods() if "reward shift" not in method(n).exempt])
def test_groups_without_variance_are_skipped(name: str):
    built = shelf_method(name)
    policy = policy_of()
    seen = one_update(built, constant_batch(), policy)
    if len(built.terms) == 1:
        assert seen.skipped == 1 and policy.gradients == 0
    assert torch.equal(policy.table.grad, torch.zeros_like(policy.table))


def test_a_group_without_variance_gets_a_gradient_of_exactly_zero_beside_others():
    """TRL #6365: such groups stay in the count, but nothing moves them."""
    batch = ragged_batch(0, groups=3)
    only = batch.group() == batch.group()[0]
    batch = replace(batch, rewards=torch.where(only[:, None], 0.3, torch.nan_to_num(batch.rewards)))
    policy = policy_of()
    gradients: list[torch.Tensor] = []
    term = grpo().terms[0]

    def watched(b: Batch, advantage: torch.Tensor, forward):
        forward.logp.register_hook(gradients.append)
        return term.loss(b, advantage, forward)

    one_update(replace(grpo(), terms=(replace(term, loss=watched),)), batch, policy)
    dead = only[batch.unit]
    assert torch.equal(gradients[0][dead], torch.zeros_like(gradients[0][dead])) and gradients[0][~dead].abs().max() > 0


def test_a_penalty_moves_groups_without_variance():
    policy = policy_of()
    seen = one_update(grpo().plus(reference_kl(0.1)), constant_batch(), policy)
    assert seen.skipped == 0 and policy.table.grad.abs().max() > 1e-4


# ---------------------------------------------------------------- old log-probabilities


def test_the_two_routes_to_old_log_probabilities_agree():
    """One update per step: the detached values of its own forward are those of a pass before it."""
    batch = ragged_batch(1)
    first, second = policy_of(), policy_of()
    free = one_update(grpo(), replace(batch, logp_old=torch.full_like(batch.logp_old, torch.nan)), first, free_old=True)
    known = replace(batch, logp_old=forward_all(second, batch, 10**6).logp)
    paid = one_update(grpo(), known, second)
    assert torch.equal(first.table.grad, second.table.grad)
    assert torch.equal(free.logp_old, paid.logp_old) and torch.equal(free.ratio, paid.ratio)
    assert first.forwards == 1


@pytest.mark.parametrize("name", methods())
def test_a_method_that_reads_old_log_probabilities_early_says_so(name: str):
    """A and W are made before the update's own forward: whoever reads logp_old there needs the pass before."""
    built = shelf_method(name)
    batch = ragged_batch(0)
    other = replace(batch, logp_old=batch.logp_old - torch.rand(batch.mask.shape, dtype=torch.float64))

    def early(batch: Batch) -> list[torch.Tensor]:
        return [built.advantage(batch), *(term.weight(batch) for term in built.terms)]

    reads = any(not torch.equal(a, b) for a, b in zip(early(batch), early(other), strict=True))
    assert reads == ("logp_old" in built.needs)


def test_a_method_that_does_not_say_so_is_told():
    built = Method("sly", grpo().advantage, (Term("policy", grpo().terms[0].loss, lambda b: b.logp_old.exp()),))
    batch = ragged_batch(0)
    batch = replace(batch, logp_old=torch.full_like(batch.logp_old, torch.nan))
    with pytest.raises(UserError, match=r"weight of term 'policy' of method sly .*logp_old.*needs"):
        one_update(built, batch, policy_of(), free_old=True)


def test_observe_sees_the_whole_mini_batch_once_and_the_old_log_probabilities():
    asked = []

    def observe(batch: Batch, now: torch.Tensor) -> torch.Tensor:
        asked.append((now - batch.logp_old)[batch.mask])
        return now + 1

    def loss(batch: Batch, advantage: torch.Tensor, forward):
        torch.testing.assert_close(batch.observed, forward.logp.detach() + 1)
        return grpo().terms[0].loss(batch, advantage, forward)

    built = replace(grpo(), observe=observe, terms=(replace(grpo().terms[0], loss=loss),))
    batch = ragged_batch(0)
    one_update(built, batch, policy_of(), token_budget=20)
    free = replace(batch, logp_old=torch.full_like(batch.logp_old, torch.nan))
    one_update(built, free, policy_of(), free_old=True, token_budget=20)
    assert [len(x) for x in asked] == [int(batch.mask.sum())] * 2
    assert asked[0].abs().max() > 0 and torch.equal(asked[1], torch.zeros_like(asked[1]))


def test_what_an_update_saw_of_its_rows_is_kept_for_the_methods_own_figures():
    batch, policy = ragged_batch(0), policy_of()
    built = replace(grpo(), observe=lambda batch, now: 2 * now)
    first = batch.select(batch.group() == batch.group()[0])
    rows = (batch.group() == batch.group()[0])[batch.unit].nonzero().squeeze(1)
    seen = one_update(built, first, policy, token_budget=20, rows=rows, whole=batch)
    now = forward_all(policy, first, 10**6).logp
    assert seen.observed is not None
    torch.testing.assert_close(seen.logp[rows], now)
    torch.testing.assert_close(seen.observed[rows], 2 * now)
    others = torch.ones(len(batch.unit), dtype=torch.bool).index_fill(0, rows, False)
    assert torch.equal(seen.logp[others], batch.logp_old[others]) and (seen.observed[others] == 0).all()


# ---------------------------------------------------------------- the sampler's mismatch


def test_mismatch_enters_the_advantage_only():
    """r, and with it every clip, is of the training forward; the sampler's numbers reach A, truncated."""
    batch = ragged_batch(0)
    plain, corrected, shifted = policy_of(), policy_of(), policy_of()
    factor = truncated_importance(batch, 2.0)
    assert factor.max() == 2 and factor.min() < 1, "some ratios are cut, and not all"
    advantage = grpo().advantage(batch)
    one_update(grpo(), batch, plain, advantage=advantage * factor)
    seen = one_update(grpo(), batch, corrected, importance_cap=2.0)
    torch.testing.assert_close(corrected.table.grad, plain.table.grad, rtol=0, atol=1e-12)
    noisy = replace(batch, logp_sampler=batch.logp_sampler + 1.0)
    other = one_update(grpo(), noisy, shifted, importance_cap=2.0)
    assert torch.equal(other.ratio, seen.ratio) and not torch.equal(shifted.table.grad, corrected.table.grad)


def test_no_cap_reads_nothing_of_the_sampler():
    batch = ragged_batch(0)
    noisy = replace(batch, logp_sampler=torch.full_like(batch.logp_sampler, torch.nan))
    first, second = policy_of(), policy_of()
    one_update(grpo(), batch, first, importance_cap=None)
    one_update(grpo(), noisy, second, importance_cap=None)
    assert torch.equal(first.table.grad, second.table.grad)


def test_sampler_noise_keeps_the_variance_of_the_gradient_bounded():
    """verl #2953, #3694: heavy noise of the sampler's numbers (standard deviation 3 nats)."""
    batch = ragged_batch(0, groups=6)
    generator = torch.Generator().manual_seed(0)

    def largest(cap: float) -> float:
        norms = []
        for _ in range(20):
            noise = 3 * torch.randn(batch.mask.shape, generator=generator, dtype=torch.float64)
            policy = policy_of()
            noisy = replace(batch, logp_sampler=batch.logp_old + noise)
            one_update(grpo(), noisy, policy, importance_cap=cap)
            norms.append(float(policy.table.grad.norm()))
        return max(norms)

    clean = policy_of()
    one_update(grpo(), batch, clean)
    norm = float(clean.table.grad.norm())
    assert largest(2.0) < 4 * norm < largest(1e9), "the cap bounds what would grow without it"


# ---------------------------------------------------------------- what is not finite


def broken_loss(batch: Batch, advantage: torch.Tensor, forward):
    return torch.where(batch.mask, forward.logp * torch.inf, 0)


@pytest.mark.parametrize("fault", ["gradient", "advantage", "weight"])
def test_what_is_not_finite_stops_before_the_weights(fault: str):
    batch, policy, term = ragged_batch(0), policy_of(), grpo().terms[0]
    advantage = grpo().advantage(batch)
    if fault == "gradient":
        built = replace(grpo(), terms=(replace(term, loss=broken_loss),))
    elif fault == "weight":
        built = replace(grpo(), terms=(replace(term, weight=lambda b: torch.full_like(b.logp_old, torch.inf)),))
    else:
        built, advantage = grpo(), advantage.masked_fill(batch.mask, torch.nan)
    before = policy.table.detach().clone()
    with pytest.raises(UserError, match=fault):
        one_update(built, batch, policy, advantage=advantage, learning_rate=1.0)
    assert torch.equal(policy.table.detach(), before)


def test_nan_off_the_mask_reaches_nothing():
    """OpenRLHF #1240."""
    batch = ragged_batch(0)
    off = ~batch.mask
    dirty = replace(
        batch,
        logp_old=batch.logp_old.masked_fill(off, torch.nan),
        logp_sampler=batch.logp_sampler.masked_fill(off, torch.nan),
        logp_ref=batch.logp_ref.masked_fill(off, torch.nan),
    )
    clean, poisoned = policy_of(), policy_of()
    built = grpo().plus(reference_kl(0.1))
    one_update(built, batch, clean, importance_cap=2.0)
    seen = one_update(built, dirty, poisoned, importance_cap=2.0)
    assert torch.equal(clean.table.grad, poisoned.table.grad)
    assert math.isfinite(seen.kl) and math.isfinite(seen.losses[0]) and math.isfinite(seen.pushed)


# ---------------------------------------------------------------- what is seen


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_seen():
    batch, free, held = ragged_batch(0), policy_of(), policy_of()
    one_update(grpo(), batch, free)
    norm = float(free.table.grad.norm())
    seen = one_update(grpo(), batch, held, max_gradient_norm=norm / 10)
    assert float(held.table.grad.norm()) == pytest.approx(norm / 10, rel=1e-3)
    assert seen.gradient_norms == [pytest.approx(norm)]


def test_clip_share_counts_pushed_tokens_without_gradient():
    batch, policy = ragged_batch(0), policy_of()
    seen = one_update(grpo(low=0.2, high=0.2), batch, policy)
    ratio = (forward_all(policy, batch, 10**6).logp - batch.logp_old).exp()
    advantage = grpo().advantage(batch)
    pushed = batch.mask & (advantage != 0)
    outside = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8))
    assert seen.pushed == int(pushed.sum()) and seen.clipped == int((pushed & outside).sum()) > 0


def test_a_penalty_does_not_hide_the_clip_share():
    batch, policy = ragged_batch(0), policy_of()
    batch = replace(batch, logp_ref=batch.logp_old - 0.1)
    alone, beside = (one_update(m, batch, policy) for m in (grpo(), grpo().plus(reference_kl(0.1))))
    assert beside.clipped == alone.clipped > 0 and beside.pushed == alone.pushed


def test_divergence_from_the_reference_is_seen_whether_it_is_trained_or_not():
    batch, policy = ragged_batch(0), policy_of()
    assert batch.logp_ref is not None
    gap = (batch.logp_ref - forward_all(policy, batch, 10**6).logp)[batch.mask]
    expected = sum(math.exp(d) - d - 1 for d in gap.tolist())
    for built in (grpo(), grpo().plus(reference_kl(0.1))):
        assert one_update(built, batch, policy, token_budget=20).kl_reference == pytest.approx(expected) != 0
    assert one_update(grpo(), replace(batch, logp_ref=None), policy).kl_reference == 0


def test_learning_rate_scales_with_the_group():
    policy = policy_of()
    optimizer = torch.optim.SGD([{"params": [policy.table], "scale": 0.5}], lr=0.0)
    trainer = Trainer(grpo(), policy, optimizer, Accelerator(), Settings(), False)
    batch = ragged_batch(0)
    seen = Seen(torch.ones_like(batch.logp_old), torch.zeros_like(batch.logp_old), batch.logp_old.clone())
    update(trainer, batch, torch.arange(len(batch.unit)), grpo().advantage(batch), 0.1, seen)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_batch_without_sampled_tokens_is_skipped():
    batch = ragged_batch(0)
    batch = replace(batch, mask=torch.zeros_like(batch.mask), segment=torch.full_like(batch.segment, -1))
    assert one_update(grpo(), batch, policy_of()).skipped == 1


def test_huge_rewards_are_refused_or_finite():
    batch = ragged_batch(0, dtype=torch.float32)
    huge = replace(batch, rewards=torch.nan_to_num(batch.rewards) * 3e38)
    policy = policy_of(torch.float32)
    a = spread(zscored(total_reward(huge), huge.group()), huge)
    if bool(torch.isfinite(a[batch.mask]).all()):
        one_update(grpo(), huge, policy)
        assert bool(torch.isfinite(policy.table.grad).all())
    else:
        with pytest.raises(UserError, match="not finite"):
            one_update(grpo(), huge, policy)
