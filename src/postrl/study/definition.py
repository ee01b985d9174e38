"""What a study's author writes: a question, arms, seeds, measurements, and what would answer it. Plain records."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from postrl.errors import UserError
from postrl.papers import shelf
from postrl.probes.passk import pass_at_k

if TYPE_CHECKING:
    from postrl.evaluate import Evaluation

C = TypeVar("C")  # the study's configuration: a frozen dataclass of its author
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]*")  # what may stand in a file's name everywhere
Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class Measured:
    """What one run measured of one metric: a number per problem, or a single number (then `items` is empty).

    NaN says that the figure is not defined in this run (a share of nothing); it becomes null in files.
    """

    metric: str
    values: tuple[float, ...]
    items: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        """Over problems."""
        return math.fsum(self.values) / len(self.values)


@dataclass(frozen=True)
class Curve:
    """A course over training, for the report's pictures; no verdict reads it."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    x_label: str = "step"


@dataclass(frozen=True)
class Figures:
    """What a run returns: one `Measured` for each metric of the study, and curves to look at."""

    measured: tuple[Measured, ...]
    curves: tuple[Curve, ...] = ()


def scalar(metric: str, value: float) -> Measured:
    """A metric that is one number per run."""
    return Measured(metric, (float(value),))


def per_problem(metric: str, items: Sequence[str], values: Sequence[float]) -> Measured:
    """A metric with one number per problem: intervals then are over problems and seeds."""
    return Measured(metric, tuple(map(float, values)), tuple(items))


def pass_at(evaluation: "Evaluation", ks: Sequence[int], prefix: str = "pass@") -> tuple[Measured, ...]:
    """pass@k of an evaluation for each k, problem by problem, as metrics pass@1, pass@4, …

    Raises UserError if a problem has fewer scored samples than the largest k.
    """
    scored, correct = np.array(evaluation.scored), np.array(evaluation.correct)
    return tuple(
        per_problem(f"{prefix}{k}", evaluation.items, [float(p) for p in pass_at_k(scored, correct, k)]) for k in ks
    )


@dataclass(frozen=True)
class Metric:
    """A figure that every run must give. `caption` says what the number is, with its unit."""

    name: str
    caption: str


@dataclass(frozen=True)
class BaseContext(Generic[C]):
    """What the pretraining of a base is given. Files written into `folder` are the base; nothing else is kept."""

    options: C  # what `Base.options` took out of the study's configuration
    seed: int  # 0 for a shared base
    folder: Path
    bases: Mapping[str, Path]  # folders of the bases this one needs, by name
    threads: int


@dataclass(frozen=True)
class Base:
    """A starting point, made once and kept as long as what it depends on stays the same.

    It depends on the code of `make` (and on every function of the study's folder that `make` uses), on `options` and on
    the seed. `options(config)` takes out of the study's configuration what the base depends on, so that other options
    may change without pretraining again; `make` sees only that. shared: one base for all seeds (made with seed 0)
    instead of one for each.
    """

    name: str
    make: Callable[[BaseContext[Any]], None]
    options: Callable[[Any], object] = field(default=lambda config: config)
    shared: bool = False
    needs: tuple["Base", ...] = ()


@dataclass(frozen=True)
class Context(Generic[C]):
    """What a run is given. Everything random must come from `seed`: runs of one seed are compared with one another."""

    arm: str
    seed: int
    config: C
    folder: Path  # empty at the start; for the files of `train` and the like
    bases: Mapping[str, Path]  # folders of the arm's bases, by name
    threads: int

    @property
    def base(self) -> Path:
        """The folder of the arm's only base."""
        if len(self.bases) != 1:
            raise UserError(f"arm {self.arm!r} has {len(self.bases)} bases: say which one by context.bases[NAME]")
        return next(iter(self.bases.values()))


@dataclass(frozen=True)
class Arm:
    """One configuration. exploratory: run only with --extended, and never part of the verdict."""

    name: str
    run: Callable[[Context[Any]], Figures]
    bases: tuple[Base, ...] = ()
    exploratory: bool = False


@dataclass(frozen=True)
class Contrast:
    """`treatment` minus `control` in `metric`, seed by seed and problem by problem.

    expect is the direction written down before the first run. worth is the smallest difference, in the metric's unit,
    that would matter: if the interval excludes it, the answer is "not supported", however small the p-value.
    """

    treatment: str
    control: str
    metric: str
    expect: Direction
    worth: float


@dataclass(frozen=True)
class Budget:
    """What the author promises. `minutes`: CPU minutes of the whole core (bases, arms × seeds). A run that takes more
    than `run_minutes` of wall-clock time is ended and counts as crashed."""

    minutes: float
    run_minutes: float = 60.0


