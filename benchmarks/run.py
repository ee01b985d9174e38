"""Runs a row: every side in a process of its own, in turns, each lap checked and written down as it comes."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks import machine, models, pairs
from benchmarks.channel import Worker, WorkerError
from benchmarks.pairs import Mismatch
from benchmarks.results import Results
from benchmarks.rows import OURS, STATISTICS, Row, Side
from benchmarks.work import Conditions, Job

LEAST_COSINE = {"float32": 0.9999, "bfloat16": 0.99}
HINT = "make bench-envs"
NORM_BOUND = {"float32": 1e-3, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Bench:
    """What all rows share. vllm: the Python of vLLM's environment."""

    conditions: Conditions
    results: Results
    scratch: Path
    vllm: Path

    def python(self, side: Side) -> Path:
        return self.vllm if side.own_environment else Path(sys.executable)

    def absent(self, side: Side) -> str | None:
        """Why a side cannot run here, in words; None if it can."""
        if side.only_bfloat16 and self.conditions.compute != "bfloat16":
            return "bfloat16 products are not 1.5 times as fast as float32's on this machine"
        if not side.needs:
            return None
        if not side.own_environment:
            there = importlib.util.find_spec(side.needs) is not None
        elif self.vllm.exists():
            code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({side.needs!r}) is None)"
            there = subprocess.run([str(self.vllm), "-c", code], check=False).returncode == 0
        else:
            there = False
        return None if there else f"{side.needs} is not installed: {HINT}"

    def start(self, side: Side, job: Job) -> Worker:
        """The side's process, ready for its first lap."""
        name = "-".join(filter(None, [side.module.split(".")[-1], side.variant]))
        folder = Path(job.scratch) / name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "job.json"
        job.as_variant(side.variant, folder).write(path)
        command = [str(self.python(side)), "-m", side.module, str(path)]
        return Worker(command, _environment(self.conditions), folder / f"{name}.log")


def _environment(conditions: Conditions) -> Mapping[str, str]:
    """The same for every side."""
    threads = str(conditions.threads)
    paths = [str(machine.ROOT), str(machine.ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    set_on_purpose = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    rest = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    wait = {} if conditions.wait_policy == "default" else {"OMP_WAIT_POLICY": conditions.wait_policy}
    return rest | set_on_purpose | wait


def run(row: Row, bench: Bench, fresh: bool = False) -> None:
    """Rounds until the row has its pairs or its minutes are over; at least one. What a peer cannot do is noted.

    Raises WorkerError or Mismatch if it is postrl's own side that fails.
    """
    entry = bench.results.entry(row, bench.conditions, fresh)
    if _installed_since(row, bench, entry):
        entry = bench.results.entry(row, bench.conditions, fresh=True)
    if len(entry["rounds"]) >= row.pairs:
        print(f"{row.name}: {len(entry['rounds'])} pairs are there already", flush=True)
        return
    print(f"{row.name}: {row.title}", flush=True)
    entry["missing"] = {}
    deadline = time.monotonic() + 60 * row.minutes
    job = models.job(row.work, bench.conditions, bench.scratch / row.name)
    own = STATISTICS if row.work.kind == "statistics" else OURS
    workers: dict[str, Worker] = {}
    try:
        for side in (own, *row.peers):
            _begin(side, row, bench, job, workers)
        first = {}
        for _ in range(row.warm):
            first = first or _round(row, bench, workers)
        while len(entry["rounds"]) < row.pairs:
            made = _round(row, bench, workers)
            if not entry["rounds"]:
                _compare_first(row, bench, first or made, job)
                made |= _beside(row, bench, job)
            bench.results.add(row, made)
            _tell(made)
            if time.monotonic() > deadline:
                break
    finally:
        for worker in workers.values():
            worker.stop()


def _installed_since(row: Row, bench: Bench, entry: Mapping) -> bool:
    """Whether a peer that was not installed when the row was measured is now."""
    lacked = [side for side in (*row.peers, *row.once) if entry["missing"].get(side.name, "").endswith(HINT)]
    return any(bench.absent(side) is None for side in lacked)


def _begin(side: Side, row: Row, bench: Bench, job: Job, workers: dict[str, Worker]) -> None:
    reason = bench.absent(side)
    if reason is not None:
        _miss(row, bench, side.name, reason)
        return
    try:
        workers[side.name] = bench.start(side, job)
    except WorkerError as error:
        _fail(row, bench, side.name, error)


def _round(row: Row, bench: Bench, workers: dict[str, Worker]) -> dict[str, dict]:
    """One lap of every side that still runs."""
    made = {}
    for name, worker in list(workers.items()):
        try:
            load = machine.load_average()
            report = worker.lap()
            if name != pairs.LIMIT:
                pairs.check(row.work, name, report)
        except (WorkerError, Mismatch) as error:
            workers.pop(name).stop()
            _fail(row, bench, name, error)
            continue
        lengths = report.pop("lengths", [])
        made[name] = report | ({"lengths": lengths} if row.work.natural else {}) | {"load": load}
    return made


def _beside(row: Row, bench: Bench, job: Job) -> dict[str, dict]:
    """A single lap of the sides that run once, alone."""
    made = {}
    for side in row.once:
        workers: dict[str, Worker] = {}
        try:
            _begin(side, row, bench, job, workers)
            made |= _round(row, bench, workers)
        finally:
            for worker in workers.values():
                worker.stop()
    return made


def _compare_first(row: Row, bench: Bench, first: Mapping[str, dict], job: Job) -> None:
    """Raises Mismatch if losses or gradients of laps that start from the same weights differ."""
    compute = bench.conditions.compute
    for side in row.peers:
        if side.name not in first or side.name == pairs.LIMIT:
            continue
        ours, theirs = first[pairs.OURS], first[side.name]
        if row.work.kind == "train":
            pairs.check_losses(ours, theirs, side.name, compute)
        if row.work.kind == "agreement":
            folder = Path(job.scratch)
            cosine = _cosine(
                folder / "with_postrl" / "gradients.safetensors", folder / "with_trl" / "gradients.safetensors"
            )
            a, b = ours["whole_gradient_norm"], theirs["whole_gradient_norm"]
            if not (cosine >= LEAST_COSINE[compute] and abs(a - b) <= NORM_BOUND[compute] * b):
                raise Mismatch(f"gradients differ from {side.name}'s: cosine {cosine:.6f}, norms {a:.6g} and {b:.6g}")
            ours["cosine"] = cosine


def _cosine(ours: Path, theirs: Path) -> float:
    """Between two sets of gradients as single vectors, over the tensors both have. Raises Mismatch if there is none."""
    a, b = load_file(ours), load_file(theirs)
    names = sorted(set(a) & set(b))
    if not names:
        raise Mismatch(f"{ours} and {theirs} have no tensor in common")
    x, y = (torch.cat([tensors[name].double().flatten() for name in names]) for tensors in (a, b))
    return float(x @ y / (x.norm() * y.norm()))


def _miss(row: Row, bench: Bench, side: str, reason: str) -> None:
    print(f"  {side}: {reason}", flush=True)
    bench.results.miss(row, side, reason)


def _fail(row: Row, bench: Bench, side: str, error: Exception) -> None:
    if side == pairs.OURS:
        raise error
    print(f"  {side} failed: {error}", flush=True)
    bench.results.miss(row, side, f"failed: {str(error).splitlines()[0]}")


def _tell(made: Mapping[str, dict]) -> None:
    print(
        "  "
        + ", ".join(
            f"{name} {pairs.seconds(report):.3f} s (cpu {report['cpu_seconds']:.3f})" for name, report in made.items()
        ),
        flush=True,
    )
