"""A process that keeps its memory does not ask the system for it again."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from postrl import memory

COUNT = """
import resource, sys, torch
from postrl.memory import keep_memory
if sys.argv[1] == "keep":
    assert keep_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**23)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_large_tensors_get_their_pages_once() -> None:
    found = {}
    for how in ("keep", "not"):
        done = subprocess.run(
            [sys.executable, "-c", COUNT, how],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(memory.__file__).parent.parent,
        )
        found[how] = int(done.stdout)
    assert found["keep"] < 100 < 1000 < found["not"], found


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: pytest.fail("called"))
    assert not memory.keep_memory()
