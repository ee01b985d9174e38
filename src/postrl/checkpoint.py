"""Checkpoints: safetensors and JSON, whole or absent, written only between steps. The last two and the best are kept.

A folder `checkpoints/step_000012` holds the state after 12 steps: trainable weights, AdamW's moments, and
`state.json` with everything else (step, position in the data, dtype, threads, states handed to `train`).
"""

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from postrl.errors import UserError
from postrl.files import read_json, whole_folder, write_json

FORMAT = 1


@runtime_checkable
class Stateful(Protocol):
    """Anything whose JSON state belongs to a run: a source, a rubric archive, a moving baseline, a curriculum."""

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict) -> None: ...


@dataclass(frozen=True)
class Progress:
    """Where a run stands between two steps."""

    step: int = 0  # steps done
    update: int = 0  # updates done, skipped ones included: the schedule's clock
    constant: int = 0  # steps in a row without reward variance
    evaluated: int = -1  # step of the last evaluation
    best: float | None = None
    best_step: int | None = None


def snapshot(states: Mapping[str, Stateful]) -> dict[str, object]:
    """The states as they are now; later changes do not reach it."""
    return {name: copy.deepcopy(value.state_dict()) for name, value in states.items()}


def trainable(policy: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def save(
    folder: Path,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    states: Mapping[str, object],
    progress: Progress,
    first: bool = True,
) -> Path:
    """Write `folder/step_…` and forget checkpoints that are neither among the last two nor the best.

    states: a `snapshot`, by name. All processes of a run call this, to bring sharded moments together; the first
    writes.
    """
    weights = trainable(policy)
    path = folder / f"step_{progress.step:06d}"
    moments = _moments(optimizer, keep=first)
    if not first:
        return path
    state = {
        "format": FORMAT,
        "progress": vars(progress),
        "dtype": sorted({str(p.dtype) for p in weights.values()}),
        "threads": torch.get_num_threads(),
        "states": states,
    }
    with whole_folder(path) as beside:
        save_file({n: p.detach().contiguous() for n, p in weights.items()}, beside / "policy.safetensors")
        save_file(moments, beside / "optimizer.safetensors")
        write_json(beside / "state.json", state)
    for old in checkpoints(folder)[:-2]:
        if progress.best_step is None or old.name != f"step_{progress.best_step:06d}":
            shutil.rmtree(old)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    named = [p for p in folder.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdecimal()]
    return sorted(named, key=lambda p: int(p.name.removeprefix("step_")))


def restore(
    path: Path,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    states: Mapping[str, Stateful],
    part: str = "",
) -> Progress:
    """Put a checkpoint back; also its thread count, which results depend on in the last bit.

    part: `policy` is only that part of what was saved: the weights whose names begin so, without that beginning.

    Raises UserError naming the file that is missing, damaged or of another model.
    """
    progress, threads, stored = _read_state(path / "state.json", set(states))
    weights = trainable(policy)
    everything = _load(path / "policy.safetensors")
    saved = {name.removeprefix(part): tensor for name, tensor in everything.items() if name.startswith(part)}
    _match(path / "policy.safetensors", saved, weights)
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(saved[name])
    if optimizer is not None:
        _restore_moments(path / "optimizer.safetensors", optimizer)
        torch.set_num_threads(threads)
    for name, value in states.items():
        value.load_state_dict(stored[name])
    return progress


def _read_state(path: Path, names: set[str]) -> tuple[Progress, int, dict[str, dict]]:
    state = read_json(path, "a checkpoint of postrl")
    try:
        progress, threads, stored = Progress(**state["progress"]), int(state["threads"]), dict(state["states"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no state of a postrl checkpoint ({type(error).__name__}: {error})") from error
    whole = (progress.step, progress.update, progress.constant, progress.evaluated, threads)
    if not all(isinstance(number, int) for number in whole) or threads < 1:
        raise UserError(f"{path} is no state of a postrl checkpoint: {progress}, threads={threads}")
    if state.get("format") != FORMAT:
        raise UserError(f"{path} has format {state.get('format')!r}, but this version of postrl reads {FORMAT}")
    if not names <= set(stored):
        raise UserError(f"{path} belongs to another run: it has the states {sorted(stored)}, not {sorted(names)}")
    return progress, threads, stored


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged or missing ({error}); delete its folder to use an older one") from error


def _match(path: Path, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    wrong = [
        n for n in wanted if n not in saved or saved[n].shape != wanted[n].shape or saved[n].dtype != wanted[n].dtype
    ]
    wrong += [n for n in saved if n not in wanted]
    if wrong:
        raise UserError(f"{path} belongs to another model: {len(wrong)} tensors differ, the first is {wrong[0]!r}")


def _moments(optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Tensor]:
    """Whole moments. Where they are sharded, every process takes part, but only those that `keep` hold the result."""
    moments = {}
    for index, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            whole = value.full_tensor().cpu() if isinstance(value, DTensor) else value
            if keep:
                moments[f"{index}.{name}"] = whole.contiguous()
    return moments


def _restore_moments(path: Path, optimizer: torch.optim.Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in _load(path).items():
        index, _, name = key.partition(".")
        known = index.isdecimal() and int(index) < len(parameters) and name != ""
        if not known or (value.dim() and value.shape != parameters[int(index)].shape):
            raise UserError(f"{path} belongs to another run: {key!r} is no moment of the weights trained here")
        like = parameters[int(index)]
        if value.dim() and isinstance(like, DTensor):
            value = distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
