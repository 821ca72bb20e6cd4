"""Notes signals that announce the end of a job; the run reacts to them at a step.

A handler only notes the signal: Python runs the handler between two instructions of the main
thread, where no rank may communicate. The previous handler is called as well, unless it is Python's
or the system's own, which would end the process before the state is saved.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from sharding.errors import MisuseError


class PreemptionSignals:
    """Notes the given signals until `close`."""

    def __init__(self, signals: Sequence[int]) -> None:
        """Raises MisuseError in a thread that is not the main one, if there are signals."""
        self.received: int | None = None
        """The number of the first signal that has come."""
        self._before: dict[int, Any] = {}
        if signals and threading.current_thread() is not threading.main_thread():
            raise MisuseError(
                "Checkpointer(signals=...) handles signals, which only the main thread may do: "
                "make it in the main thread, or pass signals=()"
            )
        for number in signals:
            self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Restores the previous handlers of the signals."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
