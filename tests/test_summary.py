"""The figures of a step, by hand; what is undefined is left out."""

import json
import math
from dataclasses import replace

import pytest
import torch

from builders import rollout
from postrl.batch import Batch, Kind, Stop
from postrl.optimise import Seen
from postrl.papers.grpo import grpo
from postrl.rollout import collate
from postrl.summary import step_metrics


def batch_of(*rewards: tuple[int, float | None, float | None], **rest) -> Batch:
    """(group, correct, form) per unit; `form` is what trains."""
    return collate(
        [
            rollout(g, i, rewards={"correct": c, "form": f}, reward_weights={"correct": 0.0, "form": 1.0}, **rest)
            for i, (g, c, f) in enumerate(rewards)
        ]
    )


def figures(batch: Batch, seen: Seen | None = None, entropy: torch.Tensor | None = None) -> dict[str, float]:
    zero = torch.zeros_like(batch.logp_old)
    seen = Seen(zero + 1, zero, batch.logp_old) if seen is None else seen
    return step_metrics(grpo(), batch, grpo().advantage(batch), seen, entropy)


def test_rewards_and_their_names():
    got = figures(batch_of((0, 1.0, 0.5), (0, 0.0, None), (1, None, 0.25)))
    assert got["reward"] == pytest.approx(0.375) and got["reward/form"] == pytest.approx(0.375)
    assert got["reward/correct"] == got["pass@1"] == pytest.approx(0.5)
    assert got["missing"] == pytest.approx(1 / 3) and got["units"] == 3


def test_groups_without_variance_are_counted_in_groups():
    """TRL #6365: per group. One group of five without variance and one of two with: a half, not five sevenths."""
    got = figures(batch_of(*[(0, 0.0, 0.3)] * 5, (1, 0.0, 0.0), (1, 1.0, 1.0)))
    assert got["groups/constant"] == 0.5 and got["groups/shaped_only"] == 0.0


def test_shaped_variance_inside_groups_of_one_outcome_is_told():
    """verl-recipe #125: all wrong, while the shaped reward varies."""
    got = figures(batch_of((0, 0.0, 0.1), (0, 0.0, 0.2), (1, 0.0, 0.1), (1, 1.0, 0.3)))
    assert got["groups/shaped_only"] == 0.5 and got["groups/constant"] == 0.0


def test_a_group_of_missing_rewards_has_no_variance():
    assert figures(batch_of((0, None, None), (0, None, None), (1, 0.0, 0.0), (1, 1.0, 1.0)))["groups/constant"] == 0.5


def test_no_rewards_at_all():
    """Demonstrations: nothing is said of rewards, nor of groups without variance."""
    got = figures(collate([rollout(rewards={}), rollout(sample=1, rewards={})]))
    assert not {"reward/form", "pass@1", "groups/constant"} & set(got)


def test_stops_and_lengths():
    ends = [(1, Stop.FINISHED), (4, Stop.TRUNCATED), (0, Stop.ERROR), (3, Stop.FINISHED)]
    rollouts = [rollout(completion=(3,) * length, sample=i, stop=stop) for i, (length, stop) in enumerate(ends)]
    got = figures(collate(rollouts))
    assert [got[name] for name in ("tokens", "length", "truncated", "errors")] == [8, 2, 0.25, 0.25]


def test_mismatch_of_sampler_and_training():
    batch = batch_of((0, 0.0, 0.0), (0, 1.0, 1.0))
    shift = torch.zeros_like(batch.logp_old)
    shift[0, 2] = 0.3
    got = figures(replace(batch, logp_old=batch.logp_old + shift))
    assert got["mismatch/max"] == pytest.approx(0.3) and got["mismatch/mean"] == pytest.approx(0.3 / 4)


def test_pairs_and_demonstrations_have_no_sampler_to_mismatch():
    batch = batch_of((0, 0.0, 0.0), (0, 1.0, 1.0))
    apart = replace(batch, logp_old=batch.logp_old - batch.mask.float())
    assert figures(apart)["mismatch/mean"] == pytest.approx(1.0)
    given = replace(apart, kind=torch.tensor([Kind.DEMONSTRATION, Kind.ROLLOUT]).to(batch.kind.dtype))
    given = replace(given, logp_old=given.logp_old + given.mask.float() * (given.unit == 1)[:, None])
    assert figures(given)["mismatch/max"] == pytest.approx(0.0, abs=1e-6)
    assert "mismatch/mean" not in figures(replace(apart, kind=torch.full_like(batch.kind, int(Kind.PAIR))))


def test_figures_of_a_step_without_a_forward_are_left_out():
    """One update that was skipped: the training log-probabilities are unknown, not equal to the sampler's."""
    batch = batch_of((0, 0.0, 0.5), (0, 0.0, 0.5))
    got = figures(replace(batch, logp_old=torch.full_like(batch.logp_old, torch.nan)))
    assert not {"entropy", "kl", "mismatch/mean", "mismatch/max"} & set(got)
    assert got["tokens"] == 4


def test_divergence_from_the_reference_only_if_there_is_one():
    batch = batch_of((0, 0.0, 0.0), (0, 1.0, 1.0))
    zero = torch.zeros_like(batch.logp_old)
    seen = Seen(zero + 1, zero, zero, tokens=4.0, kl_reference=2.0)
    assert figures(replace(batch, logp_ref=zero), seen)["kl_reference"] == 0.5
    assert "kl_reference" not in figures(batch, seen)


def test_entropy_from_either_place():
    batch = batch_of((0, 0.0, 0.0), (0, 1.0, 1.0))
    entropy = torch.full_like(batch.logp_old, 0.5).masked_fill(~batch.mask, torch.nan)
    assert figures(batch, entropy=entropy)["entropy"] == 0.5
    zero = torch.zeros_like(batch.logp_old)
    assert figures(batch, Seen(zero + 1, zero, zero, tokens=4.0, entropy=2.0))["entropy"] == 0.5


def test_no_sampled_token():
    got = figures(batch_of((0, 0.0, 0.0), (0, 1.0, 1.0), completion=()))
    assert got["tokens"] == 0 and got["length"] == 0 and "entropy" not in got
    assert all(not math.isnan(value) for value in got.values())


def test_a_methods_own_figures_carry_a_common_name_and_what_is_undefined_is_left_out():
    def own(batch: Batch, now: torch.Tensor) -> dict[str, float]:
        assert batch.observed is not None
        return {"observed": float(batch.observed.mean()), "now": float(now.mean()), "nothing": math.nan}

    batch = batch_of((0, 1.0, 1.0), (0, 0.0, 0.0))
    zero = torch.zeros_like(batch.logp_old)
    seen = Seen(zero + 1, zero, zero - 2.0, observed=zero + 3.0)
    got = step_metrics(replace(grpo(), figures=own), batch, zero, seen, None)
    assert {n: v for n, v in got.items() if n.startswith("method/")} == {"method/observed": 3.0, "method/now": -2.0}


def test_plain_numbers():
    assert json.loads(json.dumps(figures(batch_of((0, 1.0, 1.0), (0, 0.0, None)))))["units"] == 2.0
