"""Answers: taken out of texts, compared by value, whatever a policy writes."""

import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postrl.rewards import exact
from postrl.rewards.exact import after_answer, boxed, last_number, number, same_answer, tagged, whole_text

ALL = (whole_text, last_number, tagged, after_answer, boxed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4 + 3 = 7", "7"),
        ("7", "7"),
        ("The answer is 7.", "7"),
        ("= -3", "-3"),
        ("5-3", "3"),
        ("(5)-3", "3"),
        ("it is −3!", "-3"),
        ("$1,234,567.50 a year", "1234567.50"),
        ("1,234,56", "56"),
        ("**12**", "12"),
        ("0.50", "0.50"),
        (".5", ".5"),
        ("between 3 and 4, so 3", "3"),
        ("none", None),
        ("", None),
        ("٣ and ³", None),
    ],
)
def test_last_number(text, expected):
    assert last_number(text) == expected


@pytest.mark.parametrize(
    ("extract", "text", "expected"),
    [
        (whole_text, "  a b \n", "a b"),
        (whole_text, " ", None),
        (tagged, "<answer>3</answer> no, <answer> 4 </answer>", "4"),
        (tagged, "<answer>3", None),
        (tagged, "3</answer>", None),
        (tagged, "<answer></answer>", None),
        (after_answer, "so\nAnswer: 5 apples.\nBye", "5 apples"),
        (after_answer, "**ANSWER:** **5**", "5"),
        (after_answer, "Answer: 1\nanswer: 2", "2"),
        (after_answer, "İAnswer: 5", "5"),
        (after_answer, "nothing", None),
        (boxed, r"so \boxed{3} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (boxed, r"\boxed{3", None),
        (boxed, r"\boxed{}", None),
    ],
)
def test_extraction(extract, text, expected):
    assert extract(text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("-1,234.50", Fraction(-2469, 2)), ("$7", 7), ("+ 7", 7), ("3.", 3), ("007", 7), ("1/2", None),
     ("7 apples", None), ("1e3", None), ("٣", None), ("9" * 5000, None), ("9" * 900, int("9" * 900))],
)  # fmt: skip
def test_number(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("7", "7", True),
        ("7.0", "7", True),
        ("$1,000", "1000", True),
        ("0.1", "0.10000000000000001", False),
        ("17", "7", False),
        (None, "7", False),
        ("", "7", False),
        ("Paris", "Paris", True),
        (r"\frac{1}{2}", "0.5", True),
        ("1/2", "0.5", True),
        (r"\frac{1}{3}", "0.5", False),
        ("x=5", "5", True),
        ("$5$", "5", True),
    ],
)
def test_same_answer(answer, truth, same):
    assert same_answer(answer, truth) is same


ENEMIES = {
    "tower": "9**9**9",
    "LaTeX tower": "9^{9^{9^9}}",
    "factorials": "10!!!!!!!",
    "huge exponent": "1e999999999",
    "100k digits": "9" * 100_000,
    "900 digits": "9" * 900,
    "deep LaTeX": r"\frac{" * 150,
    "deep brackets": "(" * 900,
    "NUL": "\x00",
    "lone surrogate": "\ud800",
    "dollars": "$" * 50,
    "several lines": "8\n7",
    "several expressions": "8$ or $7",
    "a list": "6, 7, 8",
    "a choice": "7 or 8",
    "bad LaTeX": r"\begin{matrix} 1 & \\ \end",
}


@pytest.mark.parametrize("text", ENEMIES.values(), ids=ENEMIES.keys())
def test_enemy_answers_are_wrong_soon_and_raise_nothing(text, monkeypatch):
    monkeypatch.setattr(exact._verifier, "_limits", ("0.5", str(2 << 30)))
    started = time.monotonic()
    assert same_answer(text, "7") is False
    assert time.monotonic() - started < 60, (
        "the limit is half a second of processor time, and a busy machine may be slow"
    )
    assert same_answer(r"\frac{14}{2}", "7") is True, "the next answer is judged rightly"


@pytest.mark.parametrize("extract", ALL, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(
    "piece", ["<answer>", "</answer>", r"\boxed{", "answer:", "9", "1,", "-", ".", "-1.", "{", "\n"]
)
def test_extraction_takes_linear_time(extract, piece):
    started = time.monotonic()
    extract(piece * (400_000 // len(piece)))
    assert time.monotonic() - started < 5, "quadratic time would take minutes"


@given(st.text())
@settings(max_examples=50)
def test_extraction_never_raises(text):
    for extract in ALL:
        answer = extract(text)
        assert answer is None or answer
        assert answer is None or len(answer) > exact.LONGEST or isinstance(number(answer), Fraction | None)


def test_answers_are_compared_from_many_threads():
    """math-verify's own time limits work in the main thread only."""
    results = {}

    def work(i):
        results[i] = same_answer(rf"\frac{{{i}}}{{2}}", str(i / 2)) and not same_answer(rf"\frac{{{i}}}{{3}}", "0.123")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == dict.fromkeys(range(1, 13), True)
