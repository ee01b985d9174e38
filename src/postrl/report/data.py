"""What a run left in its folder, read back and checked."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from postrl.errors import UserError
from postrl.evaluate import Evaluation
from postrl.record import read_metrics, read_run
from postrl.report.text import Pieces, pieces_of

LISTS = ("tokens", "mask", "logp_old", "advantage", "weight", "ratio")
COLUMNS = ("item", "group", "sample", "stop", "messages", "completion", *LISTS)


@dataclass(frozen=True)
class Judged:
    """One evaluation of a run, after `step` steps."""

    step: int
    full: Evaluation


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of one step: a dictionary per rollout (columns as in `record.write_rollouts`)."""

    step: int
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """One arm of the report."""

    name: str
    folder: Path
    configuration: Mapping[str, object]
    surroundings: Mapping[str, object]  # the rest of run.json
    steps: list[dict[str, Any]]  # metrics of each step, in order
    evaluations: list[Judged]  # in order
    rollouts: list[Rollouts]  # of the first and the last step
    pieces: Pieces

    @property
    def before(self) -> Judged | None:
        """The evaluation of the untrained policy."""
        return self.evaluations[0] if self.evaluations and self.evaluations[0].step == 0 else None

    @property
    def after(self) -> Judged | None:
        """The last evaluation of a trained policy."""
        return self.evaluations[-1] if self.evaluations and self.evaluations[-1].step > 0 else None

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the steps whose record has the metric as a finite number."""
        points = [(line["step"], line[metric]) for line in self.steps if _finite(line.get(metric))]
        return [step for step, _ in points], [value for _, value in points]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Runs of the folders; a folder that only holds runs stands for all of them.

    Raises UserError naming the folder or file that is missing, damaged or no run's.
    """
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no run folder {folder}")
        inside = sorted(path.parent for path in folder.glob("*/run.json"))
        found += [folder] if (folder / "run.json").exists() or not inside else inside
    unique = list(dict.fromkeys(path.resolve() for path in found))
    return [_read_run(path, name) for path, name in zip(unique, names(unique), strict=True)]


def names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    depth = 1
    longest = max((len(path.parts) for path in folders), default=1)
    while depth < longest and len({path.parts[-depth:] for path in folders}) < len(folders):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in folders]


def _read_run(folder: Path, name: str) -> Run:
    about = read_run(folder)
    configuration = about.pop("configuration")
    steps, evaluations = _read_metrics(folder / "metrics.jsonl")
    files = sorted((folder / "rollouts").glob("step_*.parquet"))
    ends = [files[0], files[-1]] if len(files) > 1 else files
    return Run(
        name=name,
        folder=folder,
        configuration=configuration,
        surroundings=about,
        steps=steps,
        evaluations=evaluations,
        rollouts=[read_rollouts(path) for path in ends],
        pieces=pieces_of(configuration),
    )


def _read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[Judged]]:
    steps: list[dict[str, Any]] = []
    evaluations: list[Judged] = []
    for number, line in enumerate(read_metrics(path), 1):
        if "evaluation" not in line:
            steps.append(line)
            continue
        try:
            evaluations.append(Judged(line["step"], Evaluation.from_json(line["evaluation"])))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}, line {number}, is damaged: its evaluation cannot be read ({error!r})") from error
    return steps, evaluations


def read_rollouts(path: Path) -> Rollouts:
    """Raises UserError naming the file if it is damaged or lacks a column."""
    try:
        table = pq.read_table(path)
        rows = table.to_pylist()
        step = int(path.stem.removeprefix("step_"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())[:200]}); move it away to go on") from error
    missing = [column for column in COLUMNS if column not in table.column_names]
    if missing:
        raise UserError(f"{path} holds no rollouts of postrl: it has no column {missing[0]!r}")
    for number, row in enumerate(rows):
        if len({len(row[column] or ()) for column in LISTS}) > 1:
            raise UserError(f"{path}, row {number}, is damaged: its columns have different lengths")
        row["messages"] = _messages(row["messages"], path, number)
    return Rollouts(step, rows)


def _messages(text: str, path: Path, number: int) -> list[dict[str, str]]:
    try:
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in json.loads(text)]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}, row {number}, is damaged: its messages cannot be read ({error!r})") from error


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
