"""Which runs a study has, with given options, and where their files are."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from postrl.errors import UserError
from postrl.study.definition import Arm, Study
from postrl.study.finding import Found
from postrl.study.identity import run_key
from postrl.study.records import Crashed, Done


@dataclass(frozen=True)
class Options:
    """What the command line says of how to run a study. seeds: empty means those of the study."""

    quick: bool = False
    extended: bool = False
    seeds: tuple[int, ...] = ()
    jobs: int = 0  # runs at a time; 0: one for each processor
    threads: int = 1  # of each run
    executor: Literal["local", "ray"] = "local"
    out: Path | None = None
    fresh: bool = False

    @property
    def variant(self) -> str:
        return "quick" if self.quick else "full"


@dataclass(frozen=True)
class Run:
    """One arm with one seed, and where its files are. core: it counts for the verdict."""

    arm: Arm
    seed: int
    key: str
    folder: Path
    core: bool


@dataclass(frozen=True)
class Plan:
    """A study with the options that decide its runs: `wanted` are to be run now, `known` all whose figures count."""

    found: Found
    options: Options
    out: Path
    seeds: tuple[int, ...]  # of the core
    core: tuple[Arm, ...]
    wanted: tuple[Run, ...]
    known: tuple[Run, ...]

    @property
    def study(self) -> Study:
        return self.found.study

    @property
    def config(self) -> object:
        return self.study.quick.config if self.options.quick else self.study.config


@dataclass(frozen=True)
class State:
    """What is known after a sitting. absent: runs of the core that were not asked for yet, as (arm, seed)."""

    plan: Plan
    done: tuple[Done, ...]
    crashed: tuple[Crashed, ...]
    absent: tuple[tuple[str, int], ...]
    base_cpu_seconds: float
    foreign: tuple[str, ...]  # arms with results that the study no longer has


def make_plan(found: Found, options: Options) -> Plan:
    """Which runs there are. Raises UserError for options that cannot be right."""
    study = found.study
    for label, value, least in (("jobs", options.jobs, 0), ("threads", options.threads, 1)):
        if value < least:
            raise UserError(f"option {label}={value} must be at least {least}")
    seeds = study.quick.seeds if options.quick else study.seeds
    unplanned = [seed for seed in options.seeds if seed not in seeds]
    if any(seed < 0 for seed in options.seeds):
        raise UserError(f"option seeds={options.seeds}: a seed is a whole number from 0 on")
    if unplanned and not options.extended:
        raise UserError(
            f"seeds {unplanned} are not among the study's {list(seeds)}, which were fixed before the first run; "
            "add --extended to run them as exploratory"
        )
    core = study.core
    if options.quick and study.quick.arms:
        core = tuple(arm for arm in core if arm.name in study.quick.arms)
    out = (options.out or Path("runs/studies") / found.name / options.variant).resolve()
    plan = Plan(found, options, out, seeds, core, (), ())
    exploratory = tuple(arm for arm in study.arms if arm.exploratory)
    some = options.seeds or seeds
    more = options.seeds or study.exploratory_seeds
    wanted = [_run(plan, arm, seed) for seed in some for arm in core]
    if options.extended:
        wanted += [_run(plan, arm, seed) for seed in more for arm in exploratory]
    kept = [_run(plan, arm, seed) for arm in (*core, *exploratory) for seed in _seeds_there(out, arm.name)]
    planned = [_run(plan, arm, seed) for seed in seeds for arm in core]
    known = {(run.arm.name, run.seed): run for run in (*planned, *wanted, *kept)}
    return replace(plan, wanted=tuple(dict.fromkeys(wanted)), known=tuple(known.values()))


def _run(plan: Plan, arm: Arm, seed: int) -> Run:
    key = run_key(plan.study, arm, plan.config, seed, plan.options.threads, plan.found.path.parent)
    core = not arm.exploratory and seed in plan.seeds
    return Run(arm, seed, key, plan.out / "runs" / arm.name / str(seed), core)


def _seeds_there(out: Path, arm: str) -> list[int]:
    folders = (out / "runs" / arm).glob("*/job.json")
    return sorted(int(path.parent.name) for path in folders if path.parent.name.isdecimal())
