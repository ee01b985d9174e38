"""Released code that gives credit by the step, against ours: GiGPO and ExpRL. See test_vectors.py."""

from dataclasses import replace

import pytest
import torch

from postrl.batch import Batch
from postrl.papers.dr_grpo import dr_grpo
from postrl.papers.exprl import exprl, step_counts, step_ends
from postrl.papers.gigpo import anchor_groups, gigpo, step_returns
from postrl.papers.grpo import grpo
from test_vectors import Vectors, load, record

__all__ = ["load"]  # a fixture

# ---------------------------------------------------------------- GiGPO


def trajectories(v: Vectors) -> Batch:
    """One unit per trajectory, one row per step, as the released code holds them."""
    names, unit = torch.unique(v.tensor("traj"), return_inverse=True)
    step, mask = v.tensor("env_step"), v.tensor("mask") > 0
    n, s = len(names), int(step.max()) + 1
    given, seen = torch.full((n, s), torch.nan, dtype=torch.float64), torch.full((n, s), -1, dtype=torch.int64)
    given[unit, step], seen[unit, step] = v.tensor("step_reward"), v.tensor("anchor")
    of = torch.zeros(n, dtype=torch.int64).scatter(0, unit, torch.arange(len(unit)))  # some row of each unit
    batch = record(v.tensor("mask"))
    one = torch.ones(n, dtype=torch.int8)
    return replace(
        batch,
        unit=unit,
        segment=torch.where(mask, step[:, None], -1).to(torch.int32),
        groups=v.tensor("group")[of][:, None],
        rewards=v.tensor("episode_return")[of][:, None],
        kind=0 * one, stop=0 * one, version=one.long(), step_rewards=given, step_groups=seen,
    )  # fmt: skip


def test_gigpo_returns_and_anchors(load):
    v = load("gigpo")
    batch = trajectories(v)
    got = step_returns(batch.step_rewards.nan_to_num(nan=0.0), v.cases["returns"]["gamma"])
    v.check("step_return", got[batch.unit, v.tensor("env_step")])
    mine, theirs = anchor_groups(batch)[batch.unit, v.tensor("env_step")], v.tensor("anchor_group")
    assert torch.equal(mine[:, None] == mine[None], theirs[:, None] == theirs[None])


@pytest.mark.parametrize("case", ["mean_norm_w10", "mean_norm_w05", "mean_std_norm_w10", "mean_std_norm_w05"])
def test_gigpo(load, case):
    """The returns are given there, hence γ = 0. A lone episode keeps its raw return, divided by 1 + eps where it is
    scaled at all."""
    v = load("gigpo")
    batch, c = trajectories(v), v.cases[case]
    given = batch.step_rewards.clone()
    given[batch.unit, v.tensor("env_step")] = v.tensor("step_return")
    batch = replace(batch, step_rewards=given)
    weight, mode, eps = c["step_advantage_w"], c["mode"], c["epsilon"]
    got = gigpo(weight, gamma=0.0, norm=mode, eps=eps, singleton="raw").advantage(batch)
    if mode == "mean_std_norm":
        episode = gigpo(0.0, norm=mode, eps=eps, singleton="raw").advantage(batch)
        lone = (batch.group()[:, None] == batch.group()[None]).sum(1)[batch.unit][:, None] == 1
        assert lone.any()
        got = torch.where(lone & batch.mask, got - episode * eps / (1 + eps), got)
    v.check(f"adv_{case}", got, batch.mask)


@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_gigpo_that_counts_an_episode_once_per_step(load, mode):
    """What a fork does by default: every step an answer of its own to GRPO. Ours differs by the recorded amount."""
    v = load("gigpo")
    batch, name = trajectories(v), f"adv_episode_nodedup_{mode}"
    rows = record(v.tensor("mask"), groups=v.tensor("group"), rewards=v.tensor("episode_return")[:, None])
    assert (torch.unique(v.tensor("group"), return_counts=True)[1] > 1).all()
    method = grpo() if mode == "mean_std_norm" else dr_grpo()
    v.check(name, method.advantage(rows), batch.mask)
    apart = (gigpo(0.0, norm=mode, singleton="raw").advantage(batch) - v.tensor(name)).abs()[batch.mask].max()
    assert float(apart) == pytest.approx(v.roles[name]["paper_formula_max_abs_diff"], abs=1e-5)


# ---------------------------------------------------------------- ExpRL

HASH = {0: "x", 1: "#"}


