"""The command line: bad input ends in one sentence that names it and exit code 2."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from postrl import cli, papers_page
from postrl.errors import UserError
from postrl.evaluate import Evaluation
from run_folder import evaluation, make_run
from tiny_models import LLAMA, save_model, tiny_model

ROOT = Path(__file__).resolve().parent.parent
RECIPE = '''"""A recipe for a test."""
from dataclasses import dataclass, field
from pathlib import Path
from postrl.checkpoint import Progress
from postrl.cli import run_recipe
from postrl.errors import UserError
from postrl.train import Result

@dataclass(frozen=True)
class Inner:
    steps: int = 3
    """Rollout batches."""

@dataclass(frozen=True)
class Config:
    end: str = "well"
    """How it ends."""
    train: Inner = field(default_factory=Inner)

def main(config):
    print(f"steps {config.train.steps}")
    if config.end == "user error":
        raise UserError("option end='user error' is not good: choose another")
    if config.end == "interrupt":
        raise KeyboardInterrupt
    if config.end == "bug":
        raise ZeroDivisionError("a bug")
    return Result(Path("run"), Progress(), "interrupted" if config.end == "stopped" else "finished")
'''


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "recipe_of_the_cli_test.py"
    path.write_text(RECIPE)
    searched = list(sys.path)
    yield str(path)
    sys.modules.pop(path.stem, None)
    sys.path[:] = searched


def code(arguments: Sequence[str]) -> int:
    """Exit code of `postrl …`; 0 if it returns."""
    try:
        cli.main(arguments)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code
    return 0


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture) -> str:
    """What is said on standard error before exit code 2: one sentence, no traceback."""
    assert code(arguments) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("postrl: ") and "\n" not in said and "Traceback" not in said
    return said


@pytest.mark.parametrize(("end", "expected"), [("well", 0), ("user error", 2), ("interrupt", 130), ("stopped", 130)])
def test_how_a_recipe_ends_is_the_exit_code(recipe: str, end: str, expected: int, capsys: pytest.CaptureFixture):
    assert code(["train", recipe, "--end", end, "--steps", "5"]) == expected
    assert capsys.readouterr().out == "steps 5\n"


def test_a_bug_keeps_its_traceback(recipe: str):
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", recipe, "--end", "bug"])


def test_a_recipe_ends_the_same_way_as_a_file(recipe: str, monkeypatch: pytest.MonkeyPatch):
    from postrl import recipes_folder

    found = recipes_folder.load(recipe)
    monkeypatch.setattr(sys, "argv", [recipe, "--end", "user error"])
    with pytest.raises(SystemExit) as ended:
        cli.run_recipe(found.config, found.main)
    assert ended.value.code == 2


def test_an_unknown_option_is_named(recipe: str, capsys: pytest.CaptureFixture):
    assert code(["train", recipe, "--lerning-rate", "3"]) == 2
    assert "--lerning-rate" in capsys.readouterr().err
    assert code(["train", recipe, "--steps", "many"]) == 2
    assert "many" in capsys.readouterr().err


def test_help_of_a_recipe_shows_its_options(recipe: str, capsys: pytest.CaptureFixture):
    assert code(["train", recipe, "--help"]) == 0
    said = capsys.readouterr().out
    assert "A recipe for a test." in said and "How it ends." in said and "--steps" in said


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture):
    assert code([]) == 0
    assert "postrl train reasoning" in capsys.readouterr().out


def test_unknown_names_are_named(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert "'nope'" in refused(["train", "nope"], capsys)
    assert "copy_task" in refused(["train", "nope"], capsys)
    assert "'nope'" in refused(["papers", "nope"], capsys)
    assert str(tmp_path / "nope") in refused(["report", str(tmp_path / "nope")], capsys)
    assert str(tmp_path / "nope") in refused(["export", str(tmp_path / "nope"), str(tmp_path / "out")], capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no_such/model.gguf", "--task", "copy"], "no_such/model.gguf"),
        (["smollm2", "--task", "no_such_task"], "no_such_task"),
        (["smollm2", "--task", "copy", "--options", "lenght", "3"], "'lenght'"),
        (["smollm2", "--task", "copy", "--options", "length", "long"], "length=long"),
        (["smollm2", "--task", "gsm8k", "--options", "source", "no/such.jsonl"], "no/such.jsonl"),
        (["smollm2", "--task", "copy", "--k", "1,two"], "--k '1,two'"),
        (["smollm2", "--task", "copy", "--k", "0"], "--k '0'"),
        (["smollm2", "--task", "copy", "--seed", "-1"], "seed=-1"),
        (["smollm2", "--task", "copy", "--threads", "0"], "threads=0"),
        (["smollm2", "--task", "chain_sum", "--template", "Count to ten."], "{question}"),
    ],
)
def test_eval_refuses_what_it_cannot_do(arguments: list[str], said: str, capsys: pytest.CaptureFixture):
    assert said in refused(["eval", *arguments], capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_model(**{**LLAMA, "max_position_embeddings": 512}))


def test_eval_prints_and_writes_the_evaluation(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "evaluation.json"
    options = ["--items", "2", "--max-tokens", "3", "--threads", "1", "--options", "length", "2", "--json", str(out)]
    assert code(["eval", str(model), "--task", "copy", "--k", "1,2", *options]) == 0
    found = Evaluation.from_json(json.loads(out.read_text()))
    assert found.samples == 2 and list(found.pass_at) == ["1", "2"] and found.task == "copy 2 of abcd"
    said = capsys.readouterr().out
    assert "pass@2" in said and "95 % interval" in said
    assert "k=2" not in said
    assert "n=1" in refused(["eval", str(model), "--task", "copy", "--k", "1,2", "--n", "1", *options], capsys)


def test_report_writes_a_page_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture):
    run = make_run(tmp_path / "run", evaluation([0, 1]), evaluation([1, 1]))
    page, picture = tmp_path / "page.html", tmp_path / "picture.svg"
    assert code(["report", str(run), "--out", str(page), "--picture", str(picture)]) == 0
    assert page.stat().st_size > 10**6 and picture.read_text().startswith("<svg")
    assert capsys.readouterr().out.split() == ["wrote", str(page), "wrote", str(picture)]
    assert str(tmp_path / "run" / "run.json") in refused(
        ["report", str(run), "--out", str(run / "run.json" / "page.html")], capsys
    )


def test_papers_lists_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert code(["papers"]) == 0
    assert "reco" in capsys.readouterr().out
    assert code(["papers", "reco"]) == 0
    said = capsys.readouterr().out
    assert "\nreco(\n    typical: " in said and "arXiv" in said
    assert code(["papers", "--write", str(tmp_path / "PAPERS.md")]) == 0
    assert (tmp_path / "PAPERS.md").read_text() == papers_page.render()


def test_orderly_lets_results_through():
    with cli.orderly():
        done = True
    assert done
    with pytest.raises(SystemExit), cli.orderly():
        raise UserError("one sentence")


# ------------------------------------------------------------------------------------------- in processes of their own


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )


def test_help_answers_without_torch():
    code_ = "import sys\nfrom postrl import cli\ntry: cli.main(['--help'])\nfinally: print('torch' in sys.modules)"
    done = process("-c", code_)
    assert done.returncode == 0 and done.stdout.endswith("False\n")
    assert all(name in done.stdout for name in ("train", "eval", "papers", "report", "export", "--help"))


def test_an_unknown_recipe_as_a_process():
    done = process("-m", "postrl.cli", "train", "no_such_recipe")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("postrl: there is no recipe 'no_such_recipe'") and done.stderr.count("\n") == 1


def test_bad_options_of_a_recipe_run_as_a_file(tmp_path: Path):
    done = process("recipes/copy_task.py", "--group-size", "1", "--out", str(tmp_path / "run"))
    assert done.returncode == 2 and "group_size=1" in done.stderr and "Traceback" not in done.stderr
