"""The arena and the writer process that background saves share.

All saves to stores share one workplace. Each live state has one of its own, and two arenas in turn.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress

from ckpt.background import device_copies
from ckpt.background.arena import Arena
from ckpt.background.writers import WriterProcess


class Workplace:
    """The arena, and the process that writes from it."""

    def __init__(self, arena: Arena | None = None) -> None:
        self.arena = arena or new_arena()
        self._writer: WriterProcess | None = None
        self._preparing: threading.Thread | None = None
        atexit.register(self.close)

    def writer(self) -> WriterProcess:
        """Returns the writer process, started anew if there is none."""
        if self._writer is not None and not self._writer.is_running:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = WriterProcess(self.arena)
        return self._writer

    def reserve(self, nbytes: int) -> memoryview:
        """Returns the arena's memory for so many bytes, once preparations have ended."""
        self.wait_prepared()
        return self.arena.reserve(nbytes)

    def prepare(self, nbytes: int, workers: int, for_cuda: bool) -> None:
        """Reserves so many bytes; another thread touches them and starts a writer.

        `workers` threads touch the bytes; `for_cuda` also page-locks them. Called while no save
        uses the arena.
        """
        data = self.reserve(nbytes)

        def work() -> None:
            with suppress(OSError, RuntimeError):  # the save tries again, and tells of the error
                self.arena.touch(workers)
                self.writer()
                if for_cuda:
                    device_copies.page_lock(data)

        thread = threading.Thread(target=work, name="ckpt-prepare", daemon=True)
        with suppress(RuntimeError):  # no thread can be started: the interpreter may be ending
            thread.start()
            self._preparing = thread

    def wait_prepared(self) -> None:
        """Returns once preparations have ended."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def use(self, arena: Arena) -> None:
        """Stages the next saves in another arena."""
        self.wait_prepared()
        self.arena = arena

    def close(self) -> None:
        """Ends the writer, and waits for its end."""
        self.wait_prepared()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def new_arena(is_sealed: bool = False) -> Arena:
    """Returns an arena that copies from devices can use; `is_sealed` as for `Arena`."""
    return Arena(before_remapping=device_copies.release, is_sealed=is_sealed)


_workplace: Workplace | None = None


def workplace() -> Workplace:
    """Returns the workplace of this process; a forked child makes its own."""
    global _workplace
    if _workplace is None:
        _workplace = Workplace()
        os.register_at_fork(after_in_child=_leave_it_to_the_parent)
    return _workplace


def _leave_it_to_the_parent() -> None:
    global _workplace
    if _workplace is not None:
        atexit.unregister(_workplace.close)
    _workplace = None
