"""Running the cells of the matrix that can be run here, one method at a time."""

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from postrl.adapters.support import Full, Refused
from postrl.conformance.cases import Disagreement, Done, agree, make_case, our_updates
from postrl.conformance.matrix import Cell
from postrl.errors import UserError
from postrl.papers import method

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests" / "conformance" / "test_verl.py"
SUMS = {"reinforce", "rft", "rloo"}  # their loss is a sum over tokens: the same step would go much further
INSTALL = {
    "trl": "pip install 'postrl[trl]'",
    "verl": "make verl-env in a checkout of the repository; elsewhere name its Python, --verl PYTHON",
}
Verdict = Literal["agrees", "differs", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What running a cell gave. details: the largest difference, where they differ, or why it was skipped."""

    cell: Cell
    verdict: Verdict
    details: str


def outcomes(chosen: Sequence[Cell], verl: Path) -> Iterator[Outcome]:
    """Each cell run, or skipped and why. verl: the Python of verl's environment, which need not be there."""
    apart = [cell for cell in chosen if cell.trainer == "verl" and skipped(cell, verl) is None]
    with tempfile.TemporaryDirectory(prefix="postrl-conformance-") as scratch:
        folder: Path | None = None
        for cell in (cell for cell in chosen if cell not in apart):
            reason = skipped(cell, verl)
            if reason is not None:
                yield Outcome(cell, "skipped", reason)
                continue
            with quiet():
                if folder is None:
                    from postrl.conformance.tiny import save_model

                    folder = save_model(Path(scratch) / "model")
                outcome = with_trl(cell, folder)
            yield outcome
    yield from with_verl(apart, verl) if apart else ()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A trainer tells its progress at length; what it said is shown if it fails."""
    from transformers.utils import logging

    said, level = io.StringIO(), logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception:
        print(said.getvalue())
        raise
    finally:
        logging.set_verbosity(level)


def skipped(cell: Cell, verl: Path) -> str | None:
    """Why a cell is not run here; None if it is. TRL's variant is our loop at refill=0, so it can be compared."""
    if isinstance(cell.support, Refused):
        return "refused"
    if cell.trainer == "verl" and not isinstance(cell.support, Full):
        return "a variant has other numbers"
    there = importlib.util.find_spec("trl") is not None if cell.trainer == "trl" else verl.is_file() and TESTS.is_file()
    return None if there else f"not installed here: {INSTALL[cell.trainer]}"


def with_trl(cell: Cell, folder: Path) -> Outcome:
    """Our method inside TRL's trainer: twice two mini-batches of two passes. A method with `keep` is compared with our
    loop at refill=0, which is the variant's name."""
    from postrl.conformance import trl_side

    case, subject = make_case(1, missing=0.15), method(cell.method)
    rate = 0.1 if cell.method in SUMS else 1.0
    args = trl_side.options(folder.parent / "trl", learning_rate=rate)
    run = trl_side.train(case, folder, args, subject)
    ours = our_updates(subject, folder, case, run.minis, run.weights)
    return judged(cell, run.updates, ours)


def judged(cell: Cell, updates: Sequence[Done], ours: Sequence[Done]) -> Outcome:
    """Whether a trainer's updates are ours."""
    try:
        worst = agree(updates, ours)
    except Disagreement as found:
        return Outcome(cell, "differs", str(found))
    return Outcome(cell, "agrees", f"{len(updates)} updates, largest difference {worst:.1e}")


def with_verl(chosen: Sequence[Cell], python: Path) -> Iterator[Outcome]:
    """Our methods inside verl, on one and two ranks: the checkout's tests of them, in verl's own environment, because
    its pins exclude this one's. Raises UserError with the end of what was said if they cannot be run."""
    command = [str(python.absolute()), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "--tb=line", str(TESTS)]
    names = " or ".join(cell.method for cell in chosen)
    command += ["-m", "slow or not slow", "-k", f"test_every_full_method and ({names})"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"{python} cannot be run ({error.strerror}): name the Python of verl's environment") from error
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S+::test_every_full_method\w*\[(\w+)-\d+\]", done.stdout, re.MULTILINE)
    for cell in chosen:
        results = [result for result, name in found if name == cell.method]
        if not results:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise UserError(f"{python} did not run verl's side of {cell.method}; the end of what it said:\n{said}")
        good = set(results) == {"PASSED"}
        details = "updates of 1 and 2 ranks, within 1e-5" if good else f"run: {shlex.join(command)}"
        yield Outcome(cell, "agrees" if good else "differs", details)
