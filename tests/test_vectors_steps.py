"""Released code that gives credit by the step, against ours: GiGPO and ExpRL. See test_vectors.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from postrl.batch import Batch
from postrl.papers.gigpo import anchor_groups, gigpo, step_returns
from postrl.papers.grpo import grpo
from postrl.papers.dr_grpo import dr_grpo
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
