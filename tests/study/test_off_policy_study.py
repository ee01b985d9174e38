"""Study of many updates per rollout batch: what it sees of each class of tokens, its controls, and its identity."""

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import laws
from postrl.envs.conflict import characters, conflict_task
from postrl.papers.grpo import grpo
from postrl.policies.base import Sampling
from postrl.policies.decoder import Decoder
from postrl.policies.decoder_config import DecoderConfig
from postrl.source import OnPolicy
from postrl.study import finding
from postrl.study.rewriting import settings
from postrl.train import train

PATH = finding.find("off_policy")


@pytest.fixture(scope="module")
def code() -> ModuleType:
    return finding._module(PATH)


def test_the_core_is_written_down():
    study = finding.load(PATH).study
    assert study.hypothesis.startswith("Written before the first full run")
    assert {c.treatment for c in study.contrasts} == {"acpo-16"} and len(study.core) == 5
    assert 5 <= len(study.seeds) <= 8 and study.budget.minutes <= 60


def test_figures_of_classes_by_hand(code: ModuleType):
    """Two answers of two tokens, A = ±1/√2 each, W = 1/8: p .1 and .9 at sampling.

    Class 0: r = 1.5 with A > 0 (past 1.2, silenced) and r = 1 with A < 0, which pushes: spread .25.
    Class 4: r = 1 and r = 1/2 with A < 0 (under .8, silenced): spread .25. Each class has half of the push.
    Class 2: two answers to another question, equally good: no credit, so nothing that could be silenced.
    """
    old, new = [[0.1, 0.9], [0.1, 0.9], [0.5], [0.5]], [[0.15, 0.9], [0.1, 0.45], [0.5], [0.5]]
    case = laws.by_hand([0, 0, 1, 1], [1.0, 0.0, 1.0, 1.0], old=old, new=new)
    found = code.by_class(grpo(), case.batch, case.now["logp"])
    wanted = {"spread/0": 0.25, "spread/4": 0.25, "push/0": 0.5, "push/4": 0.5, "silenced/0": 0.5, "silenced/4": 0.5}
    assert found == pytest.approx({**wanted, "spread/2": 0, "push/2": 0, "silenced/2": math.nan}, nan_ok=True)


def test_figures_stand_beside_the_methods_own(code: ModuleType):
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.1], [0.9]], new=[[0.2], [0.8]])
    method = code.watched(code.METHODS["acpo"]())
    batch = replace(case.batch, observed=method.observe(case.batch, case.now["logp"]))
    assert {"epsilon/0", "spread/0", "spread/4"} <= set(method.figures(batch, case.now["logp"]))
    idle = replace(case.batch, rewards=torch.zeros_like(case.batch.rewards))
    found = code.by_class(grpo(), idle, case.now["logp"])
    assert math.isnan(found["push/0"]) and math.isnan(found["silenced/0"]) and found["spread/0"] == 0


def test_permuted_widths_are_those_of_other_classes(code: ModuleType):
    """Ratios of class 0 spread .5, of class 2 .1, of class 4 not at all."""
    old = [[0.1, 0.1, 0.5, 0.5, 0.9, 0.9]]
    new = [[0.1, 0.2, 0.5, 0.6, 0.9, 0.9]]
    batch, now = (case := laws.by_hand([0], [1.0], old=old, new=new)).batch, case.now["logp"]
    plain, moved = (code.METHODS[name]().observe(batch, now)[0] for name in ("acpo", "permuted"))
    assert plain.tolist() == pytest.approx([1.7, 1.7, 0.5, 0.5, 0.2003, 0.2003], abs=1e-6)
    assert moved.tolist() == [*plain[4:].tolist(), *plain[:2].tolist(), *plain[2:4].tolist()]


def test_with_one_update_acpo_is_ppos_clip_to_the_last_bit(code: ModuleType, tmp_path: Path):
    """And with four it is not: the contrast that must fail has something to find."""
    config = DecoderConfig(vocabulary=characters().size, hidden=16, layers=1, heads=2, kv_heads=2, head_size=8,
                           intermediate=32)  # fmt: skip

    def weights(name: str, updates: int) -> torch.Tensor:
        policy = Decoder.random(config, 0)
        source = OnPolicy(conflict_task(), policy, characters(), groups_per_step=4, group_size=8,
                          sampling=Sampling(max_tokens=8))  # fmt: skip
        how = settings(3, updates, 3e-2, 0, warmup=updates)
        train(code.watched(code.METHODS[name]()), policy, source, how, tmp_path / f"{name}{updates}")
        return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])

    assert torch.equal(weights("acpo", 1), weights("grpo", 1))
    assert not torch.equal(weights("acpo", 4), weights("grpo", 4))
