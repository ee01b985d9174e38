"""Expected gradients, exactly: every pair (or triple) of sequences of a tabular policy, weighted by its probability.

No sampling, no tolerance for luck: an estimator is unbiased or it is not.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from postrl import advantages as adv
from postrl import losses, weights
from postrl.batch import UNIT_FIELDS, Batch, spread
from postrl.method import Method, Term, objective
from postrl.policies.tabular import Tabular
from postrl.rollout import Rollout, Turn, collate
from postrl.terms import entropy_bonus, reference_kl

Baseline = Callable[[Tensor, Tensor], Tensor]


def rewards(size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


def gradient(policy: Tabular, value: Tensor) -> Tensor:
    return torch.autograd.grad(value, policy.table)[0]


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def tuples(batch: Batch, chance: Tensor, G: int) -> tuple[Batch, Tensor]:
    """Every ordered G-tuple of the units (one row each) of `batch` as a group, and each group's probability."""
    index = torch.cartesian_prod(*[torch.arange(batch.size)] * G).reshape(-1, G)
    flat = index.flatten()
    fields = [name for name in UNIT_FIELDS if name != "groups" and getattr(batch, name) is not None]
    every = replace(
        batch.rows(flat),
        unit=torch.arange(len(flat)),
        groups=torch.arange(len(index)).repeat_interleave(G)[:, None],
        **{name: getattr(batch, name)[flat] for name in fields},
    )
    return every, chance[index].prod(1)


def expected_gradient(policy: Tabular, batch: Batch, advantage: Callable[[Batch], Tensor], G: int = 2) -> Tensor:
    """E[1/G Σ_i Σ_t A_it ∇log π(a_it | …)] over groups of G drawn from the policy."""
    every, chance = tuples(batch, policy.probability(batch).detach(), G)
    share = spread(chance.repeat_interleave(G) / G, every)
    term = Term("policy gradient", lambda b, A, forward: losses.reinforce(b.mask, forward.logp, A), lambda b: share)
    method = Method("enumerated", advantage, (term,))
    loss = objective(method, every, policy(every), (term.weight(every),), method.advantage(every))
    return -gradient(policy, loss)


def with_rewards(batch: Batch) -> Batch:
    return replace(
        batch,
        rewards=rewards(batch.size)[:, None],
        reward_names=("reward",),
        reward_weights=torch.ones(1, dtype=torch.float64),
    )


def by_group(baseline: Baseline) -> Callable[[Batch], Tensor]:
    return lambda batch: spread(baseline(adv.total_reward(batch), batch.group()), batch)


SETTINGS = [  # horizon, group size, stop tokens: 27² pairs, 9³ triples, 15² pairs of unequal length
    pytest.param(3, 2, frozenset(), id="27² pairs"),
    pytest.param(2, 3, frozenset(), id="9³ triples"),
    pytest.param(3, 2, frozenset({2}), id="15² ragged pairs"),
]


@pytest.mark.parametrize(("horizon", "G", "stop"), SETTINGS)
class TestGroupBaselines:
    def world(self, horizon: int, stop: frozenset[int]) -> tuple[Tabular, Batch, Tensor]:
        policy = Tabular.random(3, 3, 8, key=[1])
        batch = with_rewards(policy.enumerate_sequences([1], horizon, stop))
        return policy, batch, gradient(policy, policy.expectation(batch, batch.rewards[:, 0]))

    def test_leave_one_out_is_the_true_gradient(self, horizon: int, G: int, stop: frozenset[int]):
        policy, batch, true = self.world(horizon, stop)
        got = expected_gradient(policy, batch, by_group(adv.leave_one_out), G)
        torch.testing.assert_close(got, true, rtol=0, atol=1e-12)
        assert true.abs().max() > 0.05

    def test_centring_is_a_fixed_share_of_it(self, horizon: int, G: int, stop: frozenset[int]):
        policy, batch, true = self.world(horizon, stop)
        got = expected_gradient(policy, batch, by_group(adv.centred), G)
        torch.testing.assert_close(got, (G - 1) / G * true, rtol=0, atol=1e-12)

    def test_a_z_score_points_elsewhere(self, horizon: int, G: int, stop: frozenset[int]):
        policy, batch, true = self.world(horizon, stop)
        angle = cosine(expected_gradient(policy, batch, by_group(adv.zscored), G), true)
        print(f"cosine of the z-scored gradient with the true one: {angle:.4f}")
        assert angle < 0.999  # parallel is 1 to the last digits: see centring

    def test_no_baseline_is_unbiased_too(self, horizon: int, G: int, stop: frozenset[int]):
        policy, batch, true = self.world(horizon, stop)
        got = expected_gradient(policy, batch, lambda b: spread(adv.total_reward(b), b), G)
        torch.testing.assert_close(got, true, rtol=0, atol=1e-12)


