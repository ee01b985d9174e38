"""GiGPO: two levels of comparison, who is alone at which, and how returns flow back."""

from dataclasses import replace

import pytest
import torch

import laws
import reference
from postrl.advantages import over_steps
from postrl.batch import Batch
from postrl.collect import Limits, collect
from postrl.envs.two_turn import TwoTurn
from postrl.errors import UserError
from postrl.papers.gigpo import anchor_groups, gigpo, step_returns
from postrl.papers.grpo import grpo
from postrl.policies.base import Sampling
from postrl.rollout import collate
from scripted import CHARACTERS, Scripted

OPTIONS = [
    {"norm": "mean_std_norm", "singleton": "raw"},
    {"omega": 0.5, "gamma": 0.5, "missing": "zero", "dual": 3.0},
    {"steps": "outcome", "norm": "mean_std_norm", "ddof": 0, "eps": 1e-4},
    {"steps": "outcome", "singleton": "raw", "low": 0.1, "high": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(gigpo(**options), case, **options), examples=10)


@pytest.mark.parametrize("law", [law for law in laws.LAWS if law != "reward shift"])
def test_laws(law):
    laws.hold(law, gigpo(norm="mean_std_norm", steps="outcome", gamma=1.0), examples=6)


def episodes(groups, returns, seen, given, steps=None) -> Batch:
    """One token per step: unit n's step k is column k; `seen` numbers its observations, −1 after its last."""
    length = [sum(s >= 0 for s in row) for row in seen]
    case = laws.by_hand(groups, returns, [[0.5] * n for n in length], [[0.5] * n for n in length])
    width = max(length)
    return replace(
        case.batch,
        segment=torch.where(case.batch.mask, torch.arange(width)[None], -1).to(torch.int32),
        step_groups=torch.tensor(seen),
        step_rewards=torch.tensor(given, dtype=torch.float64),
    )


def test_by_hand():
    """Two episodes of one task with returns 1 and 0, γ = 1/2. Both begin at state 7; the first meets 8, the second 9.

    R: first (0 + 1/2, 1), second (0, 0). At state 7: mean 1/4, so A_S = ±1/4. At 8 and 9 each is alone: 0. A_E = ±1/2.
    """
    batch = episodes([3, 3], [1.0, 0.0], [[7, 8], [7, 9]], [[0.0, 1.0], [0.0, 0.0]])
    laws.equal(gigpo(gamma=0.5).advantage(batch), [[0.75, 0.5], [-0.75, -0.5]])
    laws.equal(gigpo(gamma=0.5, omega=2.0).advantage(batch), [[1.0, 0.5], [-1.0, -0.5]])
    # ddof 1: episodes ±1/√2·…, state 7 the same numbers: (1/4)/(1/(2√2)) = 1/√2
    half = 2**-0.5
    laws.equal(gigpo(gamma=0.5, norm="mean_std_norm", eps=0.0).advantage(batch), [[2 * half, half], [-2 * half, -half]])


def test_who_is_alone():
    """A lone step has no step credit; a lone episode has none or its raw return; neither leaks into the other."""
    batch = episodes([1, 2, 2], [3.0, 1.0, 0.0], [[7, 8], [7, 7], [9, -1]], [[0.0, 3.0], [0.0, 1.0], [0.0, torch.nan]])
    # Task 1 shares observation 7 with task 2, but tasks are apart. In task 2 one episode visits 7 twice.
    zero, raw = (gigpo(gamma=0.5, singleton=s).advantage(batch) for s in ("zero", "raw"))
    laws.equal(zero, [[0.0, 0.0], [0.5 - 0.25, 0.5 + 0.25], [-0.5, 0.0]])
    laws.equal(raw, [[3.0, 3.0], [0.5 - 0.25, 0.5 + 0.25], [-0.5, 0.0]])


def test_a_long_episode_counts_once_among_episodes():
    """Returns 1 and 0; the first takes five steps. Counted per step its mean would be 5/6 and A_E = 1/6, −5/6."""
    batch = episodes([0, 0], [1.0, 0.0], [[1, 2, 3, 4, 5], [6, -1, -1, -1, -1]], [[0.0] * 5] * 2)
    laws.equal(gigpo().advantage(batch), [[0.5] * 5, [-0.5] + [0.0] * 4])


def test_outcome_puts_the_reward_at_the_last_step():
    batch = episodes([0, 0], [1.0, 0.0], [[7, 7, 8], [7, -1, -1]], [[9.0] * 3] * 2)
    # R at 7: 1/4, 1/2 and 0: mean 1/4
    laws.equal(gigpo(gamma=0.5, steps="outcome").advantage(batch), [[0.5, 0.75, 0.5], [-0.75, 0.0, 0.0]])


def test_without_a_shared_step_it_is_centred_grpo():
    def check(case):
        n, s = case.batch.step_groups.shape
        alone = replace(case.batch, step_groups=torch.arange(n * s).reshape(n, s))
        laws.near(gigpo(norm="mean_std_norm").advantage(alone), grpo().advantage(alone), "advantage")
        laws.near(gigpo(norm="mean_std_norm", omega=0.0).advantage(case.batch), grpo().advantage(alone), "advantage")

    laws.over_cases(check)


def test_a_missing_episode_leaves_the_step_statistics():
    batch = episodes([0, 0, 0], [1.0, 0.0, torch.nan], [[7], [7], [7]], [[1.0], [0.0], [50.0]])
    laws.equal(gigpo().advantage(batch), [[1.0], [-1.0], [0.0]])


def test_returns():
    returns = step_returns(torch.tensor([[1.0, 0.0, 4.0]], dtype=torch.float64), 0.5)
    laws.equal(returns, [[2.0, 2.0, 4.0]])


def test_steps_without_tokens_of_the_row_read_nothing():
    batch = episodes([0, 0], [1.0, 0.0], [[7, 8], [7, 9]], [[0.0, 1.0], [0.0, 0.0]])
    beyond = replace(batch, segment=torch.where(batch.mask, 5, -1).to(torch.int32))
    assert torch.isnan(over_steps(batch.step_rewards, beyond)).all()
    laws.equal(gigpo().advantage(beyond), [[0.5, 0.5], [-0.5, -0.5]])
    assert anchor_groups(batch).tolist()[0][0] == anchor_groups(batch).tolist()[1][0]


@pytest.mark.parametrize("options", [{"gamma": 1.5}, {"gamma": -0.1}, {"omega": -1.0}, {"omega": float("inf")}])
def test_options_out_of_range_are_named(options):
    [(name, _)] = options.items()
    with pytest.raises(UserError, match=name):
        gigpo(**options)


def test_a_batch_without_observations_or_rewards_is_refused():
    batch = episodes([0, 0], [1.0, 0.0], [[7, 8], [7, 9]], [[0.0, 1.0], [0.0, 0.0]])
    with pytest.raises(UserError, match="step_groups"):
        gigpo().advantage(replace(batch, step_groups=None))
    with pytest.raises(UserError, match="step rewards"):
        gigpo().advantage(replace(batch, step_rewards=None))


def test_a_worlds_observations_make_the_groups():
    """One task group over two secrets: both second turns about "a" are compared, the lone one about "b" is not.

    Everyone's opening is alike: returns γ·1, 0, γ·1 there have the mean γ·2/3; the second turns about "a" 1 and 0."""
    task = TwoTurn(length=1, alphabet="ab", test_share=0)
    secrets = {task.environment("train", index).info["answer"]: index for index in range(2)}
    worlds = [task.environment("train", secrets[secret]) for secret in "aab"]
    sampler = Scripted(lambda context, key: "x" if key[-1] == 0 or key[3] == 1 else context[-1])
    keys = [(0, 0, 0, sample) for sample in range(3)]
    rollouts = collect(sampler, CHARACTERS, worlds, keys, Sampling(), task.rubric, Limits(max_turns=2))
    batch = collate(rollouts).to(dtype=torch.float64)
    assert batch.step_groups is not None and batch.step_groups.tolist() == [[0, 1], [0, 1], [0, 2]]
    advantage = gigpo(gamma=0.5).advantage(batch)
    for unit, (first, second) in enumerate(
        [(1 / 3 + 1 / 6, 1 / 3 + 1 / 2), (-2 / 3 - 1 / 3, -2 / 3 - 1 / 2), (0.5, 1 / 3)]
    ):
        for segment, wanted in enumerate((first, second)):
            got = advantage[unit][batch.segment[unit] == segment]
            laws.equal(got, [wanted] * 2)
