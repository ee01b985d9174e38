"""The controls inside the studies on the rewrite grammar do what their verdicts rest on."""

import sys
from types import ModuleType

import pytest
import torch

import laws
from builders import rollout
from postrl.papers.grpo import grpo
from postrl.papers.reco import reco
from postrl.rollout import Rollout, Turn
from postrl.study import finding


@pytest.fixture(params=["reco", "composition"])
def study(request: pytest.FixtureRequest) -> finding.Found:
    return finding.load(finding.find(request.param))


def code(name: str) -> ModuleType:
    return finding._module(finding.find(name))


def test_the_core_is_small_and_its_words_are_written_down(study: finding.Found):
    assert 3 <= len(study.study.core) <= 4 and 5 <= len(study.study.seeds) <= 8
    assert study.study.budget.minutes <= 300, "2.5 hours of two cores"
    assert study.study.hypothesis.startswith("Written before the first")


def test_permuted_weights_are_the_groups_own_on_other_answers():
    old = [[p] for p in (0.9, 0.7, 0.5, 0.3, 0.2, 0.1)]
    case = laws.by_hand([0, 0, 0, 0, 1, 1], [1.0, 0, 1, 0, 1, 0], old=old, new=old)
    plain, control, even = (m.terms[0].weight(case.batch)[:, 0] for m in (reco(), code("reco").permuted(), grpo()))
    for group in (slice(0, 4), slice(4, 6)):
        assert torch.equal(plain[group].sort().values, control[group].sort().values)
    assert not torch.equal(plain, control) and not torch.equal(control, even)
    assert torch.equal(control, code("reco").permuted().terms[0].weight(case.batch)[:, 0]), "not the same twice"


def test_dealt_rewards_are_the_groups_own_on_other_answers():
    members = [rollout(group=group, sample=i) for group in (0, 1) for i in range(16)]
    for number, member in enumerate(members):
        member.rewards = {"correct": float(number)}
    code("composition").deal(members, (0, 3))
    dealt = [member.rewards["correct"] for member in members]
    assert sorted(dealt[:16]) == list(range(16)) and sorted(dealt[16:]) == list(range(16, 32))
    assert sum(value == number for number, value in enumerate(dealt)) < 8


def test_positive_only_never_pushes_down():
    case = laws.by_hand([0, 0], [1.0, 0.0], old=[[0.5], [0.5]], new=[[0.5], [0.5]])
    got = code("composition").positive_only().advantage(case.batch)
    assert got[0, 0] == grpo().advantage(case.batch)[0, 0] > 0 and got[1, 0] == 0


def test_countdown_knows_every_way_and_the_library_agrees():
    """The ways that reach the number by our arithmetic are those that reasoning-gym's scorer calls right."""
    pytest.importorskip("reasoning_gym")
    finding.load(finding.find("reco"))
    world = sys.modules["countdown"]
    options = world.Countdown(problems=12)
    task, (_, entries) = options.task(), world._entries(12, options.largest, options.target)
    (reward,) = task.rubric.rewards
    found = 0
    for question, entry in list(entries.items())[:4]:
        for text, value in set(world.expressions(entry["metadata"]["numbers"])):
            assert len(text) < world.LIMIT and set(text) <= set(world.RENDERER.alphabet)
            answer = asked(question, text)
            assert reward.fn(answer) == float(value == entry["metadata"]["target"]), (question, text)
            found += value == entry["metadata"]["target"]
    assert found > 4
    for text in ("", "1", "9**9", f"{question[:2]}+", "().__class__"):
        assert reward.fn(asked(question, text)) == 0.0


def asked(question: str, text: str) -> Rollout:
    return Rollout("a", 0, 0, [[Turn([1], True, text, [0.0])]], info={"question": question})
