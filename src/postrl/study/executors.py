"""Where the processes of a study run: on this machine, or on a Ray cluster. Both start the same command.

An executor takes jobs and yields each with how it ended, in the order in which they end.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import postrl
from postrl.errors import UserError
from postrl.study.records import Job

POLL = 0.1  # seconds between two looks at the running processes
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True)
class Ended:
    """A job whose process is over. `reason` is empty if all went well."""

    job: Job
    reason: str


Executor = Callable[[Sequence[Job]], Iterator[Ended]]  # once the number of workers is given


@dataclass(frozen=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    deadline: float


def local(jobs: Sequence[Job], workers: int) -> Iterator[Ended]:
    """At most `workers` processes at a time on this machine. Whatever still runs when the caller stops is ended."""
    waiting = list(reversed(jobs))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_start(waiting.pop()))
            over = [(one, reason) for one in running if (reason := _reason(one)) is not None]
            running = [one for one in running if all(one is not other for other, _ in over)]
            for one, reason in over:
                _end(one)
                yield Ended(one.job, reason)
            if not over:
                time.sleep(POLL)
    finally:
        for one in running:
            _end(one)


def ray(jobs: Sequence[Job], workers: int) -> Iterator[Ended]:
    """The same on the Ray cluster that RAY_ADDRESS names, or on a local one with `workers` jobs at a time.

    Ray decides where and when; each task runs one process as `local` does. All nodes must see the study's file and
    folder of results at the same path, and have the same postrl installed.
    """
    if not jobs:
        return
    try:
        import ray as cluster
        from ray.exceptions import RayError
    except ImportError as error:
        raise UserError('--executor ray needs Ray: pip install "postrl[ray]"') from error
    started = not cluster.is_initialized()
    if started and os.environ.get("RAY_ADDRESS"):
        cluster.init(log_to_driver=False, logging_level=logging.WARNING)
    elif started:
        cpus = workers * max((job.threads for job in jobs), default=1)
        cluster.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    pending: dict[Any, Job] = {}
    try:
        most = max(job.threads for job in jobs)
        if most > cluster.cluster_resources().get("CPU", 0):
            raise UserError(f"option threads={most} is more than the Ray cluster has: lower it")
        pending = {
            cluster.remote(num_cpus=job.threads, max_retries=0)(on_node).remote(str(job.folder)): job for job in jobs
        }
        while pending:
            ready, _ = cluster.wait(list(pending), num_returns=1)
            job = pending.pop(ready[0])
            try:
                reason = cluster.get(ready[0])
            except RayError as error:
                reason = f"was lost by Ray ({type(error).__name__}: {error})".splitlines()[0]
            yield Ended(job, reason)
    finally:
        for task in pending:
            cluster.cancel(task, force=True)
        if started:
            cluster.shutdown()


EXECUTORS = {"local": local, "ray": ray}


def on_node(folder: str) -> str:
    """What a Ray task does: one job, on whatever node it is. Gives the reason of its end."""
    if not (Path(folder) / "job.json").exists():
        return f"the node {os.uname().nodename} does not see {folder}: choose an --out that all nodes share"
    return next(local([Job.read(Path(folder))], 1)).reason


def _start(job: Job) -> _Running:
    root = str(Path(postrl.__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        **os.environ,
        **{name: str(job.threads) for name in THREADS},
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with (job.folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "postrl.study.worker", str(job.folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that it can be ended with all it started
        )
    return _Running(job, process, time.monotonic() + 60 * job.minutes)


def _reason(one: _Running) -> str | None:
    """Why a process is over ("" if all went well), None while it runs."""
    code = one.process.poll()
    if code is None:
        return f"ran past its limit of {one.job.minutes:g} minutes" if time.monotonic() > one.deadline else None
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else ""


def _end(one: _Running) -> None:
    """End what is left of the process and its children, and wait for it."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(one.process.pid, signal.SIGKILL)
    one.process.wait()
    if one.process.stdin:
        one.process.stdin.close()
