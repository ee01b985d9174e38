"""Study of rewards that disagree: its joint success, its figures of each reward, and masks dealt to other answers."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import laws
from postrl.advantages import credit_per_reward
from postrl.batch import Batch
from postrl.envs.conflict import characters
from postrl.papers.gd2po import gd2po, judged
from postrl.policies.decoder import Decoder
from postrl.policies.decoder_config import DecoderConfig
from postrl.rollout import Rollout, Turn
from postrl.study import Context, finding

PATH = finding.find("conflict")


@pytest.fixture(scope="module")
def code() -> ModuleType:
    return finding._module(PATH)


def test_the_core_is_written_down():
    study = finding.load(PATH).study
    assert study.hypothesis.startswith("Written before the first full run")
    assert [arm.name for arm in study.core] == ["sum", "gdpo", "snr", "dealt"]
    assert 5 <= len(study.seeds) <= 8 and study.budget.minutes <= 60


@pytest.mark.parametrize(
    ("text", "agreed", "joint"),
    [("!(dcba)", 1, 1), ("(dcba)", 1, 0), ("!dcba", 0, 0), ("!(dcbb)", 0, 0), ("!....(dcba)", 0, 0)],
)
def test_joint_success_is_everything_at_once(code: ModuleType, text: str, agreed: float, joint: float):
    answer = Rollout("x", 0, 0, [[Turn([1], True, text, [0.0])]], info={"question": "abcd", "answer": "dcba"})
    assert (code.agreed(answer), code.joint(answer)) == (agreed, joint)


def test_joint_is_logged_and_not_trained_on(code: ModuleType):
    for task in (code.opposed(code.Pretraining(), 0.5), code.telling(code.Pretraining())):
        assert {reward.name: reward.weight for reward in task.rubric.rewards}["joint"] == 0
        assert task.size("test") > 48


def rewards() -> Batch:
    """Two groups of eight with two rewards, some answers at odds with themselves."""
    rng = np.random.default_rng(0)
    case = laws.by_hand([0] * 8 + [1] * 8, [0.0] * 16, [[0.5]] * 16, [[0.5]] * 16)
    return replace(
        case.batch,
        rewards=torch.from_numpy(rng.integers(0, 3, (16, 2)).astype(float)),
        reward_weights=torch.ones(2, dtype=torch.float64),
        reward_names=("a", "b"),
    )


def test_dealt_masks_leave_out_as_many_of_each_group_but_others(code: ModuleType):
    """The rest of the method is GD²PO's: with masks in their places it would be the same."""
    known = rewards()
    real, control = gd2po("snr", code.TAU).advantage(known)[:, 0], code.dealt().advantage(known)[:, 0]
    verdict = judged(credit_per_reward(known), known, "snr", code.TAU)
    assert 0 < int((~verdict.kept).sum()) < 12 and bool((real[~verdict.kept] == 0).all())
    assert bool((control[~verdict.kept] != 0).any()), "the same answers are left out"
    for group in (0, 1):
        here = known.group() == group
        assert int((control[here] == 0).sum()) >= int((~verdict.kept[here]).sum())
    assert torch.equal(control, code.dealt().advantage(known)[:, 0]), "not the same twice"


def test_masks_in_their_places_are_gd2po(code: ModuleType, monkeypatch: pytest.MonkeyPatch):
    class Still:
        def permutation(self, n: int) -> np.ndarray:
            return np.arange(n)

    known = rewards()
    monkeypatch.setattr(code.np.random, "default_rng", lambda key: Still())
    assert torch.equal(code.dealt().advantage(known), gd2po("snr", code.TAU).advantage(known))


def test_each_reward_is_told_apart_and_none_is_made_up(code: ModuleType, tmp_path: Path):
    config = DecoderConfig(vocabulary=characters().size, hidden=16, layers=1, heads=2, kv_heads=2, head_size=8,
                           intermediate=32)  # fmt: skip
    sizes = code.Sizes(problems=3, samples=4)
    context = Context("sum", 0, sizes, tmp_path, {}, 1)
    task = code.opposed(sizes.pretraining, 0.5)
    found = {m.metric: m for m in code.measured(context, Decoder.random(config, 0), task)}
    assert set(found) == set(code.RAW) and len(found["joint"].items) == 3
    assert np.isnan(found["worked"].mean)
    assert found["total"].mean == pytest.approx(sum(found[n].mean for n in ("correct", "short", "formatted", "rival")))
