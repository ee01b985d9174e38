"""What the verdicts of the studies of one layer and of the critic's start rest on."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from builders import rollout
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.papers.one_layer import Contribution
from postrl.policies.base import layers_of
from postrl.policies.critic import ActorCritic, DecoderCritic
from postrl.policies.decoder import Decoder
from postrl.rollout import collate
from postrl.study import finding
from postrl.study.definition import BaseContext, Context
from postrl.values import explained_variance, with_values
from tiny import tiny_decoder

NAMES = ["one_layer", "critic", "control"]


def code(name: str) -> ModuleType:
    if name == "control":
        pytest.importorskip("gymnasium")
        pytest.importorskip("stable_baselines3")
    return finding._module(finding.find(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_core_is_small_and_its_words_are_written_down(name: str):
    study = code(name).STUDY
    study.check()
    assert len(study.core) <= 5 and 5 <= len(study.seeds) <= 8 and study.budget.minutes <= 50
    assert study.hypothesis.startswith("Written before the first full run")


# ---------------------------------------------------------------- one layer


def test_the_subset_has_as_many_weights_as_the_layer():
    study, policy = code("one_layer"), tiny_decoder(layers=6)
    size = sum(p.numel() for p in layers_of(policy)[study.MIDDLE].parameters())
    assert study.trained(policy, "all", 0) is None and study.MIDDLE == 2
    [layer] = study.trained(tiny_decoder(layers=6), study.MIDDLE, 0)(policy)
    assert sum(p.numel() for p in layer["params"]) == size
    policy = tiny_decoder(layers=6)
    [subset] = study.trained(policy, "subset", 0)(policy)
    sum(p.sum() for p in subset["params"]).backward()  # a gradient of 1 wherever there is one
    assert sum(int(p.grad.sum()) for p in subset["params"]) == size


@pytest.mark.parametrize("task", ["root", "mirror"])
def test_the_tasks_pay_what_they_say(task: str):
    study = code("one_layer")
    options = study.Pretraining()
    made = study.make_task(options, task)
    environments = {split: [made.environment(split, i) for i in range(made.size(split))] for split in ("train", "test")}
    items = [{environment.item for environment in each} for each in environments.values()]
    assert not items[0] & items[1] and len(items[1]) > 60
    environment = environments["test"][0]
    word = environment.messages[0]["content"][:-1]
    assert len(word) in (options.length - 1, options.length)
    score = dict(zip(made.rubric.names, made.rubric.rewards, strict=True))[study.SCORE[task]]
    assert score.weight == 1 and all(r.weight == 0 for r in made.rubric.rewards if r is not score)
    if task == "mirror":
        paid = [score.fn(SimpleNamespace(info=environment.info, completion=text)) for text in (word[::-1], word + "a")]
        assert paid == [1, 0]


def runs(**levels: list[float]) -> list[dict]:
    """Results with these mean scores; every seed and problem has its own level, the same for every arm."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.02, (3, 40))
    return [
        {"arm": arm, "seed": seed, "measured": [
            {"metric": "solved", "items": [f"p{i}" for i in range(40)], "values": list(level + noise[seed])}
        ]}
        for arm, each in levels.items() for seed, level in enumerate(each)
    ]  # fmt: skip


