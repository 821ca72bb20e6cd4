"""The one background save of this process, and the calls that have to wait for it.

Rules:

1. At most one save is in flight. A thread that begins another waits for it, or is refused. One
   thread at a time has the turn: from before it reads the state until its save is in flight.
2. The next save raises an error that no caller has seen; otherwise the exit prints it. The caller
   of an interrupted save has seen its error.
3. A normal exit of the interpreter waits for the save in flight, and until the other ranks know its
   result. A forked child has no save in flight.
4. This module imports no torch: calls that only read checkpoints use it too.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ckpt.errors import BackgroundError
from ckpt.stores.store import one_spelling
from sharding.url_secrets import without_secrets


class InFlight(Protocol):
    """The part of a background save that this module needs."""

    url: str

    def finished(self, timeout: float | None = None) -> bool:
        """Whether the save has ended, in success or not, within so many seconds; None waits."""
        ...

    def wait_staged(self, timeout: float | None = None) -> None:
        """Returns once the state is copied and may be changed."""
        ...

    def untold(self) -> Exception | None:
        """Returns the save's error if no caller has seen it, and counts it as seen from now on."""
        ...


_last: InFlight | None = None
_turn: object = None
"""The owner of the turn to begin a save; None if it is free."""
_turns = threading.Condition()
_threads: list[threading.Thread] = []
"""The threads of the last save, and of earlier saves that are still ending."""
_is_watching_exit = False


def begin(save: InFlight, thread: threading.Thread) -> None:
    """Registers a save as the one in flight, before its thread starts. The last one has ended."""
    global _last, _is_watching_exit
    _last = save
    _threads[:] = [*(one for one in _threads if one.is_alive()), thread]
    if not _is_watching_exit:
        _is_watching_exit = True
        _at_exit()


def is_busy() -> bool:
    """Whether a save is in flight."""
    return _last is not None and not _last.finished(0)


def url() -> str:
    """Returns the URL of the last background save."""
    return "" if _last is None else _last.url


def wait() -> None:
    """Returns once no save is in flight. An error of it stays unseen."""
    if _last is not None:
        _last.finished()


def take_turn(who: object) -> bool:
    """Takes the turn if it is free and no save is in flight. Returns whether it did."""
    global _turn
    with _turns:
        if is_busy() or _turn not in (None, who):
            return False
        _turn = who
        return True


def leave_turn(who: object) -> None:
    """Gives up the turn, if `who` has it."""
    global _turn
    with _turns:
        if _turn is who:
            _turn = None
            _turns.notify_all()


def wait_turn() -> None:
    """Returns once no thread has the turn and no save is in flight."""
    with _turns:
        _turns.wait_for(lambda: _turn is None)
    wait()


def raise_untold() -> None:
    """Raises BackgroundError if the last background save failed and its error is unseen."""
    error = None if _last is None else _last.untold()
    if error is not None:
        raise BackgroundError(
            f"{url()}: the save in the background failed, there is no new checkpoint: "
            f"{type(error).__name__}: {error}; this call has saved nothing, call it again"
        ) from error


@contextmanager
def told_by_this_call() -> Iterator[list[InFlight]]:
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


def before_loading(place: str) -> None:
    """Waits until the save in flight has copied its state, or has ended if it is to `place`."""
    save = _last
    if save is not None and threading.current_thread() not in _threads:
        save.wait_staged()
        if _same(place, save.url):
            save.finished()


def _same(one: str, other: str) -> bool:
    return one_spelling(one) == one_spelling(other)


def _finish_at_exit() -> None:
    for thread in _threads:
        if thread.is_alive():
            thread.join()
    error = None if _last is None else _last.untold()
    if error is not None:
        sys.stderr.write(
            f"ckpt: {without_secrets(url())}: the save in the background failed, there is no new "
            f"checkpoint: {type(error).__name__}: {error}\n"
        )


def _at_exit() -> None:
    # Runs before Python shuts threads down, because writing may start one. `atexit` runs later, and
    # in children of multiprocessing not at all.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_finish_at_exit)


def _forget() -> None:
    global _last, _turn, _turns
    _last, _turn, _turns = None, None, threading.Condition()
    _threads.clear()


os.register_at_fork(after_in_child=_forget)
