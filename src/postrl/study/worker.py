"""One run of a study, or the making of a base, in a process of its own: python -m postrl.study.worker FOLDER.

FOLDER holds job.json. A run leaves figures.json there, a base the folder `files` and made.json; a failure leaves
traceback.txt and exit code 1. Standard input is a pipe that whoever started this holds open: when it closes, even by
SIGKILL, this process and all it started end too, so that a study killed and started again never runs a job twice.
"""

import fcntl
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import postrl
from postrl.files import whole_folder, write_json
from postrl.study.definition import BaseContext, Context, Study, bases_of
from postrl.study.finding import load
from postrl.study.records import Done, Job, check_figures


def main(folder: Path) -> int:
    """Exit code: 0, or 1 after a failure."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the one before may still be ending
        try:
            do(Job.read(folder))
        except Exception:  # noqa: BLE001 (written down whole; the study goes on and reports it)
            text = traceback.format_exc()
            (folder / "traceback.txt").write_text(text, encoding="utf-8")
            print(text, file=sys.stderr)
            return 1
    return 0


def _end_with_starter() -> None:
    while os.read(0, 1024):  # not sys.stdin, whose lock would be held while the interpreter ends
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def do(job: Job) -> None:
    """Load the study and do the job. Chance that does not come from the context's seed is fixed as well."""
    random.seed(job.seed)
    np.random.seed(job.seed)
    study = load(job.study).study
    torch = sys.modules.get("torch")  # a study that does without need not wait seconds for it
    if torch is not None:
        torch.manual_seed(job.seed)
        torch.set_num_threads(job.threads)
    config = study.config if job.variant == "full" else study.quick.config
    began, cpu = time.monotonic(), time.process_time()
    bases = {name: Path(folder) for name, folder in job.bases.items()}
    if job.kind == "base":
        _make_base(job, study, config, bases)
        cost = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu}
        write_json(job.folder / "made.json", {"name": job.name, "seed": job.seed, "key": job.key, **cost})
        return
    work = job.folder / "work"
    shutil.rmtree(work, ignore_errors=True)  # what a killed run had done
    work.mkdir()
    arm = study.arm(job.name)
    figures = check_figures(arm.run(Context(arm.name, job.seed, config, work, bases, job.threads)), study, arm.name)
    done = Done(
        arm=arm.name,
        seed=job.seed,
        key=job.key,
        figures=figures,
        seconds=round(time.monotonic() - began, 2),
        cpu_seconds=round(time.process_time() - cpu, 2),
        version=postrl.__version__,
        commit=job.commit,
    )
    write_json(job.folder / "figures.json", done.to_json())


def _make_base(job: Job, study: Study, config: Any, bases: dict[str, Path]) -> None:
    base = next(base for base in bases_of(study.arms) if base.name == job.name)
    with whole_folder(job.folder / "files") as folder:
        base.make(BaseContext(base.options(config), job.seed, folder, bases, job.threads))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
