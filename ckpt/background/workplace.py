"""What all saves in the background share: the arena, and the process that writes from it."""

from __future__ import annotations

import atexit
import os

from ckpt.background import device_copies
from ckpt.writing.arena import Arena
from ckpt.writing.writers import WriterProcess


class Workplace:
    """What saves in the background share: the arena, and the process that writes from it."""

    def __init__(self) -> None:
        self.arena = Arena(before_remapping=device_copies.release)
        self._writer: WriterProcess | None = None
        atexit.register(self.close)

    def writer(self) -> WriterProcess:
        """The process, started anew if there is none."""
        if self._writer is None or not self._writer.is_running:
            self._writer = WriterProcess(self.arena)
        return self._writer

    def close(self) -> None:
        """Let the writer end, and wait for it."""
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
