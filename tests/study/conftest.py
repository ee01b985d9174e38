"""The toy study in a folder of the test's own, and an executor without processes."""

import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from postrl.study import executors, finding, worker
from postrl.study.executors import Ended
from postrl.study.finding import Found
from postrl.study.plan import Options
from postrl.study.records import Job

TOY = Path(__file__).resolve().parent / "toy"


@pytest.fixture(autouse=True)
def clean_modules() -> Iterator[None]:
    """Each test loads its own copy of the toy study, as a new process would."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith(finding.MODULE) or name == "helpers_of_toy"]:
        del sys.modules[name]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """study.py of a copy of the toy."""
    return shutil.copytree(TOY, tmp_path / "toy", ignore=shutil.ignore_patterns("__pycache__")) / "study.py"


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Found]:
    """edited(("old", "new"), …) loads a copy of the toy in which text is replaced, in study.py or its neighbour."""
    count = 0

    def edit(*replacements: tuple[str, str]) -> Found:
        nonlocal count
        count += 1
        folder = shutil.copytree(TOY, tmp_path / str(count) / "toy", ignore=shutil.ignore_patterns("__pycache__"))
        for old, new in replacements:
            files = [path for path in folder.glob("*.py") if old in path.read_text(encoding="utf-8")]
            assert files, f"{old!r} is in no file of the toy"
            for path in files:
                path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        forget()
        return finding.load(folder / "study.py")

    return edit


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs run in this process from now on; their labels, in order."""
    labels: list[str] = []

    def inline(jobs: Sequence[Job], workers: int) -> Iterator[Ended]:
        for job in jobs:
            labels.append(job.label)
            try:
                worker.do(job)
                reason = ""
            except Exception:  # noqa: BLE001 (as the worker does)
                (job.folder / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
                reason = "ended with exit code 1"
            yield Ended(job, reason)

    monkeypatch.setitem(executors.EXECUTORS, "local", inline)
    return labels


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Results beside the toy."""
    return Options(out=tmp_path / "out")
