"""Advantages of many rewards in ragged groups, one estimator after the other: milliseconds of each."""

import sys
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.channel import Laps
from benchmarks.work import Job
from postrl.advantages import centred, leave_one_out, zscored

ESTIMATORS = {"centred": centred, "zscored": partial(zscored, eps=1e-4), "leave_one_out": leave_one_out}


def main(job: Job) -> None:
    torch.set_num_threads(job.conditions.threads)
    laps, facts = Laps(), {}
    rewards, group = ragged(job.work.prompts)
    while True:
        laps.lap(**facts)
        milliseconds = {}
        for name, estimator in ESTIMATORS.items():
            start = time.perf_counter()
            estimator(rewards, group)
            milliseconds[name] = 1000 * (time.perf_counter() - start)
        facts = {"tokens": len(rewards), "milliseconds": milliseconds}


def ragged(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards [count] in groups of 2 … 16, in shuffled order."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 17, (count,), generator=generator)
    group = torch.repeat_interleave(torch.arange(count), sizes)[:count]
    return torch.randn(count, generator=generator), group[torch.randperm(count, generator=generator)]


if __name__ == "__main__":
    main(Job.read(Path(sys.argv[1])))
