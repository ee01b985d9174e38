"""A study that cannot be right is refused before anything runs, in one sentence."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from postrl.errors import UserError
from postrl.evaluate import Evaluation
from postrl.study import Arm, Base, Context, Contrast, Figures, Metric, Study, against, pass_at
from postrl.study.definition import bases_of
from postrl.study.finding import load

MEANS = dict.fromkeys(("mean_tokens", "distinct_correct", "distinct_answers", "distinct_2", "answer_entropy"), 1.0)


@pytest.fixture
def study(toy: Path) -> Study:
    return load(toy).study


def nothing(context: Context[object]) -> Figures:
    return Figures(())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"seeds": (-1, 0, 1)}, "seeds"),
        ({"contrasts": ()}, "no contrasts"),
        ({"must_fail": ()}, "no must_fail"),
        ({"hypothesis": " \n"}, "hypothesis is empty"),
        ({"metrics": (Metric("score", ""), Metric("Score", ""))}, "two of the study's metrics"),
        ({"metrics": (Metric("a/b", ""),)}, "metric 'a/b'"),
        ({"arms": (Arm("../up", nothing),)}, r"arm '\.\./up'"),
        ({"contrasts": against("plain", ["lout"], "score", "higher", 0.1)}, "no arm 'lout'"),
        ({"contrasts": against("plain", ["loud"], "shout", "higher", 0.1)}, "no metric 'shout'"),
        ({"contrasts": against("plain", ["extra"], "score", "higher", 0.1)}, "exploratory"),
        ({"contrasts": against("plain", ["plain"], "score", "higher", 0.1)}, "with itself"),
        ({"contrasts": against("plain", ["loud"], "score", "higher", 0.0)}, "worth=0"),
        ({"contrasts": against("plain", ["loud"], "score", "higher", float("nan"))}, "worth=nan"),
    ],
)
def test_what_cannot_be_right_is_named(study: Study, changes: dict, said: str):
    with pytest.raises(UserError, match=said):
        replace(study, **changes).check()


def test_an_exploratory_contrast_may_name_any_arm(study: Study):
    replace(study, exploratory=(Contrast("extra", "loud", "score", "lower", 0.1),)).check()


def test_bases_come_after_those_they_need_and_once():
    first = Base("first", lambda context: None)
    second = Base("second", lambda context: None, needs=(first,))
    arms = [Arm("a", nothing, (second,)), Arm("b", nothing, (first, second))]
    assert [base.name for base in bases_of(arms)] == ["first", "second"]


def test_two_bases_of_one_name_are_refused(study: Study):
    arms = (*study.arms, Arm("more", nothing, (Base("level", lambda context: None),)))
    with pytest.raises(UserError, match="two of the study's bases are called 'level'"):
        replace(study, arms=arms).check()


def test_the_only_base_of_a_context():
    context = Context("arm", 0, None, Path(), {"a": Path("a")}, 1)
    assert context.base == Path("a")
    with pytest.raises(UserError, match="2 bases"):
        _ = replace(context, bases={"a": Path("a"), "b": Path("b")}).base


def test_pass_at_of_an_evaluation():
    counts = {"items": ["x", "y"], "scored": [4, 4], "correct": [1, 4], "samples": 4, "pass_at": {}, "intervals": {}}
    zero = {field.name: 0 for field in fields(Evaluation)}
    evaluation = Evaluation(**{**zero, "task": "t", "split": "test", "examples": [], **MEANS, **counts})
    one, four = pass_at(evaluation, (1, 4))
    assert (one.metric, one.values, one.items) == ("pass@1", (0.25, 1.0), ("x", "y"))
    assert four.values == (1.0, 1.0)
    with pytest.raises(UserError, match="k=5"):
        pass_at(evaluation, (5,))
