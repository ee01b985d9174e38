"""Calling foreign code (worlds, rewards), plain or asynchronous, with a time limit, while sampling goes on.

There is one event loop for the whole process, in a thread of its own, so that a client which belongs to an event loop
(an HTTP session of a judge, say) lives from one step to the next.
"""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

X = TypeVar("X")
Job = Callable[[], None]
Inbox = queue.SimpleQueue[Callable[[], Job]]  # of a thread: what to call, which gives how to report it

_idle: "deque[Inbox]" = deque()


class TimedOut(Exception):
    """The call took longer than it was allowed."""


@functools.cache
def background_loop() -> asyncio.AbstractEventLoop:
    """The process's event loop, running in a daemon thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="postrl-foreign", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=background_loop.cache_clear)  # threads do not survive a fork
os.register_at_fork(after_in_child=_idle.clear)


async def call(fn: Callable[[X], Any], argument: X, timeout: float, slots: asyncio.Semaphore) -> Any:
    """`fn(argument)`, awaited if that is what it wants; a plain function runs in a thread.

    timeout: seconds from the moment the call gets one of the `slots`. Raises TimedOut when they run out, and whatever
    `fn` raises; RuntimeError for an attempt to end the process, such as sys.exit(), or to cancel a task that is not its
    own. A thread cannot be stopped: after a time-out it ends by itself, and its answer is not used. A coroutine is
    cancelled; one that blocks without awaiting, or catches its cancellation, holds up all others. Context variables
    (numpy's and decimal's settings are some) are every call's own, but threads are used again: what a call leaves in
    its thread, such as torch's gradient mode, another may find there.
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
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("CancelledError in foreign code") from error
        except TimeoutError as error:
            if clock.expired():
                raise TimedOut from error
            raise  # the function's own


async def _in_thread(fn: Callable[[X], Any], argument: X) -> Any:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result((value, error))

    def work() -> Job:
        value, error = None, None
        try:
            value = contextvars.Context().run(fn, argument)
        except BaseException as raised:  # noqa: BLE001 - handed over to the event loop and raised there
            error = raised
        return functools.partial(_post, loop, deliver, value, error)

    _hand_over(work)
    value, error = await answer
    if error is not None:
        raise error
    return value


def _post(loop: asyncio.AbstractEventLoop, *call: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(*call)


def _hand_over(work: Callable[[], Job]) -> None:
    """Do it in a thread that has nothing to do, or in a new one.

    An executor's pool will not do: a call that hangs would hold one of its places for ever, and the interpreter waits
    for its threads at the end. A new thread for every call costs more than most worlds and rewards do.
    """
    try:
        inbox = _idle.pop()  # the last to come to rest: others may sleep on
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_thread, args=(inbox,), name="postrl-call", daemon=True).start()
    inbox.put(work)


def _thread(inbox: Inbox) -> None:
    process = os.getpid()
    while True:
        report = inbox.get()()
        if os.getpid() != process:  # the call forked, and this is the child at the end of its work
            return
        _idle.append(inbox)  # before the report: who hears it may call at once
        report()
        del report  # it holds the answer
