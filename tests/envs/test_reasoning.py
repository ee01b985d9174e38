"""reasoning-gym: distinct problems, measured spaces, disjoint splits, answers taken out before they are scored."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postrl.envs.base import Task
from postrl.envs.reasoning import ReasoningTask
from postrl.errors import UserError
from postrl.rewards.exact import boxed, last_number, tagged, whole_text
from postrl.rollout import Rollout, Turn

pytest.importorskip("reasoning_gym")
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def sums():
    return ReasoningTask("chain_sum", ONE_DIGIT)


def answered(environment, text):
    return Rollout(environment.item, 0, 0, [[Turn([], True, text=text)]], info=dict(environment.info))


def rewards(task, environment, text):
    return [reward.fn(answered(environment, text)) for reward in task.rubric.rewards]


def items(task, split, indices):
    return [task.environment(split, i).item for i in indices]


def test_the_space_is_measured_and_an_epoch_holds_every_problem_once(sums):
    """One-digit sums and differences of two terms: 10 · 10 · 2 = 200 questions."""
    assert isinstance(sums, Task)
    train, test = sums.size("train"), sums.size("test")
    assert train + test == 200 and test == 26
    assert sums.describe().startswith("chain_sum: 174 distinct problems for training and 26 held out")
    epochs = [items(sums, "train", range(e * train, (e + 1) * train)) for e in range(3)]
    assert [len(set(epoch)) for epoch in epochs] == [train] * 3
    assert set(epochs[0]) == set(epochs[2]) and epochs[0] != epochs[1] != epochs[2]
    assert not set(epochs[0]) & set(items(sums, "test", range(test)))


def test_many_draws_of_a_large_space_are_distinct():
    """The library's own reseeding gives 499 different questions in 2,000 draws."""
    task = ReasoningTask("chain_sum")
    assert len(set(items(task, "train", range(2000)))) == 2000
    assert task.size("train") is None and task.describe() == "chain_sum: at least 5001 distinct problems"


@given(seed=st.integers(0, 2**40))
@settings(max_examples=8)
def test_held_out_problems_are_held_out_for_every_seed(sums, seed):
    other = ReasoningTask("chain_sum", ONE_DIGIT, seed=seed)
    held_out = set(items(sums, "test", range(sums.size("test"))))
    assert not held_out & set(items(other, "train", range(150)))


def test_the_same_seed_gives_the_same_problems_in_whatever_order_they_are_asked_for(sums):
    again = ReasoningTask("chain_sum", ONE_DIGIT)
    backwards = items(again, "train", reversed(range(300)))
    assert backwards[::-1] == items(sums, "train", range(300))
    assert items(again, "train", range(50)) != items(ReasoningTask("chain_sum", ONE_DIGIT, seed=1), "train", range(50))


def test_the_answer_is_taken_out_before_it_is_scored(sums):
    environment = next(e for i in range(174) if (e := sums.environment("train", i)).info["answer"] == "7")
    assert rewards(sums, environment, "The answer is 7.") == [1.0, 1.0]
    assert rewards(sums, environment, "7, or 5") == [0.0, 0.0], "raw reasoning-gym pays for the digit in the text"
    assert rewards(sums, environment, "17") == [0.0, 0.5], "partial credit is logged and never trained"
    assert rewards(sums, environment, "no idea") == [0.0, 0.0]
    assert rewards(sums, environment, "٧") == [0.0, 0.0]
    assert [(r.name, r.weight) for r in sums.rubric.rewards] == [("correct", 1.0), ("raw_score", 0.0)]


@pytest.mark.parametrize(
    ("name", "extract", "form"),
    [
        ("gcd", last_number, "It is {}."),
        ("spell_backward", whole_text, "{}"),
        ("countdown", tagged, "so <answer>{}</answer>"),
        ("fraction_simplification", boxed, r"\boxed{{{}}}"),
        ("number_sorting", tagged, "<answer>{}</answer>"),
    ],
)
def test_the_solver_agrees_with_the_scorer(name, extract, form):
    task = ReasoningTask(name, extract=extract)
    for index in range(20):
        environment = task.environment("train", index)
        assert rewards(task, environment, form.format(environment.info["answer"])) == [1.0, 1.0]


def test_prompts_follow_the_template():
    task = ReasoningTask("chain_sum", ONE_DIGIT, template="{question}\nNumber only.", system="Be brief.")
    system, user = task.environment("train", 0).prompt()
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"].startswith("State the final answer") and user["content"].endswith("=\nNumber only.")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReasoningTask("chain_sums"), "no task 'chain_sums' \\(did you mean chain_sum.*; it has: .*chain_sum"),
        (lambda: ReasoningTask("chain_sum", {"terms": 2}), "no option 'terms'; its options are: min_terms, max_terms"),
        (lambda: ReasoningTask("chain_sum", {"min_terms": 5, "max_terms": 2}), "refuses the options .*max_terms"),
        (lambda: ReasoningTask("chain_sum", {"seed": 2}), "name seed or size"),
        (lambda: ReasoningTask("spell_backward"), "last_number.* does not read the answer"),
        (lambda: ReasoningTask("chain_sum", ONE_DIGIT, test_share=0).environment("test", 0), "has no test problems"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(UserError, match=message):
        make()
