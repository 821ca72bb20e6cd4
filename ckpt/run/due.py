"""When a run saves: its schedule and the signals of its processes, as all ranks agree.

Rules:

1. Other ranks learn of a rank's clock, its signals and the end of its last save only in an
   exchange. Exchanges take place at steps that all ranks know beforehand, about once in
   `EXCHANGE_SECONDS`, so that the steps between them cost nothing.
2. A signal makes the step of its exchange due, and the step after it asks whether the loop ends.

[Note: signals]
A signal announces the end of a job, and the run reacts to it at a step. A handler only notes the
signal: Python runs the handler between two instructions of the main thread, where no rank may
communicate. Rules:

1. The previous handler is called as well, unless it is Python's or the system's own, which would
   end the process before the state is saved.
2. `end` lets Python's or the system's own handler have the signal after all: a loop that never asks
   about the signal ends by it, once its step is saved.
3. The same signal again ends the process at once. A scheduler and torchrun may each send one to the
   ranks for one event, so signals within `SAME_SECONDS` are the same.
4. A forked child has the handlers of before: a worker has no step at which it could react, and its
   parent may wait for its end.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ckpt.run.exchange import RunRanks
from ckpt.run.policy import check_seconds
from ckpt.run.saves import RunSaves
from sharding.errors import ArgumentError, MisuseError

EXCHANGE_SECONDS = 1.0
"""The approximate time between two exchanges: a signal is noticed that late."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rules by which a checkpoint is due. Raises ArgumentError for numbers not above 0."""

    every_steps: int | None = None
    """Due at each step that is a multiple of this."""
    every_seconds: float | None = None
    """Due once so many seconds have passed since the last save began, by the clock of rank 0."""
    continuously: bool = False
    """Due as soon as the last checkpoint is durable."""
    also_every: int | None = None
    """Due, with a second output, at each step that is a multiple of this."""

    def __post_init__(self) -> None:
        numbers, seconds = (self.every_steps, self.also_every), self.every_seconds
        for name, steps in zip(("every_steps", "also_every"), numbers, strict=True):
            if steps is not None and (type(steps) is not int or steps < 1):
                raise ArgumentError(f"{name}={steps!r}: give a whole number of at least 1")
        if seconds is not None:
            check_seconds("every_seconds", seconds)

    def by_step(self, step: int) -> bool:
        """Returns whether the number of the step alone makes a checkpoint due."""
        every = self.every_steps
        return (every is not None and step % every == 0) or self.by_output(step)

    def by_output(self, step: int) -> bool:
        """Returns whether a second output of its own period is due."""
        return self.also_every is not None and step % self.also_every == 0

    def by_clock(self, seconds_since_save: float, is_saving: bool) -> bool:
        """Returns whether the time since the last save makes a save due. Rank 0 calls this."""
        if self.continuously and not is_saving:
            return True
        return self.every_seconds is not None and seconds_since_save >= self.every_seconds


def next_exchange(step: int, last: int, seconds: float) -> int:
    """Returns the step of the next exchange, after those at `last` and, `seconds` later, at `step`.

    The distance at most doubles from one exchange to the next, so that a run that becomes slower
    waits at most twice as long as it should.

    >>> next_exchange(step=10, last=9, seconds=0.01), next_exchange(step=10, last=0, seconds=30.0)
    (12, 11)
    """
    taken = max(1, step - last)
    wanted = taken * EXCHANGE_SECONDS / seconds if seconds > 0 else 2 * taken
    return step + max(1, int(min(wanted, 2 * taken)))


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


class Due:
    """Decides at which steps a save to the folder of the run is due, the same on all ranks."""

    def __init__(
        self, schedule: Schedule, signals: Sequence[int], ranks: RunRanks, saves: RunSaves
    ) -> None:
        """Handles the signals until `close`. Raises as `PreemptionSignals` does."""
        self.signals = PreemptionSignals(signals)
        self.preempted_by: int | None = None
        """The signal that the ranks have agreed on."""
        self.is_asked = False
        """Whether the program has asked about the signal, and so ends its loop itself."""
        self._schedule, self._ranks, self._saves = schedule, ranks, saves
        self._decided: tuple[int, bool] | None = None
        """The last step that was asked about, and the answer."""
        self._exchange_at = 0
        self._exchanged = (0, time.monotonic())
        self._began = time.monotonic()
        """The time when the last save began."""

    def at(self, step: int, end: Callable[[int], None]) -> bool:
        """Returns whether a save is due at a step. All ranks call this.

        `end` is called with the signal at the step after its save, unless the program has asked.
        """
        if self._decided is not None and self._decided[0] == step:
            return self._decided[1]
        was_preempted = self.preempted_by is not None
        is_due = self._exchange(step, end) if step >= self._exchange_at else False
        is_due = is_due or self._saves.is_retrying or self._schedule.by_step(step)
        if self.preempted_by is not None and not was_preempted:
            is_due, self._exchange_at = True, 0  # the next step asks whether the loop should end
        self._decided = (step, is_due)
        return is_due

    def saves(self) -> None:
        """A save begins: the seconds between saves count from now."""
        self._saves.is_retrying, self._began = False, time.monotonic()

    def was_saved(self, step: int) -> None:
        """The save of a step has begun: it is due no more."""
        self._decided = (step, False)

    def goes_back(self) -> None:
        """The run is at another step now: all is decided anew."""
        self._decided, self._exchange_at = None, 0

    def _exchange(self, step: int, end: Callable[[int], None]) -> bool:
        """Returns whether rank 0's clock or a failed save makes a save due; notes signals."""
        if self.preempted_by is not None and not self.is_asked and not self._saves.is_retrying:
            end(self.preempted_by)
        is_saving, (last, when) = self._saves.is_under_way, self._exchanged
        now = time.monotonic()
        self._exchanged = (step, now)
        answer = self._ranks.agree_on_step(
            step,
            self.signals.received,
            is_saving,
            lambda is_saving: self._schedule.by_clock(now - self._began, is_saving),
            next_exchange(step, last, now - when),
        )
        self._exchange_at = answer.next_exchange
        if self.preempted_by is None:
            self.preempted_by = answer.received
        if not answer.is_saving:
            self._saves.settle()
        self._saves.tidying.tell(stacklevel=4)
        return answer.is_due
