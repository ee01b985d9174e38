"""Signals finish a step, a second one ends at once; exhausted memory names the option that lowers it."""

import errno
import signal
import threading

import pytest
import torch

from postrl.errors import UserError
from postrl.interrupt import Interrupt, memory_guard


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_second_ends(number: signal.Signals):
    with Interrupt() as interrupt:
        assert not interrupt.asked
        signal.raise_signal(number)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_handlers_come_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Interrupt():
        assert signal.getsignal(signal.SIGINT) != before[0]
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_other_threads_hear_nothing():
    asked: list[bool] = []

    def work() -> None:
        with Interrupt() as interrupt:
            asked.append(interrupt.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]


def allocate() -> None:
    torch.empty(10**15, dtype=torch.float64)  # far above any machine's memory: the real message of this system


def fail(error: Exception):
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    "work",
    [
        allocate,
        fail(MemoryError()),
        fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
        fail(RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.")),
        fail(RuntimeError("MPS backend out of memory")),
        fail(OSError(errno.ENOMEM, "Cannot allocate memory")),
    ],
)
def test_exhausted_memory_names_the_option(work):
    with pytest.raises(UserError, match=r"out of memory with token_budget=123: lower token_budget"), memory_guard(123):
        work()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.ENOENT, "missing"), ValueError("no")])
def test_other_errors_pass(error: Exception):
    with pytest.raises(type(error), match=str(error).split()[-1]), memory_guard(123):
        raise error
