"""Tasks made of a list: distinct problems, epochs, and held-out problems that follow from their text alone."""

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postrl.envs.base import Environment, Step, Task, content_hash, split_of
from postrl.envs.copy_task import copy_task, correct, overlap
from postrl.envs.single_turn import Problem, Problems, epoch_position
from postrl.errors import UserError
from postrl.rewards.rubric import Reward, Rubric
from postrl.rollout import Rollout, Turn

RUBRIC = Rubric((Reward("correct", lambda rollout: 0.0),))


def questions(task, split, indices):
    return [task.environment(split, i).prompt()[-1]["content"] for i in indices]


def test_it_is_a_task_of_environments():
    task = copy_task()
    assert isinstance(task, Task) and isinstance(task.environment("train", 0), Environment)
    assert task.max_turns == 1 and task.environment("train", 0).step("x") == Step(done=True)


@given(texts=st.lists(st.text(), max_size=60), seed=st.integers(0, 5), share=st.sampled_from([0.1, 0.5]))
def test_training_and_held_out_problems_never_meet(texts, seed, share):
    task = Problems("t", [Problem(text) for text in texts], RUBRIC, test_share=share, seed=seed)
    train, test = ({task.environment(s, i).item for i in range(2 * task.size(s))} for s in ("train", "test"))
    assert not train & test
    assert len(train) == task.size("train") and len(test) == task.size("test")
    assert len(train | test) == len({" ".join(text.split()) for text in texts})


@given(text=st.text(), others=st.lists(st.text(), max_size=20), seed=st.integers(0, 9))
def test_the_split_of_a_problem_depends_on_nothing_but_its_text(text, others, seed):
    tasks = [
        Problems("a", [Problem(text)], RUBRIC),
        Problems("b", [*map(Problem, others), Problem(text, {"x": 1})], RUBRIC, seed=seed, template="Q {question}"),
    ]
    item = content_hash(text)
    for task in tasks:
        split = split_of(item)
        assert item in {task.environment(split, i).item for i in range(task.size(split))}


def test_names_and_splits_are_the_same_in_every_process_and_for_ever():
    assert content_hash(" a\n b ") == hashlib.sha256(b"a b").hexdigest()[:16] == "c8687a08aa5d6ed2"
    edges = ("0" * 16, "1999" + 12 * "0", "199a" + 12 * "0", "f" * 16)
    assert [split_of(item) for item in edges] == ["test", "test", "train", "train"]


def test_the_share_of_held_out_problems():
    items = [content_hash(str(i)) for i in range(5_000)]
    share = Counter(split_of(item) for item in items)["test"] / len(items)
    assert abs(share - 0.1) < 0.015
    assert {split_of(item, 0) for item in items} == {"train"} and {split_of(item, 1) for item in items} == {"test"}


def test_every_epoch_holds_every_problem_once_in_an_order_of_its_own():
    task = copy_task(length=2, alphabet="abcdef", seed=3)
    size = task.size("train")
    epochs = [questions(task, "train", range(e * size, (e + 1) * size)) for e in range(3)]
    assert [len(set(epoch)) for epoch in epochs] == [size] * 3
    assert epochs[0] != epochs[1] != epochs[2] and sorted(epochs[0]) == sorted(epochs[2])
    assert epochs[0] == questions(copy_task(length=2, alphabet="abcdef", seed=3), "train", range(size))
    assert epochs[0] != questions(copy_task(length=2, alphabet="abcdef", seed=4), "train", range(size))


def test_positions_of_the_splits_are_drawn_apart():
    assert [epoch_position(i, 50, 0, "train") for i in range(50)] != [
        epoch_position(i, 50, 0, "test") for i in range(50)
    ]


def test_an_empty_split_says_so():
    with pytest.raises(UserError, match="task 't' has no test problems"):
        Problems("t", [Problem("a")], RUBRIC, test_share=0).environment("test", 0)


def test_messages_and_info_are_copies():
    task = Problems("t", [Problem("a {x}", {"k": 1})], RUBRIC, template="Q: {question}!", system="s {question}")
    environment = task.environment("train", 0) if task.size("train") else task.environment("test", 0)
    assert environment.prompt() == [
        {"role": "system", "content": "s {question}"},
        {"role": "user", "content": "Q: a {x}!"},
    ]
    environment.prompt()[0]["content"] = "changed"
    assert environment.prompt()[0]["content"] == "s {question}"


@pytest.mark.parametrize(
    ("text", "exact", "share"), [("abc", 1, 1), ("abd", 0, 2 / 3), ("", 0, 0), ("abcx", 0, 3 / 4), ("ab", 0, 2 / 3)]
)
def test_copy_rewards(text, exact, share):
    rollout = Rollout("i", 0, 0, [[Turn([], True, text=text)]], info={"answer": "abc"})
    assert (correct(rollout), overlap(rollout)) == (exact, share)


def test_copy_trains_on_one_component_and_logs_the_other():
    assert [r.weight for r in copy_task(shaped=True).rubric.rewards] == [0.0, 1.0]
    assert [r.weight for r in copy_task(shaped=False).rubric.rewards] == [1.0, 0.0]
    assert copy_task(length=3, alphabet="ab", test_share=0).size("train") == 8
