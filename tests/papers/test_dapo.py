"""DAPO: each of its four parts."""

from dataclasses import replace

import pytest
import torch

import laws
import reference
from postrl.errors import UserError
from postrl.losses import clipped
from postrl.papers.dapo import dapo, mixed, overlong
from postrl.papers.grpo import grpo

SHORT = {"max_length": 6, "cache": 4}


@pytest.mark.parametrize("options", [SHORT, {**SHORT, "penalty": 0.5}, {"dual": 1.5}, {"ddof": 0, "missing": "zero"}])
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(dapo(**options), case, **options))


@pytest.mark.parametrize("law", laws.LAWS)
def test_laws_with_the_penalty_active(law):
    laws.hold(law, dapo(**SHORT), examples=10)


def test_soft_overlong_penalty():
    """The paper's numbers: nothing up to 16384 tokens, −1/2 in the middle of the cache, −1 from 20480 on."""
    lengths = torch.tensor([0, 16384, 18432, 20480, 30000])
    assert overlong(lengths, 20480, 4096).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_by_hand():
    """Rewards 1 and 1, lengths 1 and 3, L_max = 3, cache 2: shaped rewards 1 and 0. A = ±1/√2, W = 1/4 each token.

    Nothing tells right from wrong here, so dynamic sampling drops the group although the shaped rewards differ.
    """
    case = laws.by_hand([0, 0], [1.0, 1.0], old=[[0.5], [0.5] * 3], new=[[0.6], [0.5, 0.45, 0.3]])
    method = dapo(max_length=3, cache=2, eps=0.0)
    got = laws.update(method, case.batch, case.now)
    a = 2**-0.5
    wanted = [[-1.2 * a / 4, 0, 0], [a / 4, 0.9 * a / 4, 0]]  # r = 0.6 is below the lower bound
    laws.equal(got.gradient["logp"], wanted)
    assert got.weights[0][case.batch.mask].tolist() == [0.25] * 4
    assert method.keep(case.batch).tolist() == [False, False]


def test_clip_higher_lets_rising_tokens_rise_further():
    """r = 1.25 with A > 0: past 1.2, within 1.28."""
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.4], [0.5]], new=[[0.5], [0.5]])
    assert laws.update(dapo(), case.batch, case.now).gradient["logp"][0, 0] < 0
    assert laws.update(dapo(high=0.2), case.batch, case.now).gradient["logp"][0, 0] == 0


def test_equal_bounds_are_ppos_token_loss():
    def check(case):
        term, advantage = dapo(high=0.2).terms[0], grpo().advantage(case.batch)
        forward = laws.Forward(logp=case.now["logp"])
        ppo = clipped(case.batch.mask, case.now["logp"], case.batch.logp_old, advantage, 0.2, 0.2)
        assert torch.equal(term.loss(case.batch, advantage, forward), ppo)

    laws.over_cases(check)


def test_dynamic_sampling_reads_raw_correctness():
    """Groups all right (with a varying style reward), all wrong, mixed, mixed with a missing answer, and of one."""
    correct = [1, 1, 0, 0, 1, 0, 1, 0, torch.nan, 1]
    groups = [5, 5, -2, -2, 9, 9, 7, 7, 7, 1]
    case = laws.by_hand(groups, correct, old=[[0.5]] * 10, new=[[0.5]] * 10)
    style = torch.arange(10, dtype=torch.float64)[:, None]
    shaped = replace(
        case.batch,
        rewards=torch.cat([case.batch.rewards, style], 1),
        reward_names=("correct", "style"),
        reward_weights=torch.ones(2, dtype=torch.float64),
    )
    for batch in (case.batch, shaped):
        assert dapo().keep(batch).tolist() == [False] * 4 + [True] * 5 + [False]
    assert dapo(correct="style").keep(shaped).tolist() == [True] * 9 + [False], "the wrong column keeps noise"
    assert dapo(correct=None).keep is None


def test_unknown_component_and_bad_cache_are_named():
    case = laws.by_hand([0], [1.0], old=[[0.5]], new=[[0.5]])
    with pytest.raises(UserError, match=r"'solved'.*`correct`.*correct"):
        mixed(case.batch, "solved")
    with pytest.raises(UserError, match="cache is 10 and max_length is 5"):
        dapo(max_length=5, cache=10)
