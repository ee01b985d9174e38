"""Calling foreign code (worlds, rewards), plain or asynchronous, with a time limit, while sampling goes on.

There is one event loop for the whole process, in a thread of its own, so that a client which belongs to an event loop
(an HTTP session of a judge, say) lives from one step to the next.
"""

import asyncio
import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

X = TypeVar("X")


class TimedOut(Exception):
    """The call took longer than it was allowed."""


@functools.cache
def background_loop() -> asyncio.AbstractEventLoop:
    """The process's event loop, running in a daemon thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="postrl-foreign", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=background_loop.cache_clear)  # threads do not survive a fork


async def call(fn: Callable[[X], Any], argument: X, timeout: float, slots: asyncio.Semaphore) -> Any:
    """`fn(argument)`, awaited if that is what it wants; a plain function runs in a thread.

    timeout: seconds from the moment the call gets one of the `slots`. Raises TimedOut when they run out, and whatever
    `fn` raises; RuntimeError for an attempt to end the process, such as sys.exit(). A thread cannot be stopped: after a
    time-out it ends by itself, and its answer is not used.
    """
    async with slots:
        clock = asyncio.timeout(timeout)
        try:
            async with clock:
                value = fn(argument) if inspect.iscoroutinefunction(fn) else await _in_thread(fn, argument)
                return await value if inspect.isawaitable(value) else value
        except (SystemExit, KeyboardInterrupt) as error:
            # An event loop that meets one of these ends, and whoever waits for it would wait for ever.
            raise RuntimeError(f"{type(error).__name__} in foreign code") from error
        except TimeoutError as error:
            if clock.expired():
                raise TimedOut from error
            raise  # the function's own


async def _in_thread(fn: Callable[[X], Any], argument: X) -> Any:
    # A thread per call, not a pool: a call that hangs would hold a pool's place for ever, and a pool's threads are
    # waited for when the interpreter ends.
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = fn(argument)
        except BaseException as raised:  # noqa: BLE001 - handed over to the event loop and raised there
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=work, name="postrl-call", daemon=True).start()
    value, error = await answer
    if error is not None:
        raise error
    return value
