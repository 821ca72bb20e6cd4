"""The policy of a run: the checkpoints that stay, and the failures of saves that may pass.

Rules of retention, whose functions are pure:

1. A checkpoint stays if one rule of the policy asks for it. A policy without rules keeps all.
2. The newest checkpoint always stays.
3. Newest means saved last, by the counter of the run, not the highest step: a run that goes back to
   step 100 continues from its own step 200, not from the step 300 that it gave up. A clock decides
   only between checkpoints without a counter, and which are `younger_than`.
4. If several checkpoints are equally good, the newest counts as the best. A checkpoint without the
   metric, or with a metric that is NaN, is never the best.
5. A damaged checkpoint does not count for any rule, and is not removed. A bare one, whose manifest
   a late request has brought back after a delete, does not count either. It is removed once a newer
   checkpoint has its files.
6. A pinned checkpoint stays.
7. A checkpoint whose numbers nobody has counted does not count as finite.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from warnings import warn

from ckpt.errors import ArgumentError, CkptError, NotOwnerError, RankError, SaveFailedWarning
from ckpt.loading.newest import Age, newest_first
from ckpt.stores.store import local_path, one_spelling
from sharding.errors import ENDED, LATE

__all__ = ["Keep", "RunStep"]


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


LONGEST_SECONDS = 1e9
"""Some thirty years: no clock of an operating system takes a much longer time."""


def parse_time(text: str) -> float:
    """Returns the seconds of an age such as `90m`; raises ArgumentError for another text.

    >>> parse_time("90m"), parse_time("1.5d"), parse_time("0")
    (5400.0, 129600.0, 0.0)
    """
    seconds = seconds_in(text)
    if seconds is None or seconds > LONGEST_SECONDS:
        raise ArgumentError(f"{text!r} is no time; say 30s, 90m, 2h or 3d")
    return seconds


Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Keep:
    """The checkpoints of a run that stay. `Keep()` keeps all of them.

    Raises ArgumentError for a number below 1, and for `best` without `metric`.

    >>> import ckpt
    >>> ckpt.Keep(last=3, last_finite=1) == ckpt.Keep(last=3, last_finite=1, mode="min")
    True
    """

    last: int | None = None
    """Keeps this number of the newest checkpoints."""
    every: int | None = None
    """Keeps checkpoints whose step is a multiple of this."""
    best: int | None = None
    """Keeps this number of the best checkpoints by `metric`."""
    metric: str | None = None
    """A key of the metrics in the calls of `Checkpointer.save`."""
    mode: Mode = "min"
    """Whether the best metric is the smallest or the largest."""
    younger_than: float | str | None = None
    """Keeps checkpoints whose save began less than so long ago: in seconds, or as `"1h"`."""
    one_per: float | str | None = None
    """Keeps the first checkpoint of each such time: of each hour, by UTC."""
    last_finite: int | None = None
    """Keeps this number of the newest checkpoints whose numbers are all finite, without NaN and
    infinity. The writer process counts them during each save; training does not wait for it."""

    def __post_init__(self) -> None:
        for name in ("last", "every", "best", "last_finite"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 1):
                raise ArgumentError(f"Keep({name}={number!r}): give a whole number of at least 1")
        if self.younger_than is not None:
            check_seconds("Keep: younger_than", _seconds(self.younger_than))
        if self.one_per is not None:
            check_seconds("Keep: one_per", _seconds(self.one_per))
        if (self.best is None) != (self.metric is None):
            raise ArgumentError("Keep: best= and metric= belong together; give both or none")
        if not isinstance(self.metric, str | None):
            raise ArgumentError(f"Keep(metric={self.metric!r}): give the name of a metric")
        if self.mode not in ("min", "max"):
            raise ArgumentError(f'Keep(mode={self.mode!r}): it can be "min" or "max"')

    @property
    def keeps_all(self) -> bool:
        """Whether no rule is given."""
        rules = (self.last, self.every, self.best, self.younger_than, self.one_per)
        return (*rules, self.last_finite) == (None,) * (len(rules) + 1)

    def is_young(self, seconds: float) -> bool:
        """Whether `younger_than` keeps a checkpoint of this age."""
        most = _seconds(self.younger_than)
        return isinstance(most, int | float) and seconds < most

    def period_of(self, time: float) -> float | None:
        """Returns the number of the period of `one_per` that a time lies in; None without one."""
        seconds = _seconds(self.one_per)
        return time // seconds if isinstance(seconds, int | float) else None


def _seconds(time: float | str | None) -> float | str | None:
    """Returns a time in seconds; a text that is no time as it is."""
    seconds = seconds_in(time) if isinstance(time, str) else None
    return time if seconds is None else seconds


def parse_keep(text: str) -> Keep:
    """Returns the policy of a text such as `last=3,best=2,metric=loss,mode=max,one_per=1h`.

    Raises ArgumentError for a text that names no rule, or one twice, or that keeps everything.

    >>> parse_keep("last=3,younger_than=2h") == Keep(last=3, younger_than=7200.0)
    True
    """
    rules: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _WORDS or not value or name in rules:
            known = ", ".join(f"{name}=" for name in _WORDS)
            raise ArgumentError(f"{part.strip()!r} is no rule; there are {known}, each once")
        rules[name] = _WORDS[name](value)
    keep = Keep(**rules)
    if keep.keeps_all:
        raise ArgumentError(f"{text!r} keeps every checkpoint; say last=, every= or best=")
    return keep


def _parse_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ArgumentError(f"{text!r} is no whole number; give one, as in last=3")
    return int(text)


_WORDS: dict[str, Callable[[str], Any]] = {
    "last": _parse_number,
    "every": _parse_number,
    "best": _parse_number,
    "metric": str,
    "mode": str,
    "younger_than": parse_time,
    "one_per": parse_time,
    "last_finite": _parse_number,
}
"""The fields of `Keep` as words of a text, with the function that reads the value of each."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """A committed checkpoint of a run."""

    step: int
    name: str
    """The name of its folder in the folder of the run."""
    time: float
    """The begin of its save, by the clock of rank 0, in seconds since 1970."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    program: Mapping[str, object] = field(default_factory=dict)
    """`command`, `git` (a revision, with `+` if files differ), `python`, `torch`, `hosts`."""
    is_damaged: bool = False
    """Whether its manifest cannot be read."""
    order: tuple[int, int] | None = None
    """The number of the run's start, and that of the save in it; None if no counter tells."""
    pins: tuple[str, ...] = ()
    """The names under which it is pinned."""
    nonfinite: int | None = None
    """How many of its numbers are NaN or infinite; None if its save has not counted them."""
    is_bare: bool = False
    """Whether a listing of its bucket shows its manifest and none of its files."""

    @property
    def is_sound(self) -> bool:
        """Whether its manifest can be read and names files that are there."""
        return not (self.is_damaged or self.is_bare)

    @property
    def age(self) -> Age:
        """When it was saved."""
        return Age(self.time, self.order, self.name)


