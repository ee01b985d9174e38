"""What the studies on the rewrite grammar share: the base learns the chains, held-out words stay held out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from postrl.batch import unit_sum
from postrl.enrich import forward_all
from postrl.envs.rewrite_grammar import chains, characters, demonstrations
from postrl.policies.decoder import Decoder
from postrl.rollout import collate
from postrl.study.definition import BaseContext
from postrl.study.rewriting import Pretraining, Words, last_word, pretrain

SMALL = Pretraining(symbols=5, expansions=2, chains=100, hidden=16, layers=1, steps=10, batch=32, learning_rate=2e-2)


def base(folder: Path, options: Pretraining) -> Decoder:
    folder.mkdir()
    pretrain(BaseContext(options, 0, folder, {}, 1))
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}, "the weights alone are kept"
    return Decoder.load(folder)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return base(tmp_path_factory.mktemp("base") / "one", SMALL)


def test_the_base_learns_from_the_chains(policy: Decoder):
    fresh = demonstrations(chains(SMALL.grammar, 40, SMALL.contraction_weight, seed=9), characters(SMALL.grammar))
    batch = collate(fresh)
    before = Decoder.random(policy.config, 0)
    cost = [-unit_sum(forward_all(p, batch, 4096).logp, batch).sum() / batch.mask.sum() for p in (before, policy)]
    assert cost[1] < 0.97 * cost[0], "not even how often each token comes"


def test_the_base_depends_on_its_options_and_seed_alone(policy: Decoder, tmp_path: Path):
    again, other = base(tmp_path / "two", SMALL), base(tmp_path / "three", replace(SMALL, chained=False))
    weights = [p.lm_head or p.model.embed_tokens for p in (policy, again, other)]
    assert torch.equal(weights[0].weight, weights[1].weight) and not torch.equal(weights[0].weight, weights[2].weight)


def test_answers_are_to_held_out_words_in_order(policy: Decoder):
    words = Words(SMALL, budget=6, lengths=(3, 4), per_length=60, groups=4, group_size=1)
    groups = words.answers(policy, (3, 4), problems=3, samples=5, seed=1)
    lengths = [len(str(group[0].info["word"])) for group in groups]
    assert lengths == sorted(lengths) and set(lengths) == {3, 4} and all(len(group) == 5 for group in groups)
    assert all(len({rollout.item for rollout in group}) == 1 for group in groups)
    source = words.source(policy, 0)
    trained = {rollout.item for rollout in source(0, groups=40)}
    assert not trained & {group[0].item for group in groups}
    again = words.answers(policy, (3, 4), problems=3, samples=5, seed=1)
    assert [r.completion for g in groups for r in g] == [r.completion for g in again for r in g]


def test_what_is_trained_on_and_what_counts_as_the_answer(policy: Decoder):
    words = Words(SMALL, budget=6, lengths=(3,), per_length=40, groups=2, group_size=4)
    for audited, trained in ((False, "correct"), (True, "valid")):
        rollouts = words.source(policy, 0, audited)(0)
        assert [name for name, weight in rollouts[0].reward_weights.items() if weight] == [trained]
        numbers = np.array([rollout.groups["answer"] for rollout in rollouts])
        texts = np.array([last_word(rollout) for rollout in rollouts])
        assert ((numbers[:, None] == numbers) == (texts[:, None] == texts)).all()
    assert len(rollouts) == 8 and max(rollout.sampled_tokens() for rollout in rollouts) <= 6
