"""PAPERS.md is what the shelf says."""

import json
import shutil
from pathlib import Path

import pytest

from postrl.errors import UserError
from postrl.papers import shelf
from postrl.papers_page import ROOT, render


def test_page_is_up_to_date():
    assert (ROOT / "PAPERS.md").read_text(encoding="utf-8") == render(), "run: make papers"


def test_every_paper_has_one_row_with_a_claim_and_links_that_exist():
    rows = [line.split(" | ") for line in render().splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"| `{name}`" for name in sorted(shelf())]
    for row in rows:
        assert all(cell.strip(" |") for cell in row), row
        for cell in row[4:6]:
            assert cell == "none" or (ROOT / cell.partition("](")[2].rstrip(")")).is_file(), cell


def test_evidence_falls_with_what_it_stands_on(tmp_path: Path):
    def rung(name: str) -> str:
        row = next(line for line in render(tmp_path).splitlines() if line.startswith(f"| `{name}`"))
        return row.split(" | ")[-1].strip(" |")

    with pytest.raises(UserError, match="checkout"):
        render(tmp_path)
    (tmp_path / "tests" / "papers").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "reference.py", tmp_path / "tests")
    assert rung("reco") == "E1"
    shutil.copy(ROOT / "tests" / "papers" / "test_reco.py", tmp_path / "tests" / "papers")
    assert rung("reco") == "E2" and rung("grpo") == "E1"
    results = tmp_path / "studies" / "concentration" / "results" / "results.json"
    results.parent.mkdir(parents=True)
    for variant, verdict, reached in (
        ("quick", "supported", "E2"),
        ("full", "unfinished", "E2"),
        ("full", "not supported", "E2, E3 [concentration: not supported](studies/concentration)"),
    ):
        results.write_text(json.dumps({"variant": variant, "verdict": verdict, "papers": ["reco"]}), encoding="utf-8")
        assert rung("reco") == reached and rung("grpo") == "E1"
    E3 = "E3 [concentration: not supported](studies/concentration)"
    curves = tmp_path / "recipes" / "curves" / "shelf"
    curves.mkdir(parents=True)
    (curves / "reco.jsonl").touch()
    assert rung("reco") == f"E2, {E3}, E4"
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "conformance.md"
    page.write_text("| `reco` | full | variant: a | full |\n| `grpo` | full | full | full |\n", encoding="utf-8")
    assert rung("reco") == f"E2, {E3}, E4" and rung("grpo") == "E1, E5"
    (tmp_path / "tests" / "reference.py").write_text("", encoding="utf-8")
    assert rung("reco") == f"E1, {E3}, E4", "a study does not replace the exact reference"
