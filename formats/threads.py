"""Threads that do work beside the caller, and the caller in their place where none can start.

From Python 3.12 on no thread starts once the interpreter ends, when a save in the background may
still have files to write. A system may also refuse a thread at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose `submit` runs the work itself where no thread can start."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """A Future of the call, which takes place once: in a thread, or before this returns."""
        future: Future[T] = Future()
        taken = Lock()
        """The executor queues the work before it starts a thread, so both may find it."""

        def run() -> None:
            if not taken.acquire(blocking=False) or not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        try:
            super().submit(run)
        except RuntimeError:
            run()
        return future