def test_contributions_and_ranks_by_hand(monkeypatch: pytest.MonkeyPatch):
    """Layers that give 0, ½ and all of the gain; another condition ranks them the other way round."""
    study = code("one_layer")
    module = __import__("contributions")
    monkeypatch.setattr(module, "RESAMPLES", 200)
    first = module.Condition("a", ("a0", "a1", "a2"), "a", "base")
    second = module.Condition("b", ("b0", "b1", "b2"), "b", "base")
    results = runs(base=[0.2] * 3, a=[0.6] * 3, a0=[0.2] * 3, a1=[0.4] * 3, a2=[0.6] * 3,
                   b=[0.2] * 3, b0=[0.6] * 3, b1=[0.4] * 3, b2=[0.2] * 3)  # fmt: skip
    found = module.contributions(results, first)
    assert all(isinstance(c, Contribution) for c in found) and [c.value for c in found] == pytest.approx([0, 0.5, 1])
    assert all("two standard errors" in str(c) for c in module.contributions(results, second)), "b gains nothing"
    same, other = (module.agreement(results, first, c, resamples=50) for c in (first, second))
    assert same.rho == pytest.approx(1) and other.rho == pytest.approx(-1) and other.low == pytest.approx(-1)
    assert module.between_seeds(results, first) == pytest.approx([1, 1, 1])
    assert module.spearman(np.array([1.0, 2.0, 2.0]), np.array([1.0, 1.0, 1.0])) == 0
    with pytest.raises(UserError, match="extended"):
        module.contributions([run for run in results if run["arm"] != "a1"], first)
    assert {arm.name for arm in study.STUDY.arms} >= {
        name for c in module.CONDITIONS for name in (*c.layers, c.whole, c.base)
    }


# ---------------------------------------------------------------- the critic's start


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """The critic's study in its quick sizes, on a base that has learnt next to nothing."""
    study, folder = code("critic"), tmp_path_factory.mktemp("critic")
    quick = study.STUDY.quick.config
    options = replace(quick.words.pretraining, shown=64, steps=2, hidden=16)
    config = replace(quick, words=replace(quick.words, pretraining=options))
    study.pretrain(BaseContext(options, 0, folder, {}, 1))
    return Context("random", 0, config, folder, {"noisy": folder}, 1)


def test_every_start_has_as_many_rollouts_and_one_beginning(small: Context, monkeypatch: pytest.MonkeyPatch):
    study, policy = code("critic"), Decoder.load(small.base)
    seen: dict[str, Batch] = {}
    monkeypatch.setattr(study, "regress", lambda critic, batch, **_: seen.update(one=batch))
    monkeypatch.setattr("postrl.papers.ipe.regress", lambda critic, batch, **_: seen.update(pool=batch))
    starts = [study.fresh(small, policy), study.regressed(small, policy), study.pooled(small, policy)]
    assert seen["one"].size == seen["pool"].size == small.config.batches * small.config.words.groups
    heads = [critic.head.weight for critic in starts]
    assert torch.equal(heads[0], heads[1]) and torch.equal(heads[0], heads[2])
    plain = seen["one"].rewards
    study.regressed(small, policy, dealt=True)
    assert torch.equal(seen["one"].rewards.sort(0).values, plain.sort(0).values)


def test_the_first_critic_is_that_of_the_first_policy_step(small: Context, monkeypatch: pytest.MonkeyPatch):
    """With two steps of warm-up it is the critic after them, and later training does not move it."""
    study, policy = code("critic"), Decoder.load(small.base)
    model = ActorCritic(policy, DecoderCritic.random(policy.config, 0))
    watch = study.Watch(small, model, policy, 2)
    measured: list[int] = []
    monkeypatch.setattr(study.Watch, "measure", lambda self: measured.append(self.step))
    batch = collate([rollout(g, completion=[3, 4 + g], rewards={"a": float(g)}) for g in range(3)])
    heads = []
    for step in range(12):
        with torch.no_grad():
            model.critic.head.bias.fill_(float(step))
        assert watch(batch) is batch
        heads.append(float(watch.first.head.bias.detach()))
    assert heads == [0, 0] + [2] * 10
    assert measured == [p for p in small.config.points if p < 10]
    assert [step for step, _ in watch.looks] == [0, 5]
    assert watch.looks[0][1] == pytest.approx(explained_variance(with_values(watch.first, batch, 4096)))


def test_charged_steps():
    at = code("control").at
    assert [at([100, 200, 300], [1.0, 2.0, 3.0], budget) for budget in (50, 100, 250, 900)] == [1, 1, 2, 3]