@dataclass(frozen=True)
class Quick(Generic[C]):
    """The small variant, under 4 minutes on two cores: for the curious and for CI. Its results have a folder of their
    own and answer nothing. arms: empty means those of the core."""

    config: C
    seeds: tuple[int, ...] = (0, 1)
    arms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study(Generic[C]):
    """A question and what would answer it.

    contrasts are the core: fixed before the first run, corrected together by Holm's method, and the only ones the
    verdict reads. must_fail are contrasts that must *not* show the expected effect (a permuted weight, a label without
    information): if one does, the instrument is declared broken. exploratory contrasts may name exploratory arms; they
    are reported, and labelled.
    """

    question: str
    hypothesis: str
    config: C
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    contrasts: tuple[Contrast, ...]
    must_fail: tuple[Contrast, ...]
    budget: Budget
    quick: Quick[C]
    exploratory: tuple[Contrast, ...] = ()
    exploratory_seeds: tuple[int, ...] = (0, 1, 2)
    papers: tuple[str, ...] = ()  # of the shelf, by stem: those whose control experiment this is

    def arm(self, name: str) -> Arm:
        """Raises UserError listing the arms if there is none of that name."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise UserError(f"the study has no arm {name!r}; it has: {', '.join(arm.name for arm in self.arms)}")

    @property
    def core(self) -> tuple[Arm, ...]:
        """The arms that are not exploratory."""
        return tuple(arm for arm in self.arms if not arm.exploratory)

    def check(self) -> None:
        """Raises UserError naming what cannot be right."""
        _check_names("arm", [arm.name for arm in self.arms])
        _check_names("metric", [metric.name for metric in self.metrics])
        _check_names("base", [base.name for base in bases_of(self.arms)])
        for label, seeds in (
            ("seeds", self.seeds),
            ("quick.seeds", self.quick.seeds),
            ("exploratory_seeds", self.exploratory_seeds),
        ):
            if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
                raise UserError(f"the study's {label} {seeds} must be different whole numbers from 0 on, at least one")
        if not self.contrasts:
            raise UserError("the study has no contrasts: say which arm is compared with which, and in what")
        if not self.must_fail:
            raise UserError("the study has no must_fail: name a contrast that must not show the effect")
        core = {arm.name for arm in self.core}
        metrics = {metric.name for metric in self.metrics}
        for contrast in (*self.contrasts, *self.must_fail, *self.exploratory):
            self._check_contrast(contrast, core, metrics, contrast in self.exploratory)
        for name in self.quick.arms:
            self.arm(name)
        for name in self.papers:
            if name not in shelf():
                raise UserError(f"the study is said to be of paper {name!r}; the shelf has: {', '.join(shelf())}")
        for label, text in (("question", self.question), ("hypothesis", self.hypothesis)):
            if not text.strip():
                raise UserError(f"the study's {label} is empty: write it down before the first run")

    def _check_contrast(self, contrast: Contrast, core: set[str], metrics: set[str], exploratory: bool) -> None:
        said = f"contrast {contrast.treatment} against {contrast.control}"
        for name in (contrast.treatment, contrast.control):
            self.arm(name)
            if name not in core and not exploratory:
                raise UserError(f"{said}: arm {name!r} is exploratory, so only an exploratory contrast may name it")
        if contrast.treatment == contrast.control:
            raise UserError(f"{said}: an arm cannot be compared with itself")
        if contrast.metric not in metrics:
            raise UserError(f"{said}: there is no metric {contrast.metric!r}; there are: {', '.join(sorted(metrics))}")
        if not (math.isfinite(contrast.worth) and contrast.worth > 0):
            raise UserError(f"{said}: worth={contrast.worth} must be above 0, the smallest difference that matters")


def against(
    control: str, treatments: Sequence[str], metric: str, expect: Direction, worth: float
) -> tuple[Contrast, ...]:
    """Several arms against one control."""
    return tuple(Contrast(treatment, control, metric, expect, worth) for treatment in treatments)


def bases_of(arms: Sequence[Arm]) -> tuple[Base, ...]:
    """Every base that the arms need, each once, those that others need before them."""
    found: list[Base] = []

    def add(base: Base) -> None:
        for needed in base.needs:
            add(needed)
        if base not in found:
            found.append(base)

    for arm in arms:
        for base in arm.bases:
            add(base)
    return tuple(found)


def _check_names(what: str, names: Sequence[str]) -> None:
    if what != "base" and not names:
        raise UserError(f"the study has no {what}")
    for name in names:
        if not NAME.fullmatch(name):
            raise UserError(
                f"{what} {name!r}: a name is letters, digits and _ . @ + - and begins with one of the first"
            )
        if sum(other.lower() == name.lower() for other in names) > 1:
            raise UserError(f"two of the study's {what}s are called {name!r}: give each its own name")
