"""PAPERS.md is what the shelf says."""

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
    (tmp_path / "studies" / "reco" / "results").mkdir(parents=True)
    assert rung("reco") == "E3"
    (tmp_path / "tests" / "reference.py").write_text("", encoding="utf-8")
    assert rung("reco") == "E1", "a study does not replace the exact reference"
