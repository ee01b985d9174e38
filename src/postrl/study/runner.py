"""Running a study: what is missing is run, what is there is kept, and the answer is written anew each time.

    OUT/registered.json             question, hypothesis and contrasts with date, hash and commit; grows, never shrinks
    OUT/runs/ARM/SEED/              job.json, log.txt, work/ (the arm's own files), then figures.json or traceback.txt
    OUT/bases/NAME-HASH/            files/ and made.json
    OUT/results/                    results.json, report.html, summary.md, *.png: small enough to commit

A run whose definition changed since (see `identity`) is never mixed with the others: the study stops with a sentence,
until the old results are discarded by --fresh. Crashed runs are tried again by the next call. Runs are ordered seed by
seed, so that a study stopped half-way has whole pairs.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from postrl.errors import UserError
from postrl.files import read_json, write_json
from postrl.study import executors, registration
from postrl.study.answer import answer, show, write_answer
from postrl.study.definition import Base, bases_of
from postrl.study.finding import find, load
from postrl.study.identity import base_key, plan_of
from postrl.study.plan import Options, Plan, State, make_plan
from postrl.study.records import Crashed, Job, read_done

CRASHED = 1  # exit code, also of a broken instrument


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
    for wave in _waves([(base, run.seed) for run in missing for base in bases_of([run.arm])], plan):
        _execute(start, wave)
    jobs = []
    for run in missing:
        bases = {base.name: _base_folder(plan, base, run.seed) for base in run.arm.bases}
        absent = next((name for name, folder in bases.items() if not (folder / "made.json").exists()), None)
        job = _job(plan, "run", run.arm.name, run.seed, run.key, run.folder, run.arm.bases)
        _clear(job)
        if absent is None:
            jobs.append(job)
        else:
            _fail(job, f"its base {absent} was not made", bases[absent])
    _execute(start, jobs)


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _waves(needs: Sequence[tuple[Base, int]], plan: Plan) -> Iterator[list[Job]]:
    """Jobs of the bases that are not there, those that others need first. A wave is built after the one before ran."""
    depth: dict[int, dict[Path, tuple[Base, int]]] = {}
    for base, seed in needs:
        depth.setdefault(_depth(base), {})[_base_folder(plan, base, seed)] = (base, seed)
    for level in sorted(depth):
        jobs = []
        for folder, (base, seed) in depth[level].items():
            if (folder / "made.json").exists():
                continue
            key = base_key(base, plan.config, seed, plan.found.path.parent)
            job = _job(plan, "base", base.name, 0 if base.shared else seed, key, folder, base.needs)
            _clear(job)
            if all((Path(needed) / "..").resolve().joinpath("made.json").exists() for needed in job.bases.values()):
                jobs.append(job)
        yield jobs


def _depth(base: Base) -> int:
    return 1 + max((_depth(other) for other in base.needs), default=-1)


def _base_folder(plan: Plan, base: Base, seed: int) -> Path:
    key = base_key(base, plan.config, seed, plan.found.path.parent)
    return plan.out / "bases" / f"{base.name}-{key}"


def _job(plan: Plan, kind: str, name: str, seed: int, key: str, folder: Path, needs: Sequence[Base]) -> Job:
    bases = {base.name: str(_base_folder(plan, base, seed) / "files") for base in needs}
    variant, limit = plan.options.variant, plan.study.budget.run_minutes
    return Job(kind, plan.found.path, name, seed, key, variant, bases, folder, plan.options.threads, limit)


def _clear(job: Job) -> None:
    """Ready a folder for a job: nothing of an earlier failure is left."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for name in ("crash.json", "traceback.txt"):
        (job.folder / name).unlink(missing_ok=True)
    job.write()


def _execute(start: executors.Executor, jobs: Sequence[Job]) -> None:
    for count, ended in enumerate(start(jobs), 1):
        job, result = ended.job, "made.json" if ended.job.kind == "base" else "figures.json"
        if (job.folder / result).exists():
            seconds = read_json(job.folder / result, "a result")["seconds"]
            print(f"{count}/{len(jobs)} {job.label}: done in {seconds:.0f} s", flush=True)
        else:
            _fail(job, ended.reason or f"ended without {result}", job.folder)


def _fail(job: Job, reason: str, where: Path) -> None:
    traceback_ = where / "traceback.txt"
    if traceback_.exists():
        reason = f"{reason}: {traceback_.read_text(encoding='utf-8').strip().splitlines()[-1]}"
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
    spent = [read_json(path, "a base")["cpu_seconds"] for path in sorted((plan.out / "bases").glob("*/made.json"))]
    there = {path.name for path in (plan.out / "runs").glob("*") if path.is_dir()}
    foreign = sorted(there - {run.arm.name for run in plan.known})
    return State(plan, tuple(done), tuple(crashed), tuple(absent), sum(spent), tuple(foreign))
