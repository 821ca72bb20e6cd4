"""The background saves of this process, and the calls that have to wait for them.

Rules:

1. A queue has at most one save in flight. A thread that begins another waits for it, or is refused.
   One thread at a time has the turn: from before it reads the state until its save is in flight.
   All saves to stores have one queue, and each live state has one. No queue waits for another.
2. The next save raises an error that no caller has seen; otherwise the exit prints it. The caller
   of an interrupted save has seen its error.
3. A normal exit of the interpreter waits for saves in flight, and until the other ranks know their
   results. A forked child has no save in flight.
4. This module imports no torch: calls that only read checkpoints use it too.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol
from weakref import WeakSet

from ckpt.arguments import WhenBusy
from ckpt.errors import BackgroundError, BusyError
from ckpt.stores.store import one_spelling
from sharding.errors import without_secrets


class InFlight(Protocol):
    """The part of a background save that this module needs."""

    url: str

    def finished(self, timeout: float | None = None) -> bool:
        """Whether the save has ended, in success or not, within so many seconds; None waits."""

    def wait_staged(self, timeout: float | None = None) -> None:
        """Returns once the state is copied and may be changed."""

    def untold(self) -> Exception | None:
        """Returns the save's error if no caller has seen it, and counts it as seen from now on."""

    def warn_untold(self, stacklevel: int = 2) -> None:
        """Gives a warning of the save that no caller has seen."""


class SaveQueue:
    """The saves that follow one another: the last of them, and the turn to begin the next."""

    def __init__(self) -> None:
        self._forget()
        _queues.add(self)

    def _forget(self) -> None:
        self._last: InFlight | None = None
        self._turn: object = None
        """The owner of the turn to begin a save; None if it is free."""
        self._turns = threading.Condition()
        self._threads: list[threading.Thread] = []
        """The threads of the last save, and of earlier saves that are still ending."""

    def begin(self, save: InFlight, thread: threading.Thread) -> None:
        """Registers a save as the one in flight, before its thread starts. The last has ended."""
        self._last = save
        self._threads[:] = [*(live for live in self._threads if live.is_alive()), thread]
        _watch_exit()

    def is_busy(self) -> bool:
        return self._last is not None and not self._last.finished(0)

    def url(self) -> str:
        """Returns the URL of the last background save."""
        return "" if self._last is None else self._last.url

    def wait(self) -> None:
        """Returns once no save is in flight. An error of it stays unseen."""
        if self._last is not None:
            self._last.finished()

    def take_turn(self, who: object) -> bool:
        """Takes the turn if it is free and no save is in flight. Returns whether it did."""
        with self._turns:
            if self.is_busy() or self._turn not in (None, who):
                return False
            self._turn = who
            return True

    def leave_turn(self, who: object) -> None:
        """Gives up the turn, if `who` has it."""
        with self._turns:
            if self._turn is who:
                self._turn = None
                self._turns.notify_all()

    def wait_turn(self) -> None:
        """Returns once no thread has the turn and no save is in flight."""
        with self._turns:
            self._turns.wait_for(lambda: self._turn is None)
        self.wait()

    def check_free(self, when_busy: WhenBusy, turn: ExitStack | None, alone: bool) -> None:
        """Raises if this rank cannot save now; a background save has the queue's turn in `turn`.

        Another thread may have begun a save since this one waited. Several ranks do not wait for
        it here: each could wait for a save that another rank's threads are about to begin.
        """
        if turn is not None:
            for _ in range(2):  # an interrupt may come while the turn is given up
                turn.callback(self.leave_turn, turn)
        while self.is_busy() if turn is None else not self.take_turn(turn):
            if when_busy == "refuse" or not alone:
                what = self.url() if self.is_busy() else "another thread's checkpoint"
                todo = 'pass when_busy="wait"' if when_busy == "refuse" else "save from one thread"
                raise BusyError(
                    f"{what} is still being saved; nothing else was saved. Wait for it with its "
                    f"handle, or {todo}"
                )
            self.wait() if turn is None else self.wait_turn()
        self.raise_untold()

    def raise_untold(self) -> None:
        """Raises BackgroundError if the last background save failed and its error is unseen."""
        error = None if self._last is None else self._last.untold()
        if self._last is not None:
            self._last.warn_untold(stacklevel=4)
        if error is not None:
            raise BackgroundError(
                f"{self.url()}: the save in the background failed, there is no new checkpoint: "
                f"{type(error).__name__}: {error}; this call has saved nothing, call it again"
            ) from error

    def before_loading(self, place: str) -> None:
        """Waits until the save in flight has copied its state, or has ended if it is to `place`."""
        save = self._last
        if save is not None and threading.current_thread() not in self._threads:
            save.wait_staged()
            if _same(place, save.url):
                save.finished()

    def _finish_at_exit(self) -> None:
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        error = None if self._last is None else self._last.untold()
        if error is not None:
            sys.stderr.write(
                f"ckpt: {without_secrets(self.url())}: the save in the background failed, there is "
                f"no new checkpoint: {type(error).__name__}: {error}\n"
            )
        if self._last is not None:
            self._last.warn_untold()


_queues: WeakSet[SaveQueue] = WeakSet()
_is_watching_exit = False
saves = SaveQueue()
"""The saves to stores."""


@contextmanager
def mark_errors_seen() -> Iterator[list[InFlight]]:
    """Counts errors of the saves in the list as seen if an exception ends the block.

    An interrupt ends a call before its caller gets a handle of the save.
    """
    begun: list[InFlight] = []
    try:
        yield begun
    except BaseException:
        for save in begun:
            save.untold()
        raise


def _same(one: str, other: str) -> bool:
    return one_spelling(one) == one_spelling(other)


def _watch_exit() -> None:
    # Runs before Python shuts threads down, because writing may start one. `atexit` runs later, and
    # in children of multiprocessing not at all.
    global _is_watching_exit
    if not _is_watching_exit:
        _is_watching_exit = True
        register = getattr(threading, "_register_atexit", atexit.register)
        register(_finish_at_exit)


def _finish_at_exit() -> None:
    for queue in tuple(_queues):
        queue._finish_at_exit()


def _forget() -> None:
    for queue in tuple(_queues):
        queue._forget()


os.register_at_fork(after_in_child=_forget)
