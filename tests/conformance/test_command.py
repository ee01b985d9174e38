"""`postrl conformance`: the matrix, its page, and what a disagreement looks like."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from postrl import cli
from postrl.adapters import trl_checks, verl
from postrl.adapters.support import Full, Refused, Variant
from postrl.conformance import run
from postrl.conformance.cases import Disagreement, Done, agree, make_case, near, our_updates
from postrl.conformance.matrix import Cell, cells, render
from postrl.conformance.tiny import save_model
from postrl.errors import UserError
from postrl.papers import method, methods

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render(), "run: make papers"


def test_the_matrix_is_what_the_adapters_say_of_every_method():
    found = {(cell.method, cell.trainer): cell.support for cell in cells()}
    assert {name for name, _ in found} == set(methods())
    for trainer, side in (("trl", trl_checks), ("verl", verl)):
        assert {name: found[name, trainer] for name in methods()} == side.matrix()
    assert [cell.method for cell in cells(("reco", "grpo"), ("verl",))] == ["reco", "grpo"]
    table, notes = render().split("## What to know")
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == len(methods()) and all(row.count("|") == 5 for row in rows)
    assert "| `grpo` | full | full | full |" in rows and "| `ppo` | full | refused | refused |" in rows
    assert notes.count("| refused |") == table.count("refused |"), "every refusal has its reason"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ours(folder: Path) -> list[Done]:
    case = make_case(1)
    weights = our_weights(folder)
    return our_updates(method("grpo"), folder, case, [range(8), range(8, 16)], [weights, weights])


def our_weights(folder: Path) -> dict[str, torch.Tensor]:
    from postrl.policies.hf import HuggingFacePolicy

    return {name: p.detach().clone() for name, p in HuggingFacePolicy.load(folder).model.named_parameters()}


def bent(updates: list[Done], name: str, by: float) -> list[Done]:
    gradient = dict(updates[1].gradient)
    gradient[name] = gradient[name] + by * gradient[name].abs().max()
    return [updates[0], replace(updates[1], gradient=gradient)]


def test_agreement_is_judged_by_every_gradient_and_loss(ours: list[Done]):
    name = "model.layers.1.mlp.up_proj.weight"
    assert agree(ours, ours) == 0
    assert 1e-6 < agree(bent(ours, name, 5e-6), ours) < 1e-5
    for wrong, message in (
        (bent(ours, name, 3e-5), f"gradient of {name} differs"),
        ([ours[0], replace(ours[1], loss=ours[1].loss + 1e-4)], "loss"),
        (ours[:1], "1 updates against 2"),
        ([ours[0], replace(ours[1], gradient={})], "other parameters"),
    ):
        with pytest.raises(Disagreement, match=message):
            agree(wrong, ours)
    still = [replace(done, gradient={n: 0 * g for n, g in done.gradient.items()}) for done in ours]
    with pytest.raises(Disagreement, match="fewer than two"):
        agree(still, still)
    with pytest.raises(Disagreement, match="nan"):
        near({"w": torch.tensor([torch.nan])}, {"w": torch.tensor([1.0])})


def test_a_disagreement_ends_the_command_with_one(
    ours: list[Done], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def side(cell: Cell, folder: Path) -> run.Outcome:
        print("loud")
        wrong = bent(ours, "lm_head.weight", 1e-3) if cell.method == "reco" else ours
        return run.judged(cell, wrong, ours)

    monkeypatch.setattr(run, "with_trl", side)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: object())
    for names, code, line in ((["grpo"], 0, "agrees   grpo in trl"), (["grpo", "reco"], 1, "differs  reco in trl")):
        with pytest.raises(SystemExit) as ended:
            cli.main(["conformance", *names, "--trainer", "trl"])
        shown = capsys.readouterr().out
        assert ended.value.code == code and line in shown and "loud" not in shown


def test_what_is_not_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    absent = tmp_path / "python"
    assert run.skipped(Cell("x", "trl", Refused("no")), absent) == "refused"
    assert "pip install" in str(run.skipped(Cell("x", "trl", Full()), absent))
    assert "make verl-env" in str(run.skipped(Cell("x", "verl", Full()), absent))
    assert "variant" in str(run.skipped(Cell("x", "verl", Variant("a", "b")), Path(sys.executable)))
    assert run.skipped(Cell("x", "verl", Full()), Path(sys.executable)) is None


def test_verls_side_is_read_from_what_its_tests_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tests = tmp_path / "test_verl.py"
    tests.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('ranks', [1, 2])\n"
        "@pytest.mark.parametrize('name', ['grpo', 'dr_grpo', 'reco'])\n"
        "def test_every_full_method_agrees(name, ranks):\n"
        "    assert name != 'reco' or ranks == 1\n"
    )
    monkeypatch.setattr(run, "TESTS", tests)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    names = ("grpo", "dr_grpo", "reco")
    found = list(run.outcomes([Cell(name, "verl", Full()) for name in names], Path(sys.executable)))
    assert [outcome.verdict for outcome in found] == ["agrees", "agrees", "differs"]
    assert "pytest" in found[2].details
    with pytest.raises(UserError, match="did not run verl's side of gspo"):
        list(run.outcomes([Cell("gspo", "verl", Full())], Path(sys.executable)))


def test_an_unknown_method_lists_the_shelf(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["conformance", "nope"])
    assert ended.value.code == 2
    assert "no method 'nope'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="pip install 'postrl[trl]'")
def test_trl_is_really_run(folder: Path):
    [outcome] = run.outcomes(cells(("reco",), ("trl",)), Path("absent"))
    assert outcome.verdict == "agrees" and "4 updates" in outcome.details


def test_verls_python_may_be_named_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The tests run in the checkout, where a path of another folder would lead elsewhere."""
    python, chosen = tmp_path / "python", cells(("grpo",), ("verl",))
    python.write_text("#!/bin/sh\necho 'PASSED t.py::test_every_full_method[grpo-1]'\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="python cannot be run"):
        list(run.with_verl(chosen, Path("python")))
    python.chmod(0o700)
    assert [found.verdict for found in run.with_verl(chosen, Path("python"))] == ["agrees"]
