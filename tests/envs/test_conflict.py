"""What each text earns, by hand; the knob's two ends; that no good answer of the telling task is free of conflict."""

import numpy as np
import pytest

from postrl.batch import Kind
from postrl.envs.conflict import LETTERS, characters, conflict_task, demonstrations, telling_conflict_task
from postrl.errors import UserError
from postrl.rollout import Rollout, Turn, collate

INFO = {"question": "abc", "answer": "cba"}


def scores(task, text: str) -> dict[str, float]:
    rollout = Rollout("x", 0, 0, [[Turn([1], True, text, [0.0])]], info=INFO)
    return {reward.name: reward.fn(rollout) for reward in task.rubric.rewards}


@pytest.mark.parametrize(
    ("text", "correct", "short", "formatted", "marked"),
    [
        ("(cba)", 1, 1, 1, 0),
        ("!(cba)", 1, 1, 1, 1),
        ("cba", 1, 1, 0, 0),
        ("!.(cba)", 1, 1, 1, 1),
        ("!..(cba)", 1, 0.75, 1, 1),
        ("abc....(cba)", 1, 0, 1, 0),  # 12 characters: 5 over, not below 0
        ("abc.cba", 1, 1, 0, 0),
        ("abccba", 0, 1, 0, 0),  # the last letters are all six
        ("(cbb)", 0, 1, 1, 0),
        ("()", 0, 1, 1, 0),
        ("(cba", 1, 1, 0, 0),
        ("(cba)(cba)", 1, 0.25, 0, 0),
        (".!(cba)", 1, 1, 0, 0),
        ("(cba).", 0, 1, 0, 0),
        ("", 0, 1, 0, 0),
    ],
)
def test_what_texts_earn(text: str, correct: float, short: float, formatted: float, marked: float):
    for conflict in (0.0, 0.25, 1.0):
        rival = (1 - conflict) * marked + conflict * (1 - (correct + short + formatted) / 3)
        wanted = {"correct": correct, "short": short, "formatted": formatted, "rival": rival, "marked": marked}
        assert scores(conflict_task(conflict), text) == pytest.approx(wanted)


def habits(task, count: int = 600) -> dict[str, np.ndarray]:
    """Rewards of demonstrations, by name."""
    made = demonstrations(task, characters(), count)
    found = []
    for number, rollout in enumerate(made):
        rollout.info = dict(task.environment("train", number).info)
        found.append([reward.fn(rollout) for reward in task.rubric.rewards])
    return dict(zip(task.rubric.names, np.array(found).T, strict=True))


def test_the_knob_turns_independence_into_opposition():
    correlation = []
    for conflict in (0, 0.25, 0.5, 0.75, 1):
        got = habits(conflict_task(conflict), 150)
        agreed = got["correct"] + got["short"] + got["formatted"]
        correlation.append(float(np.corrcoef(agreed, got["rival"])[0, 1]))
    assert abs(correlation[0]) < 0.25, "the mark costs one character, which is all it has to do with the others"
    assert correlation[-1] == pytest.approx(-1)
    assert correlation == sorted(correlation, reverse=True)


def test_without_conflict_everything_can_be_had():
    assert set(scores(conflict_task(0.0), "!(cba)").values()) == {1}
    assert scores(conflict_task(1.0), "!(cba)")["rival"] == 0


@pytest.mark.parametrize(
    ("text", "correct", "worked", "brief", "answered"),
    [
        ("abc.cba", 1, 1, 0, 1),
        ("!abc..(cba)", 1, 1, 0, 1),
        ("abc.cbb", 0, 1, 0, 0),
        ("cba", 0, 0, 1, 1),  # right, but without its working
        ("(cba)", 0, 0, 0, 1),
        ("acb.cba", 0, 0, 0, 1),  # the working of another question
        ("abccba", 0, 0, 0, 0),
        ("", 0, 0, 1, 0),
    ],
)
def test_what_texts_earn_where_conflict_tells(text: str, correct: float, worked: float, brief: float, answered: float):
    wanted = {"correct": correct, "worked": worked, "brief": brief, "answered": answered}
    assert scores(telling_conflict_task(), text) == wanted


def test_every_good_text_of_the_telling_task_disagrees_with_itself():
    """In a group that holds every habit, a text above the mean in one reward is below it in another."""
    got = habits(telling_conflict_task())
    names = ("correct", "worked", "brief")
    above = np.stack([got[name] > got[name].mean() for name in names])
    below = np.stack([got[name] < got[name].mean() for name in names])
    good = above.any(0)
    assert 0.2 < good.mean() < 0.8
    assert (below.any(0) | ~good).all()
    # The sum still says which way to go: right and worked earns more than anything else.
    total = sum(got[name] for name in names)
    assert total[got["correct"] == 1].min() > total[got["correct"] == 0].max()


def test_demonstrations_have_the_habits_asked_for():
    task = conflict_task(0.0)
    got = habits(task, 300)
    assert got["correct"].mean() == pytest.approx(0.5, abs=0.1)
    assert got["formatted"].mean() == pytest.approx(0.5, abs=0.1)
    assert got["marked"].mean() == pytest.approx(0.5, abs=0.1)
    assert 0.5 < got["short"].mean() < 0.95
    made = demonstrations(task, characters(), 6, seed=2)
    assert [r.completion for r in made] == [r.completion for r in demonstrations(task, characters(), 9, seed=2)[:6]]
    assert set(collate(made).kind.tolist()) == {Kind.DEMONSTRATION}
    assert all(characters().text(r.contexts[0][1].tokens) == r.completion for r in made)


def test_every_question_is_there_and_some_are_held_out():
    task = conflict_task(length=3)
    assert task.size("train") + task.size("test") == len(LETTERS) ** 3 and task.size("test") > 2


def test_bad_options_are_named():
    for conflict in (-0.1, 1.1, float("nan")):
        with pytest.raises(UserError, match="option conflict="):
            conflict_task(conflict)
    with pytest.raises(UserError, match="length=0"):
        telling_conflict_task(0)
