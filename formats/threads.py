"""A thread pool that works in the caller's thread if no thread can start.

From Python 3.12 on, no thread starts while the interpreter exits, when a background save may still
write files. A system may also refuse a thread at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose `submit` runs the work itself if no thread can start."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Returns the Future of a call, which runs once: in a thread, or before this returns."""
        future: Future[T] = Future()
        taken = Lock()
        """Makes the call run once: the executor queues it before it fails to start a thread."""

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
