"""Notes signals that announce the end of a job; the run reacts to them at a step.

A handler only notes the signal: Python runs the handler between two instructions of the main
thread, where no rank may communicate. Rules:

1. The previous handler is called as well, unless it is Python's or the system's own, which would
   end the process before the state is saved.
2. `end` lets Python's or the system's own handler have the signal after all: a loop that never asks
   about the signal ends by it, once its step is saved.
3. The same signal again ends the process at once. A scheduler and torchrun may each send one
   to the ranks for one event, so signals within `SAME_SECONDS` are the same.
4. A forked child has the handlers of before: a worker has no step at which it could react, and its
   parent may wait for its end.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from sharding.errors import ArgumentError, MisuseError

SAME_SECONDS = 1.0
"""Signals of one number within this time announce one event."""
HARMLESS = (signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH)
"""Signals that the system ignores by default."""
_live: weakref.WeakSet[PreemptionSignals] = weakref.WeakSet()


class PreemptionSignals:
    """Notes the given signals until `close`."""

    def __init__(self, signals: Sequence[int]) -> None:
        """Raises MisuseError in another thread than the main one, ArgumentError for no signal."""
        self.received: int | None = None
        """The number of the first signal that has come."""
        self._received_at = 0.0
        self._before: dict[int, Any] = {}
        self._is_closed = False
        if signals and threading.current_thread() is not threading.main_thread():
            raise MisuseError(
                "Checkpointer(signals=...) handles signals, which only the main thread may do: "
                "make it in the main thread, or pass signals=()"
            )
        _live.add(self)
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

    def ends_process(self, number: int) -> bool:
        """Whether a signal ends the process, or raises KeyboardInterrupt, without this object."""
        return _ends_process(number, self._before_all(number))

    def end(self, number: int) -> None:
        """Lets the handler of before have a signal that ends the process."""
        before = self._before_all(number)
        self.close()
        if _ends_process(number, before):
            signal.signal(number, before)
            signal.raise_signal(number)

    def _before_all(self, number: int) -> Any:
        """Returns the handler from before this object, and before others that it has replaced."""
        handler = self._before.get(number)
        while isinstance(owner := getattr(handler, "__self__", None), PreemptionSignals):
            handler = owner._before[number]
        return handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = number, now
        elif number == self.received and now - self._received_at >= SAME_SECONDS:
            self.end(number)
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def _ends_process(number: int, handler: Any) -> bool:
    if handler is signal.default_int_handler:
        return True
    return handler is signal.SIG_DFL and number not in HARMLESS


def _close_in_child() -> None:
    for each in list(_live):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
