"""The control problem: what is played, regressed, charged and measured; no claim about which arm is better."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from postrl.errors import UserError

pytest.importorskip("gymnasium")
pytest.importorskip("stable_baselines3")

from postrl.envs import control

TINY = control.Sizes(
    demonstrations=2,
    policies=2,
    rollouts=2,
    imitation_steps=20,
    critic_steps=5,
    online_steps=20,
    evaluate_every=20,
    evaluation_episodes=1,
)


@pytest.fixture(scope="module")
def offline() -> control.Transitions:
    return control.demonstrate(4, 0)


class Push(nn.Module):
    """Always the same action."""

    def __init__(self, action: float):
        super().__init__()
        self.action = action

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return torch.full((len(observations), 1), self.action)


class Pays(nn.Module):
    """Twin critics that pay −10·a, one of them 10 more."""

    def forward(self, observations: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return -10 * actions, 10 - 10 * actions


def test_episodes_are_whole_and_repeat(offline):
    assert len(offline) == 4 * control.STEPS and offline.returns.shape == (4,)
    assert np.array_equal(offline.following[:-1][: control.STEPS - 1], offline.observations[1 : control.STEPS])
    assert np.abs(offline.actions).max() == 1  # noise is clipped at what the world takes
    again = control.demonstrate(2, 0)
    assert np.array_equal(again.observations, offline.observations[: 2 * control.STEPS])
    assert not np.array_equal(control.demonstrate(1, 1).observations, again.observations[: control.STEPS])


def test_the_controller_by_hand_is_better_than_nothing(offline):
    assert offline.returns.mean() > control.rollouts([Push(0.0)], 4, 0).returns.mean() + 300


def test_chosen_episodes_stay_whole(offline):
    chosen = offline.pick(np.array([2, 2, 0]))
    assert chosen.returns.tolist() == [offline.returns[i] for i in (2, 2, 0)]


def test_imitation_fits_and_differs_by_seed(offline):
    first, second, long = (control.imitate(offline, seed, steps) for seed, steps in ((0, 10), (1, 10), (0, 150)))
    observations, actions = torch.from_numpy(offline.observations), torch.from_numpy(offline.actions)
    with torch.no_grad():
        error = [(actor(observations) - actions).square().mean().item() for actor in (first, long)]
        assert not torch.equal(first(observations), second(observations))
    assert error[1] < 0.8 * error[0]


def test_actors_take_turns():
    played = control.rollouts([Push(-0.5), Push(0.5)], 4, 0, noise=0.0)
    assert [played.pick(np.array([i])).actions.mean() for i in range(4)] == [-0.5, 0.5, -0.5, 0.5]


def test_the_learner_starts_from_the_actor_and_the_replay(offline):
    actor = control.imitate(offline, 0, 10)
    learner = control.agent(actor, [offline, offline.pick(np.array([1]))], 0)
    inputs = torch.from_numpy(offline.observations[:50])
    with torch.no_grad():
        assert torch.equal(learner.actor(inputs), actor(inputs))
        assert torch.equal(learner.actor_target(inputs), actor(inputs))
    buffer = learner.replay_buffer
    assert buffer is not None and buffer.pos == 5 * control.STEPS
    assert np.array_equal(buffer.observations[: len(offline), 0], offline.observations)
    assert np.array_equal(buffer.actions[len(offline) : buffer.pos, 0], offline.pick(np.array([1])).actions)
    assert buffer.dones.sum() == 0


def test_the_best_action_counts_by_the_smaller_critic():
    """Twin critics −(a − 0.3)² and its half, which is larger: the action nearest to 0.3 wins."""

    def critic(observations: torch.Tensor, actions: torch.Tensor):
        q = -((actions - 0.3) ** 2)
        return q, q / 2

    start = torch.zeros(2, 3)
    values = [
        control.best_value(critic, actors, start) for actors in ([Push(-0.5)], [Push(-0.5), Push(0.5), Push(1.0)])
    ]
    assert torch.allclose(torch.stack(values), -torch.tensor([[0.64] * 2, [0.04] * 2]))


def test_regression_fits_the_target_of_the_best_actor(offline, monkeypatch: pytest.MonkeyPatch):
    """With a target critic that stands still and pays −10·a, it comes to r + 5γ for actors −0.5 and 0.25."""
    learner = control.agent(control.imitate(offline, 0, 1), [offline], 0)
    learner.critic_target = Pays()
    monkeypatch.setattr(control, "polyak_update", lambda *rest: None)
    inputs = (torch.from_numpy(x[::7]) for x in (offline.observations, offline.actions, offline.rewards))
    observations, actions, rewards = inputs
    errors = []
    for steps in (1, 300):
        control.pretrain_critic(learner, offline, offline, [Push(-0.5), Push(0.25)], steps, 7)
        with torch.no_grad():
            off = learner.critic(observations, actions)[1][:, 0] - (rewards + control.GAMMA * 5)
        errors.append(float(off.square().mean()))
    assert errors[1] < 0.15 * errors[0]


def test_the_gap_of_a_known_critic():
    """Twin critics that say c and c + 1: the gap is the mean of |c − return|, and returns are never positive."""

    class Constant(nn.Module):
        def __init__(self, c: float):
            super().__init__()
            self.c = c

        def forward(self, observations, actions):
            return torch.full_like(actions, self.c), torch.full_like(actions, self.c + 1)

    zero, high = (control.value_gap(Constant(c), Push(0.0), 1, 0) for c in (0.0, 10.0))
    assert high - zero == pytest.approx(10, rel=1e-5)
    # Hanging still costs about π² a step: a discounted sum of at most π²/(1 − γ).
    assert 100 < zero < np.pi**2 / (1 - control.GAMMA) + 50


def test_a_run_repeats_and_charges_what_it_sampled():
    first, again = (control.compare("pooled", 1, TINY) for _ in range(2))
    assert first == again
    assert first.steps == [400, 420] and len(first.returns) == len(first.gap) == 2
    curves = {arm: control.compare(arm, 1, TINY) for arm in ("random", "single", "pooled buffer")}
    assert {arm: curve.steps[0] for arm, curve in curves.items()} == {"random": 0, "single": 400, "pooled buffer": 400}
    assert len({curve.returns[0] for curve in [first, *curves.values()]}) == 1, "every arm starts from π_1"
    fresh = {curves["random"].gap[0], curves["pooled buffer"].gap[0]}
    assert len(fresh) == 1 and first.gap[0] not in fresh, "only a regressed critic differs at the start"
    for one, other in itertools.combinations([first, *curves.values()], 2):
        assert one.returns[-1] != other.returns[-1]


def test_dealt_rewards_and_another_learner(offline):
    dealt = offline.dealt(3)
    assert np.array_equal(np.sort(dealt.rewards), np.sort(offline.rewards)), "the same rewards"
    assert np.mean(dealt.rewards == offline.rewards) < 0.1 and np.array_equal(dealt.actions, offline.actions)
    fresh, pooled, buffer = (control.compare(arm, 1, TINY) for arm in ("dealt", "pooled", "pooled buffer"))
    assert fresh.returns[0] == pooled.returns[0] and len({fresh.gap[0], pooled.gap[0], buffer.gap[0]}) == 3
    one, other = (control.compare("random", 1, TINY, learner_seed=seed) for seed in (1, 2))
    assert one == control.compare("random", 1, TINY)
    assert one.returns[0] == other.returns[0], "the same policy on the same starts"
    assert one.gap[0] != other.gap[0] and one.returns[1] != other.returns[1]


def test_the_gap_is_that_of_the_first_critic(monkeypatch: pytest.MonkeyPatch):
    """Fine-tuning moves the learner's critic, not the copy that the gap is about."""
    seen = []
    monkeypatch.setattr(control, "mean_return", lambda *rest: 0.0)
    monkeypatch.setattr(
        control, "value_gap", lambda critic, *rest: seen.append([p.sum().item() for p in critic.parameters()]) or 0.0
    )
    control.compare("random", 0, TINY)
    assert len(seen) == 2 and seen[0] == seen[1]


def test_bad_options_are_named():
    with pytest.raises(UserError, match="multiple of policies"):
        control.Sizes(policies=3, rollouts=4)