def test_dividing_by_length_points_elsewhere():
    """Sequence means weigh the tokens of long answers less: with answers of unequal length no longer the gradient."""
    policy = Tabular.random(3, 3, 8, key=[1])
    batch = with_rewards(policy.enumerate_sequences([1], 3, frozenset({2})))
    true = gradient(policy, policy.expectation(batch, batch.rewards[:, 0]))

    def diluted(b: Batch) -> Tensor:
        return by_group(adv.leave_one_out)(b) / b.lengths()[b.unit][:, None]

    assert cosine(expected_gradient(policy, batch, diluted), true) < 0.999


class TestTurns:
    """Episodes of one to three turns, one token each: 0 ends the episode, 1 goes on and the world answers 2."""

    def world(self) -> tuple[Tabular, Batch, Tensor]:
        policy = Tabular.random(3, 5, 8, key=[3])
        with torch.no_grad():
            policy.table[:, 2] = -1e4  # the policy never writes the world's token
        episodes = [[0], [1, 0], [1, 1, 0], [1, 1, 1]]
        contexts = []
        for actions in episodes:
            turns = [Turn([2], False)]
            for number, action in enumerate(actions):
                turns += [Turn([2], False)] if number else []
                turns.append(Turn([action], True, logp=[0.0]))
            contexts.append(turns)
        rollouts = [Rollout("bandit", 0, sample, [turns]) for sample, turns in enumerate(contexts)]
        batch = with_rewards(collate(rollouts).to(dtype=torch.float64))
        assert float(policy.probability(batch).sum().detach()) == pytest.approx(1, abs=1e-12)
        return policy, batch, gradient(policy, policy.expectation(batch, batch.rewards[:, 0]))

    @staticmethod
    def by_turn(baseline: Baseline) -> Callable[[Batch], Tensor]:
        """A turn's return against those of the group's units that reached the turn of the same number."""

        def advantage(batch: Batch) -> Tensor:
            reward = adv.total_reward(batch)[batch.unit][:, None].expand(batch.mask.shape)[batch.mask]
            group = (batch.group()[batch.unit][:, None] * 10 + batch.segment)[batch.mask]
            A = torch.zeros_like(batch.logp_old)
            A[batch.mask] = baseline(reward, group)
            return A

        return advantage

    @pytest.mark.parametrize("G", [2, 3])
    def test_the_groups_baseline_is_unbiased(self, G: int):
        policy, batch, true = self.world()
        got = expected_gradient(policy, batch, by_group(adv.leave_one_out), G)
        torch.testing.assert_close(got, true, rtol=0, atol=1e-12)
        got = expected_gradient(policy, batch, by_group(adv.centred), G)
        torch.testing.assert_close(got, (G - 1) / G * true, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("G", [2, 3])
    @pytest.mark.parametrize("baseline", [adv.centred, adv.leave_one_out])
    def test_a_baseline_per_turn_number_is_biased(self, baseline: Baseline, G: int):
        """Later turns have fewer companions, so their credit shrinks: not a multiple of the gradient."""
        policy, batch, true = self.world()
        angle = cosine(expected_gradient(policy, batch, self.by_turn(baseline), G), true)
        print(f"cosine with the true gradient, G = {G}, {baseline.__name__} per turn number: {angle:.4f}")
        assert angle < 0.999


class TestDivergence:
    """Estimators of KL(π‖π_ref) in expectation against the categorical KL itself, one answer token of four."""

    policy = Tabular.random(4, 1, 2, key=[5])
    reference = Tabular.random(4, 1, 2, key=[6])
    behaviour = Tabular.random(4, 1, 2, key=[7])

    def exact(self, reverse: bool = False) -> Tensor:
        """KL(π‖π_ref) of the answer to the empty prompt; reverse: KL(π_ref‖π)."""
        p, q = self.policy.table[0].log_softmax(0), self.reference.table[0].detach().log_softmax(0)
        return (q.exp() * (q - p)).sum() if reverse else (p.exp() * (p - q)).sum()

    def batch(self, behaviour: Tabular) -> tuple[Batch, Tensor]:
        """Every answer, `logp_old` by `behaviour`; and the probability with which it is drawn."""
        batch = behaviour.enumerate_sequences([], 1)
        with torch.no_grad():
            return replace(batch, logp_ref=self.reference(batch).logp), behaviour.probability(batch)

    def expected(self, term: Term, behaviour: Tabular) -> tuple[float, Tensor]:
        """Mean loss of a term over answers drawn by `behaviour`, and its gradient."""
        batch, chance = self.batch(behaviour)
        loss = term.loss(batch, torch.zeros_like(batch.logp_old), self.policy(batch, frozenset({"entropy"})))
        mean = (chance[:, None] * loss).sum()
        return float(mean.detach()), gradient(self.policy, mean)

    def close(self, got: Tensor, expected: Tensor) -> bool:
        return bool((got - expected).abs().max() < 1e-12)

    def test_values(self):
        kl = float(self.exact().detach())
        value = {name: self.expected(reference_kl(1.0, name), self.policy)[0] for name in ("k1", "k2", "k3")}
        print(f"KL {kl:.4f}, means of the estimators {value}")
        assert value["k1"] == pytest.approx(kl, abs=1e-12) and value["k3"] == pytest.approx(kl, abs=1e-12)
        assert abs(value["k2"] - kl) > 0.01

    @pytest.mark.parametrize("correct", [False, True])
    def test_off_policy_values(self, correct: bool):
        """The ratio makes k1 and k3 unbiased for samples of another policy; without it neither is."""
        kl = float(self.exact().detach())
        for name in ("k1", "k3"):
            value = self.expected(reference_kl(1.0, name, off_policy_correction=correct), self.behaviour)[0]
            assert (abs(value - kl) < 1e-12) == correct

    def test_on_policy_gradients(self):
        """As losses: k1 has none, k2 that of KL(π‖π_ref), k3 that of the reverse KL."""
        forward, reverse = gradient(self.policy, self.exact()), gradient(self.policy, self.exact(reverse=True))
        k1, k2, k3 = (self.expected(reference_kl(1.0, name), self.policy)[1] for name in ("k1", "k2", "k3"))
        assert self.close(k1, torch.zeros_like(k1))
        assert self.close(k2, forward) and not self.close(k2, reverse)
        assert self.close(k3, reverse) and not self.close(k3, forward)

    @pytest.mark.parametrize("behaviour", ["policy", "behaviour"])
    def test_gradients_with_the_ratio(self, behaviour: str):
        """With the ratio in the loss, k1 and k3 have the exact gradient, on-policy and off; k2 has not."""
        forward = gradient(self.policy, self.exact())
        source = {"policy": self.policy, "behaviour": self.behaviour}[behaviour]
        k1, k2, k3 = (
            self.expected(reference_kl(1.0, name, off_policy_correction=True), source)[1] for name in ("k1", "k2", "k3")
        )
        assert self.close(k1, forward) and self.close(k3, forward) and not self.close(k2, forward)

    def test_off_policy_gradients_without_the_ratio(self):
        forward, reverse = gradient(self.policy, self.exact()), gradient(self.policy, self.exact(reverse=True))
        for name in ("k1", "k2", "k3"):
            got = self.expected(reference_kl(1.0, name), self.behaviour)[1]
            assert not self.close(got, forward) and not self.close(got, reverse)

    def test_straight_through_takes_value_and_gradient_apart(self):
        def loss(batch: Batch, A: Tensor, forward) -> Tensor:
            k2 = losses.kl_k2(batch.mask, forward.logp, batch.logp_ref)
            return losses.straight_through(losses.kl_k3(batch.mask, forward.logp, batch.logp_ref), k2)

        value, got = self.expected(Term("k3 with k2's gradient", loss, weights.token_mean), self.policy)
        assert value == pytest.approx(float(self.exact().detach()), abs=1e-12)
        assert self.close(got, gradient(self.policy, self.exact()))

    def test_entropy_bonus(self):
        """∂H/∂logit_a = −p_a (log p_a + H), and the loss is −H."""
        p = self.policy.table[0].detach().softmax(0)
        entropy = -(p * p.log()).sum()
        value, got = self.expected(entropy_bonus(1.0), self.policy)
        assert value == pytest.approx(-float(entropy), abs=1e-12)
        expected = torch.zeros_like(got)
        expected[0] = p * (p.log() + entropy)
        assert self.close(got, expected)
