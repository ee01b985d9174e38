"""The type of a run's matrix products: measured at its start, then kept by the run.

Weights, their gradients, AdamW's moments, norms and sums stay in float32 whatever it is.
"""

from pathlib import Path
from typing import Literal

import torch
from accelerate import PartialState

from postrl.errors import UserError
from postrl.policies.decoder import choose_compute_dtype
from postrl.record import read_run

Compute = Literal["auto", "float32", "bfloat16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(wanted: Compute, run: Path | None = None) -> torch.dtype:
    """What `wanted` stands for, printed where it had to be chosen.

    "auto" is bfloat16 where this machine multiplies it at least 1.5 times as fast as float32, but what a run to be
    resumed or evaluated began with, on whatever machine that was. Raises UserError if `run` is damaged.
    """
    if wanted != "auto":
        return DTYPES[wanted]
    if run is not None:
        return recorded_dtype(run)
    state = PartialState(cpu=not torch.accelerator.is_available())
    fast = torch.tensor(int(choose_compute_dtype(state.device) == torch.bfloat16), device=state.device)
    if state.num_processes > 1:  # all of them compute in one type: bfloat16 if it pays on every one
        torch.distributed.all_reduce(fast, torch.distributed.ReduceOp.MIN)
    chosen = torch.bfloat16 if fast else torch.float32
    state.print(f"matrix products in {name_of(chosen)} (measured; option compute_dtype)", flush=True)
    return chosen


def recorded_dtype(run: Path) -> torch.dtype:
    """What a run computes in; float32 where it does not say. Raises UserError if `run` is damaged."""
    told = read_run(run)["configuration"].get("compute_dtype", "float32")
    if told not in DTYPES:
        raise UserError(f"{run / 'run.json'} is damaged: compute_dtype is {told!r}, not one of {', '.join(DTYPES)}")
    return DTYPES[told]


def name_of(dtype: torch.dtype) -> str:
    """As the option and `run.json` spell it."""
    return str(dtype).removeprefix("torch.")
