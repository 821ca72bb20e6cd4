"""Tells observers which stages a call of this rank had, and how long each took.

Rules:

1. Nothing is measured without an observer.
2. An observer is called on the thread of the call, after each stage and after the call. The time
   that an observer takes is in no stage.
3. An error of an observer never ends a call. A warning tells of the first error of each observer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from warnings import warn


@dataclass(frozen=True, slots=True)
class Event:
    """A stage of a call on this rank, or the whole call."""

    call: str
    """The name of the call, such as `ckpt.save`."""
    stage: str
    """The name of the stage, such as `writing`; empty for the whole call."""
    rank: int
    """The rank in the group of the call."""
    world_size: int
    """The number of ranks of the call."""
    began: float
    """Seconds since 1970."""
    seconds: float
    waited: float
    """The part of `seconds` in which this rank waited for other ranks."""
    nbytes: int
    """Bytes of tensors that this rank read or wrote in it."""
    error: str
    """The class of the error that ended it on this rank; empty without one."""
    rereads: int = 0
    """The reads that this process repeated meanwhile, because bytes were changed on their way from
    a store."""


Observer = Callable[[Event], None]
_observers: tuple[Observer, ...] = ()
_failed: set[int] = set()
_rereads = 0
"""The reads that this process has repeated."""


def count_reread() -> None:
    """Counts a read that was repeated, for all calls that go on."""
    global _rereads
    _rereads += 1


def observe(observer: Observer) -> Callable[[], None]:
    """Calls `observer` with each event from now on. Returns a function that ends this."""
    global _observers
    entry: Observer = lambda event: observer(event)  # noqa: E731 - one entry for each call
    _observers = (*_observers, entry)

    def end() -> None:
        global _observers
        _observers = tuple(one for one in _observers if one is not entry)

    return end


class Clock:
    """The times of one call. Its methods do nothing if no observer was there at its begin."""

    def __init__(self, call: str, rank: int, world_size: int) -> None:
        self._observed = bool(_observers)
        if not self._observed:
            return
        self._whole = _Open(call, "", rank, world_size)
        self._stage: _Open | None = None

    @property
    def is_observed(self) -> bool:
        """Whether the methods do anything."""
        return self._observed

    def doing(self, stage: str) -> None:
        """Ends the stage before, and begins another."""
        if self._observed:
            self._close("")
            self._stage = self._whole.part(stage)

    def count(self, nbytes: int) -> None:
        """Counts bytes of tensors for the stage and the call."""
        if self._observed:
            for one in self._open():
                one.nbytes += nbytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the block as a wait for other ranks."""
        if not self._observed:
            yield
            return
        began = time.perf_counter()
        try:
            yield
        finally:
            for one in self._open():
                one.waited += time.perf_counter() - began

    def end_stage(self, error: str) -> None:
        """Ends the stage alone."""
        if self._observed:
            self._close(error)

    def end(self, error: str) -> None:
        """Ends the stage and the call; `error` is the class of the error that ended both."""
        if self._observed:
            self._close(error)
            _tell(self._whole.closed(error))

    def _open(self) -> Iterator[_Open]:
        yield self._whole
        if self._stage is not None:
            yield self._stage

    def _close(self, error: str) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            _tell(stage.closed(error))


@contextmanager
def timed(call: str, rank: int = 0, world_size: int = 1) -> Iterator[Clock]:
    """Yields the clock of a call, which ends with the block."""
    clock, error = Clock(call, rank, world_size), ""
    try:
        yield clock
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        clock.end(error)


class _Open:
    """A stage or a call that goes on."""

    def __init__(self, call: str, stage: str, rank: int, world_size: int) -> None:
        self._names = call, stage, rank, world_size
        self._began, self._since = time.time(), time.perf_counter()
        self.waited, self.nbytes, self._rereads = 0.0, 0, _rereads

    def part(self, stage: str) -> _Open:
        call, _, rank, world_size = self._names
        return _Open(call, stage, rank, world_size)

    def closed(self, error: str) -> Event:
        seconds = time.perf_counter() - self._since
        rereads = _rereads - self._rereads
        return Event(*self._names, self._began, seconds, self.waited, self.nbytes, error, rereads)


def _tell(event: Event) -> None:
    for observer in _observers:
        try:
            observer(event)
        except Exception as error:
            if id(observer) not in _failed:
                _failed.add(id(observer))
                warn(
                    f"an observer of ckpt.events failed with {type(error).__name__}: {error}; the "
                    "call goes on",
                    stacklevel=2,
                )
