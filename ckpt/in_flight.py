"""The one save that this process has in the background, and what must not happen meanwhile.

Rules:

1. At most one is in flight. Whoever begins another waits for it, or is refused; of several threads
   one has the turn, from before it looks at the state until its save is in flight.
2. An error that nobody has been told of is raised by the next save, or printed at exit. Who was
   interrupted in the call has been told.
3. A normal exit of the interpreter waits for the save in flight, and for the other ranks to know
   how it ended. A forked child has none.
4. Imports no torch: what only looks into checkpoints asks here as well.
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
    """A save in the background, as others need to know it."""

    url: str

    def finished(self, timeout: float | None = None) -> bool:
        """Whether it is over, well or not, within so many seconds; None waits for it."""
        ...

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when the state has been copied and may be changed."""
        ...

    def untold(self) -> Exception | None:
        """The error it ended with, unless somebody has been told of it. Now somebody is."""
        ...


_last: InFlight | None = None
_turn: object = None
"""Who is about to begin a save; None where nobody is."""
_turns = threading.Condition()
_threads: list[threading.Thread] = []
"""That do the last save, and perhaps leave an earlier one."""
_is_watching_exit = False


def begin(save: InFlight, thread: threading.Thread) -> None:
    """From now on this one is in flight, in a thread that is to be started; the last is over."""
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
    """The place of the last save in the background."""
    return "" if _last is None else _last.url


def wait() -> None:
    """Return when no save is in flight; its error stays untold."""
    if _last is not None:
        _last.finished()


def take_turn(who: object) -> bool:
    """Whether no save is in flight, and none by another begins before `leave_turn`."""
    global _turn
    with _turns:
        if is_busy() or _turn not in (None, who):
            return False
        _turn = who
        return True


def leave_turn(who: object) -> None:
    """Let others begin a save, if it was this one's turn."""
    global _turn
    with _turns:
        if _turn is who:
            _turn = None
            _turns.notify_all()


def wait_turn() -> None:
    """Return when no save was in flight and none about to begin, in other threads."""
    with _turns:
        _turns.wait_for(lambda: _turn is None)
    wait()


def raise_untold() -> None:
    """Raise BackgroundError if the last save in the background failed and nobody was told."""
    error = None if _last is None else _last.untold()
    if error is not None:
        raise BackgroundError(
            f"{url()}: the save in the background failed, there is no new checkpoint: "
            f"{type(error).__name__}: {error}; this call has saved nothing, call it again"
        ) from error


@contextmanager
def told_by_this_call() -> Iterator[list[InFlight]]:
    """Inside, what ends the call is all that its caller is told of the saves in the list.

    An interrupt ends a call whose save fails for that, or goes on without anybody's handle.
    """
    begun: list[InFlight] = []
    try:
        yield begun
    except BaseException:
        for save in begun:
            save.untold()
        raise


def before_loading(place: str) -> None:
    """Return when loading from a place neither misses a save in flight nor disturbs its copies."""
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
    # Before threads are shut down: writing may need some. `atexit` comes after that, and not at
    # all in children of multiprocessing.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_finish_at_exit)


def _forget() -> None:
    global _last, _turn, _turns
    _last, _turn, _turns = None, None, threading.Condition()
    _threads.clear()


os.register_at_fork(after_in_child=_forget)