def answers(v: Vectors, likert: str, clip: bool = True) -> Batch:
    """The released trainer's steps and verdicts; an answer as long as the limit is truncated."""
    step, verdict = v.tensor("step_of_token"), v.tensor(likert)
    batch = record(v.tensor("mask"), groups=v.tensor("index"))
    long = v.tensor("mask").sum(1) == int(v.tensor("max_response_length"))
    assert bool(long.any())
    score = torch.where(verdict > 0, (verdict - 1) / 4, torch.nan).double()
    fields = {"rewards": score[:, None]} if score.dim() == 1 else {"step_rewards": score}
    return replace(batch, segment=(step - 1).to(torch.int32), stop=(long & torch.tensor(clip)).to(torch.int8), **fields)


def test_exprl_steps(load):
    """A delimiter is three "#" in a row; a fourth is a step of its own there and opens the next step here."""
    v = load("exprl")
    marks, lengths, runs = v.tensor("is_hash").tolist(), v.tensor("mask").sum(1).long().tolist(), 0
    for row, (mark, length) in enumerate(zip(marks, lengths, strict=True)):
        ends = step_ends(mark[:length], lambda tokens: "".join(HASH[t] for t in tokens))
        wanted = v.tensor("step_of_token")[row, :length]
        theirs = [k + 1 for k in range(length) if k + 1 == length or wanted[k + 1] != wanted[k]]
        four = "####" in "".join(HASH[t] for t in mark[:length])
        runs += four
        assert ends == ([e for e in theirs if mark[e - 4 : e] != [1] * 4] if four else theirs)
    assert runs == 1


@pytest.mark.parametrize(("case", "clip"), [("delta", False), ("delta_clip", True)])
def test_exprl_process(load, case, clip):
    """A lone step keeps its score there; Eq. 2 of the text, our default, gives it nothing."""
    v = load("exprl")
    batch = answers(v, "likert", clip)
    v.check(f"adv_{case}", exprl(single_segment="raw", clip_overflow=clip).advantage(batch), batch.mask)
    apart = (exprl(clip_overflow=clip).advantage(batch) - v.tensor(f"adv_{case}"))[batch.mask].abs().max()
    assert float(apart) == v.roles[f"adv_{case}"]["paper_formula_max_abs_diff"]
    assert torch.equal(exprl().terms[0].weight(batch) > 0, v.tensor(f"mask_{case}") > 0)


def test_exprl_unread_step(load):
    """Both answers with an unread verdict leave the loss; released, one of them trains with a credit of −100.5."""
    v = load("exprl")
    batch = answers(v, "likert_unparsed")
    lost = (v.tensor("likert_unparsed") == 0).any(1)
    method = exprl(single_segment="raw")
    assert torch.equal((method.terms[0].weight(batch) > 0).any(1), ~lost)
    v.check("adv_delta_unparsed", method.advantage(batch), batch.mask & ~lost[:, None])
    assert float((v.tensor("adv_delta_unparsed") * v.tensor("mask_delta_unparsed")).min()) == -100.5


def test_exprl_end_norm(load):
    """Equal but at the last step, where the released code has 0, and in answers over the limit."""
    v = load("exprl")
    batch = answers(v, "likert")
    got = exprl("end_norm").advantage(batch)
    last = batch.segment == (step_counts(batch) - 1)[:, None].int()
    inner = batch.mask & ~last & (batch.stop == 0)[:, None]
    assert inner.sum() > 20
    v.check("adv_endnorm", got, inner)
    v.check("step_score", got, batch.mask & last & (batch.stop == 0)[:, None])
    assert float((got - v.tensor("adv_endnorm"))[batch.mask].abs().max()) == 1.0


def test_exprl_group_norm(load):
    """Their baseline is all but 0: the mean over answers and steps, divided by the padded length once more."""
    v = load("exprl")
    batch = answers(v, "likert")
    apart = (exprl("group_norm").advantage(batch) - v.tensor("adv_groupnorm"))[batch.mask].abs().max()
    assert float(apart) == pytest.approx(v.roles["adv_groupnorm"]["paper_formula_max_abs_diff"], abs=1e-6)


def test_exprl_outcome(load):
    v = load("exprl")
    method = exprl("outcome", singleton="raw", eps=v.cases["outcome"]["epsilon"])
    batch = answers(v, "outcome_likert")
    v.check("adv_outcome", method.advantage(batch), batch.mask)
    unread = answers(v, "outcome_likert_unparsed")
    mask = v.tensor("mask_outcome_unparsed") > 0
    assert torch.equal(method.terms[0].weight(unread) > 0, mask)
    apart = (method.advantage(unread) - v.tensor("adv_outcome_unparsed"))[mask].abs().max()
    wanted = v.roles["adv_outcome_unparsed"]["paper_formula_max_abs_diff"]
    assert float(apart) == pytest.approx(wanted, abs=1e-5)
