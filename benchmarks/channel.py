"""Two processes in step: the parent says go, the worker does one lap of its work and reports it.

Standard library only, so that a worker may run in another environment. Messages are lines of JSON.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

PATIENCE = 3600.0  # seconds for one lap


class WorkerError(Exception):
    """A worker ended, or took too long; the message holds the end of its log."""


class Laps:
    """The worker's end. The time from a go to the next call of `lap` is one lap; its facts come with that call.

    Both clocks are reported: processor time of all threads tells what was done where something else ran, too.

    Workers print what they like: everything but the reports goes to their standard error.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._start: tuple[float, float] | None = None  # on the wall and of this process

    def lap(self, **facts: object) -> None:
        """Report the lap that ends here (the first call: that the worker is ready) and wait for the next one."""
        end = _clocks()
        report: dict[str, object] = {"peak_bytes": peak_bytes(), **facts}
        if self._start is not None:
            report["seconds"], report["cpu_seconds"] = (b - a for a, b in zip(self._start, end, strict=True))
        self._out.write(json.dumps(report) + "\n")
        self._out.flush()
        if not sys.stdin.readline():
            os._exit(0)  # the parent has gone or has all it wants: nothing is to be saved
        self._start = _clocks()


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def peak_bytes() -> int | None:
    """High-water mark of this process's resident memory; None where the system does not tell it."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return None


class Worker:
    """The parent's end of a process that runs `command`. Raises WorkerError if it is not ready within `patience` s."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str], log: Path, patience: float = PATIENCE
    ) -> None:
        self.log, self.patience = log, patience
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=dict(environment), text=True
            )
        self.ready = self._read()

    def lap(self) -> dict:
        """One lap; its report."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended before its lap") from None
        return self._read()

    def stop(self) -> None:
        """Ended at once: what it trained is of no use to anybody."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self.patience):
                self.stop()
                raise self._failure(f"gave no answer in {self.patience:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise self._failure(f"ended with exit status {code}")
        return json.loads(line)

    def _failure(self, what: str) -> WorkerError:
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        return WorkerError(f"the worker of {self.log.stem} {what}; the end of {self.log}:\n{tail}")
