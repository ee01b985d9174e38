"""Words backwards: what is shown, what is paid, and what is held out."""

from dataclasses import replace

import pytest

from postrl.policies.decoder import Decoder
from postrl.study.definition import BaseContext
from postrl.study.mirror import Pretraining, Words, pretrain

SMALL = Pretraining(letters="abcd", length=3, shown=64, hidden=16, layers=1, steps=3, batch=16)


def test_the_share_of_wrong_letters_is_the_noise_less_lucky_ones():
    shown = replace(SMALL, length=8).demonstrations(400, 0)
    pairs = [(r.messages[0]["content"][:-1], r.messages[1]["content"]) for r in shown]
    wrong = [a != b for word, answer in pairs for a, b in zip(word[::-1], answer, strict=True)]
    assert sum(wrong) / len(wrong) == pytest.approx(0.2 * 3 / 4, abs=0.02)
    assert [r.messages for r in replace(SMALL, length=8).demonstrations(5, 0)] == [r.messages for r in shown[:5]]


def test_only_the_whole_word_backwards_is_paid(tmp_path):
    pretrain(BaseContext(SMALL, 0, tmp_path, {}, 1))
    policy, words = Decoder.load(tmp_path), Words(SMALL, words=40, groups=16)
    rollouts, held_out = words.source(policy, 0)(0), words.answers(policy, 4, 8, 0)
    assert len(rollouts) == len({r.group for r in rollouts}) == 16 and all(len(group) == 8 for group in held_out)
    assert not {r.item for r in rollouts} & {group[0].item for group in held_out}
    everything = [*rollouts, *(r for group in held_out for r in group)]
    assert all(r.rewards["correct"] == (r.completion == r.info["answer"]) for r in everything)
    assert max(r.sampled_tokens() for r in everything) <= words.max_tokens == 4
    [reward] = words.task().rubric.rewards
    assert reward.weight == 1
    shown = rollouts[0].messages[0]["content"]
    assert rollouts[0].info["answer"] == shown[:-1][::-1]
