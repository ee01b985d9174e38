"""What a model writes never runs as a program through a scorer of reasoning-gym."""

import ast
import inspect
import time
from pathlib import Path

import pytest

from postrl.envs.evaluated import ALGEBRA, ARITHMETIC, LISTS, harmless
from postrl.envs.reasoning import ReasoningTask
from postrl.rewards.exact import whole_text

EVALUATED = sorted(LISTS | ARITHMETIC | ALGEBRA)
ITS_OWN = {"number_sorting"}  # evaluates the answer that it wrote itself


def called(node: ast.AST) -> set[str]:
    calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else ast.unparse(f) for f in calls}


def test_every_scorer_that_evaluates_is_known():
    """Read from the installed library: a version that evaluates elsewhere fails here."""
    factory = pytest.importorskip("reasoning_gym.factory")
    found = set()
    for name, (dataset, _) in factory.DATASETS.items():
        module = ast.parse(Path(inspect.getfile(dataset)).read_text(encoding="utf-8"))
        scorers = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == "score_answer"]
        if any(called(scorer) & {"eval", "exec", "parse_expr", "sympify", "parse_latex"} for scorer in scorers):
            found.add(name)
    assert found - ITS_OWN == set(EVALUATED)


PROGRAM = "(lambda: open({path!r}, 'w').close())() or 1"


@pytest.mark.parametrize("name", EVALUATED)
def test_a_program_is_not_run_and_scores_as_what_cannot_be_read(name: str, tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    task = ReasoningTask(name, extract=whole_text)
    entry = next(iter(task._entries.values()))
    mark = tmp_path / "ran"
    score = task._score(PROGRAM.format(path=str(mark)), entry)
    assert not mark.exists() and score < 0.1
    task._dataset.score_answer(PROGRAM.format(path=str(mark)), entry)
    assert mark.exists(), "the library no longer runs it: the guard is not needed any more"


@pytest.mark.parametrize("name", EVALUATED)
def test_every_answer_of_the_library_may_pass(name: str):
    gym = pytest.importorskip("reasoning_gym")
    for entry in gym.create_dataset(name, seed=1, size=50):
        for answer in (entry["answer"], *entry["metadata"].get("valid_answers", ())):
            # An integral that the library could not solve is its own question: a model that repeats it has no answer.
            assert answer is None or "Integral" in str(answer) or harmless(name, str(answer)), answer


FINE = [
    "x**3/3 + C",
    "-sin(2*x)/2",
    "exp(2*x)*(x - 1/2)",
    "x**(1/2)",
    "(2*x+1)**3",
    "(x)**(3/2)",
    "x ** -1",
    "x*log(x) - x",
]
CODE = ["open('a')", "().__class__", "x.diff", "lambda: x", "[x]", "x if x else x", "x\u2028x;x", "ｅval(x)"]
BOMBS = ["9**9", "9 ** 9", "x**9**9**9", "(9)**9**9", "((((9)**9)**9)**9)**9", "(9)**99", "9" * 30, "1+" * 600 + "1"]
LOOPS = ["[0 for a in 'xx' for b in 'xx']", "[0for a in'xx'for b in'xx']", "[[0]\nfor a in [1, 2]]"]


def test_algebra_may_hold_terms_and_nothing_else():
    for name in ALGEBRA:
        assert [text for text in FINE if not harmless(name, text)] == []
        assert [text for text in CODE + BOMBS if harmless(name, text)] == []


def test_arithmetic_may_hold_numbers_and_nothing_else():
    for name in ARITHMETIC:
        assert [text for text in ("(3 + 5)*2 - 4/2", "12*(7-3)", "-1.5") if not harmless(name, text)] == []
        assert [text for text in (*FINE, *CODE, *BOMBS, "9//2", "1e9", "9^9", "9j") if harmless(name, text)] == []


def test_lists_may_hold_literals_and_nothing_else():
    for name in LISTS:
        assert [text for text in ("[[0, 1], [2, 3]]", "['A', 'B']", "Q _\n_ Q") if not harmless(name, text)] == []
        assert [text for text in ("[0]*9", "list('a')", "{1}", "[0 for x in (1,)]") if harmless(name, text)] == []
        assert [text for text in LOOPS if harmless(name, text)] == []


def test_long_hostile_text_is_refused_at_once():
    """The patterns do not go back and forth over it: a thousand characters cost no more than a millisecond or so."""
    start = time.process_time()
    for text in ("(" * 999 + "!", "1 " * 499 + "x", "x ** " * 199 + "!", "a" * 1000, "1." * 500):
        for name in EVALUATED:
            harmless(name, text)
    assert time.process_time() - start < 1


def test_other_tasks_are_not_touched():
    assert harmless("chain_sum", "__import__('os')")
