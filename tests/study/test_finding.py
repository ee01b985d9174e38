"""Studies are found by name in a checkout and in a wheel, and the command line says what there is."""

from pathlib import Path

import pytest

from postrl import cli
from postrl.errors import UserError
from postrl.study import finding, runner


@pytest.fixture
def installed(toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy as the only study there is."""
    monkeypatch.setattr(finding, "FOLDERS", (toy.parent.parent, toy.parent.parent / "none"))
    return toy


def code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code if isinstance(ended.value.code, int) else 1


def test_by_name_by_file_and_by_folder(installed: Path):
    assert finding.find("toy") == finding.find(str(installed)) == finding.find(str(installed.parent)) == installed
    assert finding.load(installed).name == "toy"


def test_the_folders_of_a_wheel_and_of_a_checkout():
    package = Path(cli.__file__).parent
    assert (package / "_studies", package.parent.parent / "studies") == finding.FOLDERS


@pytest.mark.slow
def test_every_study_of_the_checkout_loads_and_is_right():
    for path in finding.studies().values():
        assert finding.load(path).summary


def test_an_unknown_name_lists_the_studies(installed: Path, capsys: pytest.CaptureFixture[str]):
    assert code(["study", "toi"]) == 2
    assert "no study 'toi'" in (said := capsys.readouterr().err) and "names: toy" in said


def test_without_a_name_the_studies_are_listed(installed: Path, capsys: pytest.CaptureFixture[str]):
    cli.main(["study"])
    assert "toy: Does the loud arm score higher than the plain one?" in capsys.readouterr().out


def test_a_file_without_a_study(tmp_path: Path):
    file = tmp_path / "study.py"
    file.write_text("STUDY = 1\n", encoding="utf-8")
    with pytest.raises(UserError, match="must define `STUDY"):
        finding.load(file)


def test_bad_options_end_with_a_sentence(installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert code(["study", "toy", "--seeds", "7", "--out", str(tmp_path / "out")]) == 2
    assert "[7] are not among" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_crash_is_exit_code_1(
    installed: Path, tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TOY_CRASH", "loud/0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "write_answer", lambda found, folder: None)  # pictures are tested elsewhere
    assert code(["study", "toy", "--quick", "--seeds", "0"]) == 1
    assert (tmp_path / "runs" / "studies" / "toy" / "quick" / "runs" / "loud" / "0" / "crash.json").exists()
