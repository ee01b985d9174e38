"""Files and folders are whole or not there; a full or closed disk is one sentence that names the file."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from postrl.errors import UserError
from postrl.files import guarded, no_space, read_json, whole_file, whole_folder, write_json


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_whole_file(tmp_path: Path):
    path = tmp_path / "deeper" / "file.txt"
    with whole_file(path) as beside:
        beside.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new" and everything(tmp_path) == ["deeper", "deeper/file.txt"]


def test_failure_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), whole_file(path) as beside:
        beside.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and everything(tmp_path) == ["file.txt"]


def test_failure_leaves_the_old_folder(tmp_path: Path):
    path = tmp_path / "folder"
    for text in ("first", "second"):
        with whole_folder(path) as beside:
            (beside / "file").write_text(text)
    with pytest.raises(ZeroDivisionError), whole_folder(path) as beside:
        (beside / "file").write_text("half")
        raise ZeroDivisionError
    assert (path / "file").read_text() == "second" and everything(tmp_path) == ["folder", "folder/file"]


def test_leftovers_of_a_kill_are_replaced(tmp_path: Path):
    (tmp_path / ".file.part").write_text("half of a longer text")
    (tmp_path / ".folder.part").mkdir()
    (tmp_path / ".folder.part" / "stale").touch()
    with whole_file(tmp_path / "file") as beside:
        beside.write_text("new")
    with whole_folder(tmp_path / "folder") as beside:
        (beside / "fresh").touch()
    assert everything(tmp_path) == ["file", "folder", "folder/fresh"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("writer", [whole_file, whole_folder])
def test_full_disk_names_the_file(writer, error: Exception, tmp_path: Path):
    with pytest.raises(UserError, match=r"disk is full: .*target was not written"), writer(tmp_path / "target"):
        raise error
    assert everything(tmp_path) == []


def test_full_disk_while_appending(tmp_path: Path):
    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"disk is full: .*lines\.jsonl"):
        guarded(write, tmp_path / "lines.jsonl")


def test_other_failures_are_not_called_a_full_disk():
    assert not no_space(OSError(errno.EACCES, "Permission denied")) and not no_space(ValueError("damaged"))


def test_place_that_cannot_be_written_to_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/run\.json cannot be written"):
        write_json(tmp_path / "file" / "run.json", {})


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 kB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    tried = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if tried.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {tried.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_really_full_disk(tiny_disk: Path):
    write_json(tiny_disk / "small.json", {"fits": True})
    with pytest.raises(UserError, match=r"disk is full: .*large\.json"):
        write_json(tiny_disk / "large.json", {"text": "x" * 100_000})
    assert everything(tiny_disk) == ["small.json"]
    write_json(tiny_disk / "small.json", {"fits": "still"})


def test_read_json(tmp_path: Path):
    path = tmp_path / "a.json"
    with pytest.raises(UserError, match=r"a\.json is missing, so this is not a thing"):
        read_json(path, "a thing")
    write_json(path, {"é": 1})
    assert read_json(path, "a thing") == {"é": 1}
    for damaged in ('{"a": 1', "", "[1, 2]", "\x00\x00"):
        path.write_text(damaged)
        with pytest.raises(UserError, match=r"a\.json cannot be read as a thing"):
            read_json(path, "a thing")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"a\.json cannot be read as a thing"):
        read_json(path, "a thing")
