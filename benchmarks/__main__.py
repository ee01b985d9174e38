"""make bench, make bench-quick: python -m benchmarks --help."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks import machine
from benchmarks.channel import WorkerError
from benchmarks.page import write_page
from benchmarks.pairs import Mismatch
from benchmarks.results import Results
from benchmarks.rows import Row, quick_rows, rows
from benchmarks.run import Bench, run
from benchmarks.work import Conditions
from postrl.cli import run_recipe
from postrl.errors import UserError


@dataclass(frozen=True)
class Config:
    """Options of the benchmark. A stopped one goes on where it stopped when it is started again."""

    rows: tuple[str, ...] = ()
    """Only these rows; empty: all. An unknown name lists them."""
    quick: bool = False
    """Small rows in about three minutes, into runs/bench-quick: a look, not evidence."""
    fresh: bool = False
    """Measure the rows again, also those that have all their pairs."""
    pairs: int | None = None
    """Pairs per row instead of each row's own number."""
    minutes: float | None = None
    """No further round of a row begins after so many minutes, instead of each row's own limit."""
    threads: int = 2
    """Processor threads of every side."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the matrix products on every side; auto: bfloat16 where it is at least 1.5 times as fast."""
    wait_policy: Literal["default", "PASSIVE", "ACTIVE"] = "default"
    """OMP_WAIT_POLICY of every side. PASSIVE on a machine where anything else runs."""
    vllm: Path = machine.ROOT / ".venv-vllm" / "bin" / "python"
    """Python of vLLM's environment (make bench-envs)."""
    results: Path = machine.ROOT / "benchmarks" / "results"
    """Folder of the results, one file per machine."""
    page: Path = machine.ROOT / "docs" / "benchmarks.md"
    """The page, made anew from all files of that folder."""


def main(config: Config) -> None:
    described = machine.describe()
    folder, page = config.results, config.page
    if config.quick:
        folder = machine.ROOT / "runs" / "bench-quick"
        page = folder / "benchmarks.md"
    name = machine.slug(str(described["processor"]), int(str(described["cores"])))
    results = Results(folder / f"{name}.json", described)
    conditions = Conditions(config.threads, _compute(config, results), config.wait_policy)
    print(f"{name}: {config.threads} threads, {conditions.compute} products", flush=True)
    chosen = _chosen(config)
    with tempfile.TemporaryDirectory(prefix="postrl-bench-") as scratch:
        bench = Bench(conditions, results, Path(scratch), config.vllm)
        for row in chosen:
            try:
                run(row, bench, config.fresh)
            except (WorkerError, Mismatch) as error:
                raise UserError(f"row {row.name}: {error}") from error
            write_page(sorted(folder.glob("*.json")), page)
    print(f"page: {page}", flush=True)


def _compute(config: Config, results: Results) -> Literal["float32", "bfloat16"]:
    """The type that was asked for; else that of the rows already there; else what a measurement says."""
    if config.compute != "auto":
        return config.compute
    for entry in results.data["rows"].values():
        return entry["conditions"]["compute"]
    return "bfloat16" if machine.bfloat16_pays() else "float32"


def _chosen(config: Config) -> list[Row]:
    """Raises UserError for the name of no row."""
    everything = quick_rows() if config.quick else rows()
    names = [row.name for row in everything]
    for name in config.rows:
        if name not in names:
            raise UserError(f"option rows: there is no row {name!r}; there are: {', '.join(names)}")
    chosen = [row for row in everything if not config.rows or row.name in config.rows]
    if config.pairs is not None:
        chosen = [replace(row, pairs=config.pairs) for row in chosen]
    if config.minutes is not None:
        chosen = [replace(row, minutes=config.minutes) for row in chosen]
    return chosen


if __name__ == "__main__":
    run_recipe(Config, main)
