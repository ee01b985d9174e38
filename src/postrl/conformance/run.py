"""Running the cells of the matrix that can be run here, one method at a time."""

import contextlib
import importlib.util
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from postrl.adapters.support import Full, Refused
from postrl.conformance.cases import Disagreement, Done, agree, make_case, our_updates
from postrl.conformance.matrix import Cell
from postrl.papers import method

SUMS = {"reinforce", "rft", "rloo"}  # their loss is a sum over tokens: the same step would go much further
INSTALL = {
    "trl": "pip install 'postrl[trl]'",
    "verl": "make verl-env in a checkout, then --verl .venv-verl/bin/python",
}
Verdict = Literal["agrees", "differs", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What running a cell gave. details: the largest difference, where they differ, or why it was skipped."""

    cell: Cell
    verdict: Verdict
    details: str


def outcomes(chosen: Sequence[Cell], side: Callable[[Cell, Path], Outcome] | None = None) -> Iterator[Outcome]:
    """Each cell run, or skipped and why. side: runs a cell of an installed trainer on a model's folder."""
    with tempfile.TemporaryDirectory(prefix="postrl-conformance-") as scratch:
        folder: Path | None = None
        for cell in chosen:
            reason = skipped(cell)
            if reason is not None:
                yield Outcome(cell, "skipped", reason)
                continue
            if folder is None:
                with quiet():
                    from postrl.conformance.tiny import save_model

                    folder = save_model(Path(scratch) / "model")
            with quiet():
                outcome = (side or SIDES[cell.trainer])(cell, folder)
            yield outcome


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


def skipped(cell: Cell) -> str | None:
    """Why a cell is not run here; None if it is."""
    if isinstance(cell.support, Refused):
        return "refused"
    if not isinstance(cell.support, Full) and cell.trainer not in VARIANTS:
        return "a variant has other numbers"
    if importlib.util.find_spec(cell.trainer) is None or cell.trainer not in SIDES:
        return f"not installed here: {INSTALL[cell.trainer]}"
    return None


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


SIDES: dict[str, Callable[[Cell, Path], Outcome]] = {"trl": with_trl}
VARIANTS = {"trl"}  # whose variants are our loop under another option (refill=0), so that they can be compared
