"""Hugging Face folders: safetensors, one file or several with an index, written atomically and read bit for bit."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from postrl import files
from postrl.errors import UserError
from postrl.files import whole_file, write_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NOT_COPIED = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def cache() -> Path:
    """Where converted models and measurements are kept: $XDG_CACHE_HOME/postrl, else ~/.cache/postrl."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "postrl"


def read_json(path: Path) -> dict:
    """Raises UserError naming a file that is absent, damaged or no JSON object."""
    return files.read_json(path, "a Hugging Face model folder")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder in its stored type. Raises UserError naming the file that is absent or damaged."""
    tensors: dict[str, Tensor] = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    tensors[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read ({error}); download or save the model again") from error
    return tensors


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        shards = read_json(folder / INDEX).get("weight_map", {})
        return [folder / name for name in sorted(set(shards.values()))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise UserError(f"{folder} has no {SINGLE} or {INDEX}; only safetensors checkpoints are read")


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """One file, or numbered files of at most `shard_bytes` each (a larger tensor alone) with an index."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor.detach().contiguous()
        room -= size
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = [SINGLE] if len(shards) == 1 else names
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, lambda path, shard=shard: save_file(shard, path, metadata={"format": "pt"}))
    if len(shards) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    for old in [*folder.glob("model*.safetensors"), *([folder / INDEX] if len(shards) == 1 else [])]:
        if old.name not in names:  # of an earlier save with another number of shards; a reader prefers the index
            old.unlink(missing_ok=True)


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """`write(temporary)` and then a rename: a reader sees the old file or the new one, never half of one."""
    with whole_file(path) as temporary:
        write(temporary)


def copy_rest(source: Path, target: Path) -> None:
    """Tokenizer, chat template, generation config and whatever else stands beside the weights."""
    if source.resolve() == target.resolve():
        return
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(NOT_COPIED) and not file.name.startswith("."):
            write_file(target / file.name, lambda path, file=file: shutil.copyfile(file, path))


def storage(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The floating-point type most of the values are stored in."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])
