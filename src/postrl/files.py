"""Files that are either whole or not there: written beside their place, flushed to disk, then renamed."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path

from postrl.errors import UserError


def as_fields(record: object) -> dict[str, object]:
    """For `json.dumps(…, default=as_fields)`: a dataclass as its fields, without the copies that `asdict` makes."""
    if not is_dataclass(record):
        raise TypeError(f"{type(record).__name__} is neither plain JSON nor a dataclass of it")
    return {field.name: getattr(record, field.name) for field in fields(record)}


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to; on success it becomes `path`, on failure it is removed and `path` is as it was.

    Raises UserError if the disk is full or the place cannot be written to.
    """
    beside = path.with_name(f".{path.name}.part")
    with _disk(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield beside
            _flush(beside)
            beside.replace(path)
            _flush(path.parent)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """The same for a folder; a folder already at `path` is replaced."""
    beside = path.with_name(f".{path.name}.part")
    with _disk(path):
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            yield beside
            for file in beside.rglob("*"):
                _flush(file)
            _flush(beside)
            if path.exists():
                shutil.rmtree(path)
            beside.rename(path)
            _flush(path.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def write_json(path: Path, value: object) -> None:
    with whole_file(path) as beside:
        beside.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path, what: str) -> dict:
    """The JSON object in a file. Raises UserError naming the file if it is missing, damaged or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing, so this is not {what}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as {what} ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} cannot be read as {what}: it holds no JSON object")
    return value


def read_jsonl(path: Path, what: str) -> Iterator[Mapping[str, object]]:
    """The JSON objects of a file, one a line, blank lines left out. Raises UserError naming the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028 inside a string
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}); give a JSONL file of {what}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: not a JSON object; give {what}")
        yield row


def guarded(action: Callable[[], None], path: Path) -> None:
    """Run a write, with a full or closed disk turned into a UserError that names the file."""
    with _disk(path):
        action()


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if no_space(error):
            raise UserError(f"the disk is full: {path} was not written; free some space and run it again") from error
        if isinstance(error, OSError):
            raise UserError(f"{path} cannot be written ({error}); choose another folder or repair this one") from error
        raise


def no_space(error: BaseException) -> bool:
    """A full disk, also as safetensors and pyarrow report it (in the message, without errno)."""
    return (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or (
        "No space left on device" in str(error) or "os error 28" in str(error)
    )


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
