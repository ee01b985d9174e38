"""`postrl conformance`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from postrl.errors import UserError

Names = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="METHOD …")]


def conformance(
    methods: Names = (),
    trainer: tuple[Literal["trl", "verl"], ...] = ("trl", "verl"),
    matrix: bool = False,
    verl: Path = Path(".venv-verl/bin/python"),
    write: Path | None = None,
) -> None:
    """Which method runs in which trainer, and whether its numbers there are ours.

    Prints what each trainer can do with each method, then puts the same answers through our loop and through those
    trainers that are installed. Exit code 1 if numbers differ.

    Args:
        methods: Of the shelf; none named: all of them.
        trainer: The trainers to ask.
        matrix: Only print what each can do; run nothing.
        verl: The Python of verl's environment (`make verl-env`), in which verl's side runs, in a checkout.
        write: Write the whole matrix as a page to this file, and run nothing.
    """
    from postrl import papers
    from postrl.conformance import matrix as table
    from postrl.files import whole_file

    if write is not None:
        with whole_file(write) as beside:
            beside.write_text(table.render(), encoding="utf-8")
        print(f"wrote {write}")
        return
    for name in methods:
        if name not in papers.methods():
            raise UserError(f"no method {name!r} on the shelf; choose among: {', '.join(sorted(papers.methods()))}")
    chosen = table.cells(methods, trainer)
    print_matrix(chosen)
    if not matrix:
        sys.exit(run(chosen, verl))


def print_matrix(chosen: list) -> None:
    """A row per method and trainer."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from postrl.conformance.matrix import TRAINERS

    shown = Table(box=box.SIMPLE_HEAD)
    for column in ("method", "trainer", "runs as", "what to know"):
        shown.add_column(column, no_wrap=column != "what to know")
    for cell in chosen:
        shown.add_row(cell.method, TRAINERS[cell.trainer], cell.word, Text(cell.details))
    Console().print(shown)


def run(chosen: list, verl: Path) -> int:
    """Run what can be run, a line each; the exit code."""
    from postrl.conformance.run import outcomes

    counts = {"agrees": 0, "differs": 0, "skipped": 0}
    for outcome in outcomes(chosen, verl):
        counts[outcome.verdict] += 1
        name = f"{outcome.cell.method} in {outcome.cell.trainer}"
        print(f"{outcome.verdict:8} {name:28} {outcome.details}", flush=True)
    print(f"{counts['agrees']} agree, {counts['differs']} differ, {counts['skipped']} were not run")
    return 1 if counts["differs"] else 0
