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

from sharding.errors import ArgumentError, MisuseError


class PreemptionSignals:
    """Notes the given signals until `close`."""

    def __init__(self, signals: Sequence[int]) -> None:
        """Raises MisuseError in another thread than the main one, ArgumentError for no signal."""
        self.received: int | None = None
        """The number of the first signal that has come."""
        self._before: dict[int, Any] = {}
        self._is_closed = False
        if signals and threading.current_thread() is not threading.main_thread():
            raise MisuseError(
                "Checkpointer(signals=...) handles signals, which only the main thread may do: "
                "make it in the main thread, or pass signals=()"
            )
        for number in dict.fromkeys(signals):
            try:
                self._before[number] = signal.signal(number, self._note)
            except (OSError, TypeError, ValueError) as error:
                self.close()
                raise ArgumentError(
                    f"signals has {number!r}, which no program can handle: {error}"
                ) from None

    def close(self) -> None:
        """Restores the previous handlers; not those that a closed object has set."""
        self._is_closed = True
        for number in self._before:
            handler = signal.getsignal(number)
            if handler == self._note:
                while (
                    isinstance(owner := getattr(handler, "__self__", None), PreemptionSignals)
                    and owner._is_closed
                ):
                    handler = owner._before[number]
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
