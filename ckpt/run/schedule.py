"""When a run saves: by steps, by seconds, as often as it can; and when its ranks must talk.

Rules:

1. Everything here is a pure function of numbers that are equal on all ranks, or that rank 0 decides
   for all.
2. A rank's clock, its signals and the end of its last save are known to the others only after an
   exchange. Exchanges take place at steps that all ranks know beforehand, about once in
   `EXCHANGE_SECONDS`, so a step between them costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharding.errors import ArgumentError

EXCHANGE_SECONDS = 1.0
"""The time between two exchanges, about: how late a signal is seen."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a checkpoint is due. Raises ArgumentError for numbers that are not above 0."""

    every_steps: int | None = None
    """At each step that is a multiple of this."""
    every_seconds: float | None = None
    """When so many seconds have passed since the last save began, by the clock of rank 0."""
    continuously: bool = False
    """As soon as the last checkpoint is durable."""

    def __post_init__(self) -> None:
        steps, seconds = self.every_steps, self.every_seconds
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ArgumentError(f"every_steps={steps!r}: give a whole number of at least 1")
        if seconds is not None and not seconds > 0:
            raise ArgumentError(f"every_seconds={seconds!r}: give a number above 0")

    def by_step(self, step: int) -> bool:
        """Whether the number of the step alone makes a checkpoint due."""
        return self.every_steps is not None and step % self.every_steps == 0

    def by_clock(self, seconds_since_save: float, is_saving: bool) -> bool:
        """Whether the time since the last save began makes one due; for rank 0 to decide."""
        if self.continuously and not is_saving:
            return True
        return self.every_seconds is not None and seconds_since_save >= self.every_seconds


def next_exchange(step: int, last: int, seconds: float) -> int:
    """The step of the next exchange, after one at `step` that came `seconds` after one at `last`.

    The distance at most doubles from one exchange to the next, so a run that becomes slower waits
    no more than twice as long as it should.

    >>> next_exchange(step=10, last=9, seconds=0.01), next_exchange(step=10, last=0, seconds=30.0)
    (12, 11)
    """
    taken = max(1, step - last)
    wanted = taken * EXCHANGE_SECONDS / seconds if seconds > 0 else 2 * taken
    return step + max(1, int(min(wanted, 2 * taken)))
