"""Returns and GAE of `advantages.py` across observations: what a tool's answer between two turns does to credit."""

import math
from dataclasses import replace

import pytest
import torch

import laws
from builders import ragged_rollouts
from postrl.advantages import discounted_returns, gae, spread_steps, whitened
from postrl.errors import UserError
from postrl.rollout import collate

MASK = [1, 1, 0, 0, 1, 1]


def turns(mask=MASK):
    """A batch of one row whose sampled tokens are given by `mask`."""
    case = laws.by_hand([0], [1.0], old=[[0.5] * len(mask)], new=[[0.5] * len(mask)])
    return replace(case.batch, mask=torch.tensor([mask], dtype=torch.bool))


def row(*x: float) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.float64)


def test_reward_at_the_end_reaches_the_first_turn():
    """A running return that restarts at every observation leaves the first turn without credit."""
    laws.equal(discounted_returns(row(0, 0, 0, 0, 0, 1), turns()), [[1, 1, 0, 0, 1, 1]])
    laws.equal(discounted_returns(row(0, 0, 0, 0, 0, 1), turns(), gamma=0.5), [[0.125, 0.25, 0, 0, 0.5, 1]])


def test_two_conventions_over_a_gap():
    """λ = 0.95, V = 0.5, a reward of 1 at the end: 0.5·λ³ = 0.429 if the gap is skipped, 0.341 if it is walked."""
    values = torch.full((1, 6), 0.5, dtype=torch.float64)
    carry, zero = (gae(row(0, 0, 0, 0, 0, 1), values, turns(), lam=0.95, gap=g) for g in ("carry", "zero"))
    laws.equal(carry, [[0.5 * 0.95**3, 0.5 * 0.95**2, 0, 0, 0.5 * 0.95, 0.5]])
    first = -0.5 * 0.95 + 0.5 * 0.95**3 + 0.5 * 0.95**5
    assert zero[0, 0] == pytest.approx(first) and first == pytest.approx(0.341, abs=5e-4)


def test_gae_without_gaps_by_hand_and_at_its_ends():
    """λ = 1 is the return minus the value, λ = 0 the one-step error; both gaps agree where there is none."""
    batch, rewards, values = turns([1, 1, 1]), row(1, 2, 3), row(0.5, -1, 2)
    laws.equal(gae(rewards, values, batch, gamma=0.5), [[1 + 1 + 0.75 - 0.5, 2 + 1.5 + 1, 3 - 2]])
    laws.equal(gae(rewards, values, batch, gamma=0.5, lam=0.0), [[1 - 0.5 - 0.5, 2 + 1 + 1, 1]])
    laws.equal(gae(rewards, values, batch, 0.5, 0.5), [[0.25 * 4.25, 4.25, 1]])
    assert torch.equal(gae(rewards, values, batch, 0.9, 0.8), gae(rewards, values, batch, 0.9, 0.8, gap="zero"))


@pytest.mark.parametrize("seed", range(3))
def test_step_rewards_reach_their_tokens_against_a_loop(seed: int):
    """A missing reward, a unit whose world gave fewer steps than it has turns, several contexts, tool tokens."""
    rollouts = ragged_rollouts(seed)
    for number, rollout in enumerate(rollouts):
        rollout.step_rewards = [[1.5, math.nan], [0.25, -2.0, 3.0], []][number % 3]
    batch = collate(rollouts).to(dtype=torch.float64)
    got, met = spread_steps(batch), set()
    assert got.dtype == torch.float64 and got.shape == batch.mask.shape
    for b, t in torch.cartesian_prod(*map(torch.arange, batch.mask.shape)).tolist():
        steps, segment = rollouts[int(batch.unit[b])].step_rewards, int(batch.segment[b, t])
        there = bool(batch.mask[b, t]) and segment < len(steps)
        expected = steps[segment] if there and not math.isnan(steps[segment]) else 0.0
        assert float(got[b, t]) == expected
        met.add((bool(batch.mask[b, t]), segment < len(steps), expected))
    assert {(True, True, 3.0), (True, True, 0.0), (True, False, 0.0), (True, True, 1.5)} <= met
    assert (False, True, 0.0) in met


def test_without_step_rewards_it_is_said_what_to_do():
    with pytest.raises(UserError, match="no step rewards: use an environment whose Step has a reward"):
        spread_steps(replace(turns(), step_rewards=None))


def test_nothing_off_the_mask_is_read():
    def check(case):
        mask, rewards, values = case.batch.mask, case.now["entropy"], case.now["values"]
        poison = [torch.where(mask, x, torch.nan) for x in (rewards, values)]
        for gap in ("carry", "zero"):
            clean = gae(rewards, values, case.batch, 0.9, 0.8, gap)
            assert torch.equal(gae(*poison, case.batch, 0.9, 0.8, gap), clean)
            assert (clean[~mask] == 0).all()
        for f in (discounted_returns, whitened):
            assert torch.equal(f(poison[0], case.batch), f(rewards, case.batch))

    laws.over_cases(check)


def test_whitening_gives_mean_zero_and_deviation_one_over_sampled_tokens():
    def check(case):
        x = whitened(case.now["values"], case.batch)[case.batch.mask]
        if len(x) > 2:
            assert float(x.mean()) == pytest.approx(0, abs=1e-10) and float(x.std()) == pytest.approx(1, abs=1e-6)

    laws.over_cases(check)
