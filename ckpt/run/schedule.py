"""The times at which a run saves, and at which its ranks communicate.

Rules:

1. All functions are pure. Their numbers are equal on all ranks, or rank 0 decides for all.
2. Other ranks learn of a rank's clock, its signals and the end of its last save only in an
   exchange. Exchanges take place at steps that all ranks know beforehand, about once in
   `EXCHANGE_SECONDS`, so that the steps between them cost nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sharding.errors import ArgumentError

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

    def __post_init__(self) -> None:
        steps, seconds = self.every_steps, self.every_seconds
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ArgumentError(f"every_steps={steps!r}: give a whole number of at least 1")
        if seconds is not None:
            check_seconds("every_seconds", seconds)

    def by_step(self, step: int) -> bool:
        """Returns whether the number of the step alone makes a checkpoint due."""
        return self.every_steps is not None and step % self.every_steps == 0

    def by_clock(self, seconds_since_save: float, is_saving: bool) -> bool:
        """Returns whether the time since the last save makes a save due. Rank 0 calls this."""
        if self.continuously and not is_saving:
            return True
        return self.every_seconds is not None and seconds_since_save >= self.every_seconds


def check_seconds(name: str, seconds: object) -> None:
    """Raises ArgumentError unless an argument is a number above 0."""
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ArgumentError(f"{name}={seconds!r}: give seconds above 0")


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""The seconds of each letter in a time as text."""


def seconds_in(text: str) -> float | None:
    """Returns the seconds of a time such as `90m`; None for another text.

    >>> seconds_in("90m"), seconds_in("1.5d"), seconds_in("20"), seconds_in("soon")
    (5400.0, 129600.0, 20.0, None)
    """
    matched = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    return float(matched[1]) * UNITS[matched[2] or "s"] if matched else None


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
