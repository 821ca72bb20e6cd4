"""What all saves in the background share: the arena, and the process that writes from it."""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress

from ckpt.background import device_copies
from ckpt.background.arena import Arena
from ckpt.background.writers import WriterProcess


class Workplace:
    """What saves in the background share: the arena, and the process that writes from it."""

    def __init__(self) -> None:
        self.arena = Arena(before_remapping=device_copies.release)
        self._writer: WriterProcess | None = None
        self._preparing: threading.Thread | None = None
        atexit.register(self.close)

    def writer(self) -> WriterProcess:
        """The process, started anew if there is none."""
        if self._writer is None or not self._writer.is_running:
            self._writer = WriterProcess(self.arena)
        return self._writer

    def reserve(self, nbytes: int) -> memoryview:
        """The arena's memory for so many bytes, once what was to be prepared is."""
        self.wait_prepared()
        return self.arena.reserve(nbytes)

    def prepare(self, nbytes: int, workers: int, for_cuda: bool) -> None:
        """Reserve so many bytes; a thread touches them, by `workers` at once, and starts a writer.

        `for_cuda` also page-locks them. To be called while no save uses the arena.
        """
        data = self.reserve(nbytes)

        def work() -> None:
            with suppress(OSError, RuntimeError):  # then the save does it, or says why it cannot
                self.arena.touch(workers)
                self.writer()
                if for_cuda:
                    device_copies.page_lock(data)

        thread = threading.Thread(target=work, name="ckpt-prepare", daemon=True)
        with suppress(RuntimeError):  # no thread can be started, as when the interpreter ends
            thread.start()
            self._preparing = thread

    def wait_prepared(self) -> None:
        """Return when nothing is being prepared any more."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def close(self) -> None:
        """Let the writer end, and wait for it."""
        self.wait_prepared()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


_workplace: Workplace | None = None


def workplace() -> Workplace:
    """That of this process; a forked child makes its own."""
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
