"""The files of a study that carry it from one sitting to the next. Each is written whole or not at all."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from postrl.errors import UserError
from postrl.files import read_json, write_json
from postrl.study.definition import Curve, Figures, Measured, Study


@dataclass(frozen=True)
class Done:
    """A run that finished: its figures, what they depend on, and what they cost."""

    arm: str
    seed: int
    key: str  # see identity.py
    figures: Figures
    seconds: float
    cpu_seconds: float
    version: str  # of postrl
    commit: str | None  # of the folder the study lies in; ends in "+" where files were changed since

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; NaN becomes None."""
        fields = asdict(self)
        for measured in fields["figures"]["measured"]:
            measured["values"] = [_null(value) for value in measured["values"]]
        for curve in fields["figures"]["curves"]:
            curve["y"] = [_null(value) for value in curve["y"]]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """What `to_json` gave."""
        given = fields["figures"]
        measured = tuple(
            Measured(m["metric"], tuple(map(_nan, m["values"])), tuple(map(str, m["items"]))) for m in given["measured"]
        )
        curves = tuple(
            Curve(c["name"], tuple(map(float, c["x"])), tuple(map(_nan, c["y"])), c["x_label"]) for c in given["curves"]
        )
        return cls(**{**fields, "figures": Figures(measured, curves)})


@dataclass(frozen=True)
class Crashed:
    """A run (or the base of one) that gave no figures, and the file that says why."""

    arm: str
    seed: int
    reason: str
    file: str  # relative to the study's folder of results


@dataclass(frozen=True)
class Job:
    """One process: a run of an arm, or the making of a base. It lies in its folder as job.json."""

    kind: str  # "run" or "base"
    study: Path  # study.py
    name: str  # of the arm or base
    seed: int
    key: str
    variant: str  # "full" or "quick"
    bases: dict[str, str]  # name -> folder
    folder: Path
    threads: int
    minutes: float  # wall-clock limit
    commit: str | None  # of the study, when the job was written

    def write(self) -> None:
        """Into its folder."""
        write_json(self.folder / "job.json", asdict(self) | {"study": str(self.study), "folder": str(self.folder)})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What `write` wrote into a folder."""
        fields = read_json(folder / "job.json", "a job of a study")
        return cls(**{**fields, "study": Path(fields["study"]), "folder": Path(fields["folder"])})

    @property
    def label(self) -> str:
        return f"{self.name} seed {self.seed}" if self.kind == "run" else f"base {self.name} seed {self.seed}"


def read_done(folder: Path) -> Done | None:
    """The figures of a run's folder, None if there are none. Raises UserError naming a damaged file."""
    path = folder / "figures.json"
    if not path.exists():
        return None
    fields = read_json(path, "a run's figures")
    try:
        return Done.from_json(fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a run's figures ({error!r}): remove it and run it again") from error


def check_figures(figures: object, study: Study, arm: str) -> Figures:
    """What an arm returned, if it has every metric of the study, once, with values. Raises UserError naming the arm."""
    if not isinstance(figures, Figures):
        raise UserError(f"arm {arm!r} returned {type(figures).__name__}; it must return Figures")
    given = [measured.metric for measured in figures.measured]
    wanted = [metric.name for metric in study.metrics]
    if sorted(given) != sorted(wanted):
        raise UserError(f"arm {arm!r} gave the metrics {', '.join(given)}; the study's are {', '.join(wanted)}")
    for measured in figures.measured:
        said = f"arm {arm!r}, metric {measured.metric!r}"
        count = len(measured.values)
        if not count or (measured.items and len(measured.items) != count) or (not measured.items and count != 1):
            raise UserError(f"{said}: {count} values for {len(measured.items)} problems")
        if len(set(measured.items)) != len(measured.items):
            raise UserError(f"{said}: a problem is named twice")
        if any(math.isinf(value) for value in measured.values):
            raise UserError(f"{said}: a value is infinite; say NaN for what is not defined")
    return figures


def _null(value: float) -> float | None:
    return None if math.isnan(value) else value


def _nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
