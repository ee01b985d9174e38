"""Signals and exhausted memory, turned into orderly ends."""

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

import torch

from postrl.errors import UserError


class Interrupt:
    """Inside `with`, the first SIGINT or SIGTERM sets `asked`; a second one ends the program at once.

    Only the main thread can hear signals; elsewhere `asked` stays False.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._hear)
            except ValueError:  # not the main thread
                return self
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def memory_guard(token_budget: int) -> Iterator[None]:
    """Exhausted memory becomes a UserError that names the option which lowers it."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not exhausted(error):
            raise
        raise UserError(
            f"out of memory with token_budget={token_budget}: lower token_budget (it does not change the updates), "
            "or groups_per_step"
        ) from error


def exhausted(error: BaseException) -> bool:
    """torch's CPU allocator reports exhaustion as a plain RuntimeError, worded differently on each system."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("not enough memory", "can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(w in str(error).lower() for w in words)
