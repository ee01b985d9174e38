"""Evaluation: counts, estimates, intervals, what is missing, and its way through JSON."""

import json
import math

import numpy as np
import pytest
import torch

from postrl.envs.copy_task import copy_task
from postrl.envs.single_turn import Problem, Problems
from postrl.envs.two_turn import TwoTurn
from postrl.errors import UserError
from postrl.evaluate import Evaluation, evaluate
from postrl.policies.base import Sampling
from postrl.policies.chat import Characters
from postrl.policies.tabular import Tabular
from postrl.probes.passk import pass_at_k
from postrl.rewards.rubric import Reward, Rubric
from scripted import CHARACTERS, Scripted

TASK = copy_task(length=1, alphabet="abcdefgh", test_share=0.5)


def tabular(key=1):
    return Tabular.random(CHARACTERS.size, memory=1, context_length=32, key=[key])


def scripted(script, task=TASK, **rest):
    options = {"items": 3, "n": 8, "ks": [1, 2, 8], "sampling": Sampling(max_tokens=4), **rest}
    return evaluate(tabular(), CHARACTERS, task, sampler=Scripted(script), **options)


def test_counts_and_estimates():
    """Sample s of problem i copies the prompt if s ≤ i, else answers "z", "zz" or "zzz"."""
    result = scripted(lambda context, key: context if key[3] <= key[2] else "z" * (1 + key[3] % 3))
    assert result.correct == [1, 2, 3] and result.scored == [8, 8, 8] and len(set(result.items)) == 3
    c, n = np.array([1, 2, 3]), np.array([8, 8, 8])
    assert list(result.pass_at) == ["1", "2", "8"]
    for k, value in result.pass_at.items():
        assert value == pytest.approx(pass_at_k(n, c, int(k)).mean())
        low, high = result.intervals[k]
        assert low <= value <= high
    assert result.intervals["1"][0] == pytest.approx(1 / 8) and result.intervals["1"][1] == pytest.approx(3 / 8)
    assert (result.missing, result.left_out, result.truncated) == (0, 0, 0)
    assert result.distinct_correct == 1 and result.distinct_answers == 4
    assert [sample.completion for sample in result.examples] == [
        e.prompt.removeprefix("user: ") for e in result.examples
    ]
    assert result.examples[0].rewards == {"correct": 1.0, "overlap": 1.0}


def test_it_agrees_with_a_policy_whose_success_is_known():
    """One letter and the end: p is a product of two table entries, and 100 samples lie within 4 standard errors."""
    renderer, task = Characters("abcd"), copy_task(length=1, alphabet="abcd", test_share=1)
    policy = Tabular.random(renderer.size, memory=1, context_length=8, key=[1])
    table = policy.table.detach().softmax(-1)
    result = evaluate(policy, renderer, task, items=4, n=100, ks=[1, 64], sampling=Sampling(max_tokens=2), seed=3)
    chances = []
    for index in range(4):
        [letter] = renderer.prompt(task.environment("test", index).prompt())
        chances.append(float(table[policy.state([letter]), letter] * table[policy.state([letter]), renderer.end]))
    errors = [abs(c / 100 - p) / math.sqrt(p * (1 - p) / 100) for c, p in zip(result.correct, chances, strict=True)]
    assert max(errors) < 4 and min(chances) > 0.005 and max(chances) > 0.05
    assert result.truncated > 0 and 1 <= result.mean_tokens <= 2


def test_the_same_random_numbers_for_every_policy_and_call():
    def run(**rest):
        options = {"items": 3, "n": 6, "ks": [1], "sampling": Sampling(max_tokens=4), **rest}
        return evaluate(tabular(), CHARACTERS, TASK, examples=99, **options)

    assert run() == run()
    assert run().examples != run(seed=1).examples
    assert run(items=2).correct == run().correct[:2], "problems do not disturb each other"


def test_greedy_evaluation_is_legal():
    result = evaluate(tabular(), CHARACTERS, TASK, items=2, n=3, ks=[1], sampling=Sampling(temperature=0, max_tokens=4))
    assert result.distinct_answers == 1 and result.answer_entropy == 0


def test_missing_scores_leave_a_problem_with_too_few_samples_out():
    def reward(rollout):
        return None if rollout.completion == "x" else float(rollout.completion == "a")

    task = Problems("p", [Problem(c) for c in "abcdefghij"], Rubric((Reward("correct", reward),)), test_share=1)
    result = scripted(lambda context, key: "x" if key[2] == 0 and key[3] < 3 else "a", task, n=4, ks=[1, 2])
    assert (result.scored, result.correct) == ([1, 4, 4], [1, 4, 4])
    assert (result.missing, result.left_out, result.pass_at) == (3, 1, {"1": 1.0, "2": 1.0})
    nothing = scripted(lambda context, key: "x", task, n=4, ks=[1])
    assert nothing.left_out == 3 and math.isnan(nothing.pass_at["1"])


def test_a_split_with_fewer_problems_is_used_whole():
    size = TASK.size("test")
    assert len(scripted(lambda context, key: "a", items=1000).items) == size < 8
    assert len(scripted(lambda context, key: "a", items=1000, split="train").items) == TASK.size("train")


def test_several_turns():
    result = scripted(
        lambda context, key: "x" if key[-1] == 0 else context[-1], TwoTurn(alphabet="abcdefghij"), items=1
    )
    assert result.pass_at["1"] == 1 and result.examples[0].prompt.count("\n") == 2


def test_answers_may_be_extracted_for_the_figures():
    result = scripted(lambda context, key: f"a{key[3]}", answer=lambda rollout: rollout.completion[0])
    assert (result.distinct_answers, result.answer_entropy) == (1, 0)
    assert scripted(lambda context, key: f"a{key[3]}").distinct_answers == 8


def test_json_round_trip():
    task = Problems("p", [Problem(c) for c in "abc"], Rubric((Reward("correct", lambda r: None),)), test_share=1)
    for result in (scripted(lambda context, key: context), scripted(lambda context, key: "a", task)):
        text = json.dumps(result.to_json(), allow_nan=False)
        back = Evaluation.from_json(json.loads(text))
        assert repr(back) == repr(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ks": [1, 9]}, r"ks=\[1, 9\] must lie between 1 and n=8"),
        ({"ks": [0]}, r"ks=\[0\]"),
        ({"ks": []}, r"ks=\[\]"),
        ({"correct": "right"}, "has no reward 'right'; it has: correct, overlap"),
        ({"items": 0}, "items is 0"),
        ({"task": copy_task(test_share=0)}, "has no test problems"),
    ],
)
def test_bad_options_are_named(change, message):
    with pytest.raises(UserError, match=message):
        scripted(lambda context, key: "a", **change)


def test_gradients_are_not_recorded_and_weights_not_changed():
    policy = tabular()
    before = policy.table.detach().clone()
    evaluate(policy, CHARACTERS, TASK, items=1, n=1, ks=[1], sampling=Sampling(max_tokens=2))
    assert torch.equal(policy.table, before) and policy.table.grad is None
