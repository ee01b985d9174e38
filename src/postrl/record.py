"""What a run leaves behind: `run.json`, `metrics.jsonl`, and its rollouts as Parquet, one row per rollout."""

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from postrl.batch import Batch
from postrl.errors import UserError
from postrl.files import guarded, read_json, whole_file, write_json
from postrl.rollout import Rollout

PACKAGES = ("postrl", "torch", "transformers", "tokenizers", "safetensors", "accelerate", "numpy")


def open_run(folder: Path, configuration: Mapping[str, object], resume: bool, free: frozenset[str]) -> None:
    """Start a run in `folder` or check that it is the one to go on with.

    A resumed run must have the same configuration, but for the options in `free`. Raises UserError if the folder
    already holds a run (resume=False), holds none (resume=True), or an option differs.
    """
    path = folder / "run.json"
    if not resume:
        if any((folder / name).exists() for name in ("run.json", "metrics.jsonl", "checkpoints", "rollouts")):
            raise UserError(f"{folder} already holds a run: add --resume to go on with it, or choose another folder")
        write_json(path, {"configuration": configuration, **_surroundings()})
        return
    if not path.is_file():
        raise UserError(f"{folder} holds no run to go on with: leave --resume away to start one, or name its folder")
    old = read_run(folder, "a run to resume")["configuration"]
    now = json.loads(json.dumps(configuration))
    for name in sorted(set(old) | set(now)):
        if name not in free and old.get(name) != now.get(name):
            raise UserError(
                f"{folder} was run with {name}={old.get(name)!r}, not {now.get(name)!r}: resume with the same options"
            )


def read_run(folder: Path, what: str = "a run") -> dict:
    """`run.json` of a folder, with its configuration. Raises UserError naming the file if it is not `what`."""
    path = folder / "run.json"
    about = read_json(path, what)
    if not isinstance(about.get("configuration"), dict):
        raise UserError(f"{path} cannot be read as {what}: it has no configuration")
    return about


def take_back(folder: Path) -> None:
    """Undo `open_run` if no step was recorded since, so that the corrected command can use the folder."""
    if not any((folder / name).exists() for name in ("checkpoints", "rollouts")):
        (folder / "metrics.jsonl").unlink()
        (folder / "run.json").unlink()


def _surroundings() -> dict[str, object]:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if _installed(name)}
    return {
        "command": sys.argv,
        "git": _git_hash(),
        "versions": versions | {"python": platform.python_version()},
        "machine": {"platform": platform.platform(), "processor": platform.processor() or platform.machine()},
        "threads": torch.get_num_threads(),
    }


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _git_hash() -> str | None:
    """Of the folder the run was started in; None where there is no git or no repository."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


class Metrics:
    """`metrics.jsonl`: one JSON object a line, in order of steps."""

    def __init__(self, folder: Path, step: int, evaluated: int, writes: bool = True):
        """Lines of steps above `step` (steps done) and evaluations of steps above `evaluated` are dropped: they will be
        made again. One that does not write leaves the file to another process."""
        self.path, self.writes = folder / "metrics.jsonl", writes
        if not writes:
            return
        lines = read_metrics(self.path) if self.path.exists() else []
        kept = [m for m in lines if m["step"] <= (evaluated if "evaluation" in m else step)]
        with whole_file(self.path) as beside:
            beside.write_text("".join(json.dumps(m) + "\n" for m in kept), encoding="utf-8")

    def write(self, line: Mapping[str, object]) -> None:
        if self.writes:
            guarded(lambda: self._append(json.dumps(line) + "\n"), self.path)

    def _append(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


def read_metrics(path: Path) -> list[dict]:
    """Lines of a `metrics.jsonl`; a last line cut off by a kill is left out. Raises UserError if it is missing."""
    if not path.exists():
        raise UserError(f"{path} is missing: {path.parent} holds no run")
    lines = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    whole = []
    for number, line in enumerate(lines, 1):
        try:
            figures = json.loads(line)
            whole.append({**figures, "step": int(figures["step"])})
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise UserError(f"{path}, line {number}, is no line of metrics ({error!r})") from error
    return whole


def write_rollouts(
    path: Path, rollouts: Sequence[Rollout], batch: Batch, advantage: Tensor, weight: Tensor, ratio: Tensor
) -> None:
    """One row per rollout. List columns run over its tokens, contexts one after the other (`context` numbers them);
    advantage, weight and ratio [B, T] are those of the step, weight summed over terms, ratio at the last update."""
    order = torch.argsort(batch.unit, stable=True)
    unit, real = batch.unit[order], batch.valid[order]
    rows = torch.bincount(unit, minlength=batch.size)
    context = torch.arange(len(unit), device=unit.device) - (rows.cumsum(0) - rows)[unit]
    lengths = torch.zeros_like(rows).index_add(0, unit, real.sum(1))
    ends = [0, *lengths.cumsum(0).tolist()]
    columns = {
        "tokens": batch.tokens,
        "mask": batch.mask,
        "segment": batch.segment,
        "logp_sampler": batch.logp_sampler,
        "logp_old": batch.logp_old,
        "advantage": advantage,
        "weight": weight,
        "ratio": ratio,
    }
    flat = {name: value[order][real] for name, value in columns.items()}
    flat["context"] = context[:, None].expand_as(real)[real]
    table = pa.table(_plain_columns(rollouts) | {name: _lists(value, ends) for name, value in flat.items()})
    with whole_file(path) as beside:
        pq.write_table(table, beside, compression="zstd")


def _lists(values: Tensor, ends: list[int]) -> pa.Array:
    """One list per rollout; integers as int32, real numbers as float32."""
    kind = torch.float32 if values.is_floating_point() else torch.bool if values.dtype == torch.bool else torch.int32
    plain = values.to(kind)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(plain.cpu().numpy()))


def _plain_columns(rollouts: Sequence[Rollout]) -> dict[str, pa.Array]:
    columns = {
        "item": pa.array([r.item for r in rollouts]),
        "group": pa.array([r.group for r in rollouts]),
        "sample": pa.array([r.sample for r in rollouts]),
        "version": pa.array([r.version for r in rollouts]),
        "stop": pa.array([r.stop.name.lower() for r in rollouts]),
        "messages": pa.array([json.dumps(r.messages, ensure_ascii=False) for r in rollouts]),
        "completion": pa.array([r.completion for r in rollouts]),
    }
    names = rollouts[0].rewards if rollouts else ()
    return columns | {f"reward/{n}": pa.array([r.rewards[n] for r in rollouts], pa.float64()) for n in names}
