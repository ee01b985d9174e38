"""Running a study: what is missing is run, what is there is kept, and the answer is written anew each time.

    OUT/registered.json             question, hypothesis and contrasts with date, hash and commit; grows, never shrinks
    OUT/runs/ARM/SEED/              job.json, log.txt, work/ (the arm's own files), then figures.json or traceback.txt
    OUT/bases/NAME-HASH/            files/ and made.json
    OUT/results/                    results.json, summary.md, *.png: small enough to commit; report.html (5 MB)

A run whose definition changed since (see `identity`) is never mixed with the others: the study stops with a sentence,
until the old results are discarded by --fresh. Crashed runs are tried again by the next call. Runs are ordered seed by
seed, so that a study stopped half-way has whole pairs.
"""

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from postrl.errors import UserError
from postrl.files import read_json, write_json
from postrl.study import executors, registration
from postrl.study.answer import answer, show, write_answer
from postrl.study.definition import Base
from postrl.study.finding import find, load, studies, summary
from postrl.study.identity import base_key, plan_of
from postrl.study.plan import Options, Plan, Run, State, make_plan
from postrl.study.records import Crashed, Job, read_done

CRASHED = 1  # exit code, also of a broken instrument


def print_studies() -> None:
    """What there is to ask."""
    found = studies()
    for name, path in found.items():
        print(f"{name}: {summary(path)}")
    if not found:
        print("no studies are installed; give the path of a study.py")


def run_study(name: str, options: Options) -> int:
    """Run what is missing of a study, write and print its answer. Gives the exit code: 0, or 1 if a run crashed or the
    instrument is broken. Raises UserError for an unknown study, impossible options or changed definitions."""
    found = load(find(name))
    plan = make_plan(found, options)
    plan.out.mkdir(parents=True, exist_ok=True)
    with alone(plan.out):
        prepare(plan)
        print(f"{found.name} ({options.variant}): {len(plan.wanted)} runs in {plan.out}", flush=True)
        execute(plan)
        state = survey(plan)
        result = answer(state, registration.read(plan.out / "registered.json"))
        write_answer(result, plan.out / "results")
        show(result, plan.out / "results")
    return CRASHED if state.crashed or result.broken else 0


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises UserError if another one runs a study in it."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"another process is running a study in {out}; wait for it or choose another --out"
            ) from error
        yield


def prepare(plan: Plan) -> None:
    """Refuse changed definitions or discard old results, and write the plan down before anything runs."""
    old = [(run, done) for run in plan.known if (done := read_done(run.folder))]
    changed = sorted({run.arm.name for run, done in old if done.key != run.key})
    if changed and not plan.options.fresh:
        raise UserError(
            f"the results in {plan.out} were made by another definition of {', '.join(changed)} (code, sizes or "
            "threads): add --fresh to discard them, or choose another --out"
        )
    discard = plan.options.fresh and bool(old)
    text = plan_of(plan.study, plan.seeds)
    registration.register(plan.out / "registered.json", text, len(old), plan.found.path.parent, fresh=discard)
    if plan.options.fresh:
        for name in ("runs", "results"):
            shutil.rmtree(plan.out / name, ignore_errors=True)