def newest_steps(steps: Iterable[RunStep]) -> list[RunStep]:
    """Returns the checkpoints, those saved last first (rule 3)."""
    return newest_first(steps, lambda step: step.age)


def best_first(steps: Sequence[RunStep], metric: str, mode: Mode) -> list[RunStep]:
    """Returns the checkpoints that have the metric, the best one first (rule 4)."""
    sign = 1.0 if mode == "min" else -1.0
    known = [step for step in steps if not math.isnan(step.metrics.get(metric, math.nan))]
    return sorted(newest_steps(known), key=lambda step: sign * step.metrics[metric])


def removable(steps: Sequence[RunStep], keep: Keep, now: float) -> list[RunStep]:
    """Returns the checkpoints that no rule keeps, newest first. `now` is in seconds since 1970.

    A checkpoint that borrows from an older one comes before the older one.
    """
    if keep.keeps_all:
        return []
    intact = newest_steps(step for step in steps if not step.is_damaged)
    newest = steps = [step for step in intact if not step.is_bare]
    kept = {step.name for step in newest[: keep.last or 1]}
    kept |= {step.name for step in steps if step.pins}
    if keep.last_finite is not None:
        finite = [step.name for step in newest if step.nonfinite == 0]
        kept |= {*finite[: keep.last_finite]}
    if keep.every is not None:
        kept |= {step.name for step in steps if step.step % keep.every == 0}
    if keep.younger_than is not None:
        kept |= {step.name for step in steps if keep.is_young(now - step.time)}
    if keep.best is not None and keep.metric is not None:
        kept |= {step.name for step in best_first(steps, keep.metric, keep.mode)[: keep.best]}
    if keep.one_per is not None:
        kept |= {
            step.name for step in {keep.period_of(step.time): step for step in newest}.values()
        }
    first = intact.index(newest[0]) if newest else len(intact)
    bare = {step.name for step in intact[first:] if step.is_bare and not step.pins}
    return [step for step in intact if step.name in bare or not (step.is_bare or step.name in kept)]


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """The arguments of a `Checkpointer` for its local folder. Raises ArgumentError."""

    folder: str
    every_steps: int
    keep: int

    def __post_init__(self) -> None:
        for name, number in (("every_steps", self.every_steps), ("keep", self.keep)):
            if type(number) is not int or number < 1:
                raise ArgumentError(f"local_{name}={number!r}: give a whole number of at least 1")


def local_options(
    folder: str | os.PathLike[str] | None, every_steps: int | None, keep: int, run: str
) -> LocalOptions | None:
    """Returns the checked arguments; None without a local folder. `run` is the URL of the run."""
    if (folder is None) != (every_steps is None):
        raise ArgumentError("local= and local_every_steps= belong together; give both or none")
    if folder is None or every_steps is None:
        return None
    path = local_path(folder)
    if path is None:
        raise ArgumentError(f"local={os.fspath(folder)!r}: give a folder on a disk or in memory")
    if one_spelling(path) == one_spelling(run):
        raise ArgumentError(f"local={os.fspath(folder)!r} is the folder of the run; give another")
    return LocalOptions(os.path.abspath(path), every_steps, keep)


OnFailure = Literal["continue", "raise"]
HOPELESS = (
    *("StateError", "ExistsError", "InUseError", "ArgumentError", "ArgumentTypeError"),
    *("NotOwnerError", "ValueError", "TypeError", ENDED, LATE),
)
"""Errors that are raised, because the next step would fail in the same way."""


class Failures:
    """The failed saves of a run, on one rank."""

    def __init__(self, on_failure: OnFailure) -> None:
        if on_failure not in ("continue", "raise"):
            raise ArgumentError(f'on_failure={on_failure!r}: it can be "continue" or "raise"')
        self._on_failure = on_failure
        self.count = 0

    def add(self, error: Exception, place: str, again: str, tells: bool) -> None:
        """Counts a failure, and warns of it if this rank `tells`; or raises the error.

        `again` names the step that saves again.
        """
        kind = error.error if isinstance(error, RankError) else type(error).__name__
        may_pass = isinstance(error, CkptError | OSError) and kind not in HOPELESS
        if kind == NotOwnerError.__name__ and isinstance(error, RankError):
            raise NotOwnerError(str(error)) from error
        if self._on_failure == "raise" or not may_pass:
            raise error
        self.count += 1
        if tells:
            warn(
                f"{place} was not saved: {kind}: {error}; {again} saves again "
                f"(failure {self.count} of this run)",
                SaveFailedWarning,
                stacklevel=5,
            )