def execute(plan: Plan) -> None:
    """Make the missing bases, then the missing runs. How each ended is printed, and kept in its folder."""
    missing = [run for run in plan.wanted if read_done(run.folder) is None]
    workers = plan.options.jobs or max(1, processors() // plan.options.threads)
    start: executors.Executor = partial(executors.EXECUTORS[plan.options.executor], workers=workers)
    commit = registration.commit_of(plan.found.path.parent)
    for wave in _waves(missing, plan, commit):
        _execute(start, wave)
    jobs = []
    for run in missing:
        job = _job(plan, "run", run.arm.name, run.seed, run.key, run.folder, run.arm.bases, commit)
        _clear(job)
        absent = _absent(job)
        if absent is None:
            jobs.append(job)
        else:
            _fail(job, f"its base {absent.name} was not made", absent)
    _execute(start, jobs)


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _waves(missing: Sequence[Run], plan: Plan, commit: str | None) -> Iterator[list[Job]]:
    """Jobs of the bases that are not there, those that others need first. A wave is built after the one before ran."""
    waves: dict[int, dict[Path, tuple[Base, int]]] = {}
    for run in missing:
        for base, seed in needed(run.arm.bases, run.seed):
            waves.setdefault(_depth(base), {})[_base_folder(plan, base, seed)] = (base, seed)
    for level in sorted(waves):
        jobs = []
        for folder, (base, seed) in waves[level].items():
            if not (folder / "made.json").exists():
                key = base_key(base, plan.config, seed, plan.options.threads, plan.found.path.parent)
                job = _job(plan, "base", base.name, seed, key, folder, base.needs, commit)
                _clear(job)
                jobs += [job] if _absent(job) is None else []  # else what needs it says so
        yield jobs


def needed(bases: Sequence[Base], seed: int) -> Iterator[tuple[Base, int]]:
    """Every base that a run with this seed needs, also through others, with the seed it is made with."""
    for base in bases:
        own = 0 if base.shared else seed
        yield from needed(base.needs, own)
        yield base, own


def _absent(job: Job) -> Path | None:
    """The folder of a base that the job needs and that could not be made."""
    folders = [Path(files).parent for files in job.bases.values()]
    return next((folder for folder in folders if not (folder / "made.json").exists()), None)


def _depth(base: Base) -> int:
    return 1 + max((_depth(other) for other in base.needs), default=-1)


def _base_folder(plan: Plan, base: Base, seed: int) -> Path:
    key = base_key(base, plan.config, seed, plan.options.threads, plan.found.path.parent)
    return plan.out / "bases" / f"{base.name}-{key}"


def _job(
    plan: Plan, kind: str, name: str, seed: int, key: str, folder: Path, needs: Sequence[Base], commit: str | None
) -> Job:
    bases = {base.name: str(_base_folder(plan, base, seed) / "files") for base in needs}
    limit, threads = plan.study.budget.run_minutes, plan.options.threads
    return Job(kind, plan.found.path, name, seed, key, plan.options.variant, bases, folder, threads, limit, commit)


def _clear(job: Job) -> None:
    """Ready a folder for a job: nothing of an earlier failure is left."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for name in ("crash.json", "traceback.txt"):
        (job.folder / name).unlink(missing_ok=True)
    job.write()


def _execute(start: executors.Executor, jobs: Sequence[Job]) -> None:
    began = time.monotonic()
    for count, ended in enumerate(start(jobs), 1):
        job, result = ended.job, "made.json" if ended.job.kind == "base" else "figures.json"
        if (job.folder / result).exists():
            seconds = read_json(job.folder / result, "a result")["seconds"]
            left = (time.monotonic() - began) / count * (len(jobs) - count) / 60
            print(f"{count}/{len(jobs)} {job.label}: done in {seconds:.0f} s, {left:.1f} min left", flush=True)
        else:
            _fail(job, ended.reason or f"ended without {result}", job.folder)


def _fail(job: Job, reason: str, where: Path) -> None:
    traceback_ = where / "traceback.txt"
    if traceback_.exists():
        reason = f"{reason}: {traceback_.read_text(encoding='utf-8').strip().splitlines()[-1]}"[:300]
    file = next(path for name in ("traceback.txt", "log.txt", "job.json") if (path := where / name).exists())
    write_json(job.folder / "crash.json", {"reason": reason, "file": str(file)})
    print(f"{job.label}: CRASHED, {reason}; see {file}", flush=True)


def survey(plan: Plan) -> State:
    """What lies in the folder: figures, crashes, and what is not there yet."""
    done, crashed, absent = [], [], []
    for run in plan.known:
        figures = read_done(run.folder)
        crash = run.folder / "crash.json"
        if figures is not None:
            done.append(figures)
        elif crash.exists():
            said = read_json(crash, "the record of a crash")
            file = Path(said["file"])
            shown = file.relative_to(plan.out) if file.is_relative_to(plan.out) else file
            crashed.append(Crashed(run.arm.name, run.seed, str(said["reason"]), str(shown)))
        elif run.core:
            absent.append((run.arm.name, run.seed))
    uses = {_base_folder(plan, base, seed) for run in plan.known for base, seed in needed(run.arm.bases, run.seed)}
    made = [folder / "made.json" for folder in sorted(uses) if (folder / "made.json").exists()]
    spent = [float(read_json(path, "a base")["cpu_seconds"]) for path in made]
    there = {path.name for path in (plan.out / "runs").glob("*") if path.is_dir()}
    foreign = sorted(there - {run.arm.name for run in plan.known})
    return State(plan, tuple(done), tuple(crashed), tuple(absent), sum(spent), tuple(foreign))
