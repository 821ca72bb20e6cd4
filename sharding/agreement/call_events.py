"""The course of a call on this rank: observers get its stages, and the time of each.

Rules:

1. Nothing is measured without an observer.
2. An observer is called on the thread of the call, after each stage and after the call. The time
   that an observer takes is in no stage.
3. An error of an observer never ends a call. A warning tells of the first error of each observer.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from warnings import warn


class Requests(NamedTuple):
    """Requests of one operation to object stores."""

    sent: int = 0
    repeated: int = 0
    """Those of `sent` that repeat one which failed."""
    nbytes: int = 0
    """Bytes of files in them and in their answers."""


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
    requests: Mapping[str, Requests] = field(default_factory=dict)
    """The requests that this process sent to object stores meanwhile, by operation: `put`, `get`,
    `list`, `head`, `delete`, `copy`. Empty on disks."""

    def numbers(self) -> dict[str, int]:
        """Returns the numbers of `requests` by names such as `put.sent`, for metrics."""
        return {
            f"{operation}.{name}": number
            for operation, counts in self.requests.items()
            for name, number in counts._asdict().items()
        }


Observer = Callable[[Event], None]
_observers: tuple[Observer, ...] = ()
_failed: set[int] = set()
_rereads = 0
"""The reads that this process has repeated."""
_requests: dict[str, Requests] = {}
"""The requests that this process has sent, by operation."""
_requests_lock = threading.Lock()


def count_reread() -> None:
    """Counts a read that was repeated, for all calls that go on."""
    global _rereads
    _rereads += 1


def count_requests(operation: str, added: Requests) -> None:
    """Counts requests to object stores, for all calls that go on."""
    with _requests_lock:
        before = _requests.get(operation, _NONE)
        _requests[operation] = Requests(*map(sum, zip(before, added, strict=True)))


def requests_since(before: Mapping[str, Requests]) -> dict[str, Requests]:
    """Returns the requests of this process, less those of another look, by operation.

    >>> before = requests_since({})
    >>> count_requests("get", Requests(sent=1, nbytes=100))
    >>> requests_since(before)
    {'get': Requests(sent=1, repeated=0, nbytes=100)}
    """
    if not _requests:  # all files are on disks
        return {}
    with _requests_lock:
        now = dict(_requests)
    return {
        operation: Requests(*(one - other for one, other in zip(found, known, strict=True)))
        for operation, found in now.items()
        if found != (known := before.get(operation, _NONE))
    }


def take_requests() -> dict[str, Requests]:
    """Returns the requests of this process, and forgets them: another process counts them."""
    with _requests_lock:
        found = dict(_requests)
        _requests.clear()
    return found


_NONE = Requests()


def observe(observer: Observer) -> Callable[[], None]:
    """Calls `observer` with each event from now on. Returns a function that ends this."""
    global _observers
    entry: Observer = lambda event: observer(event)  # noqa: E731 - one entry for each call
    _observers = (*_observers, entry)

    def end() -> None:
        global _observers
        _observers = tuple(observer for observer in _observers if observer is not entry)

    return end


class Clock:
    """The times of one call. Its methods do nothing if no observer was there at its begin."""

    def __init__(self, call: str, rank: int, world_size: int) -> None:
        self._open = [_Open(call, "", rank, world_size)] if _observers else []
        """The call and its stage, as long as they go on; nothing without an observer."""

    def doing(self, stage: str) -> None:
        """Ends the stage before, and begins another."""
        if self._open:
            self.end_stage("")
            self._open.append(self._open[0].part(stage))

    def count(self, nbytes: int) -> None:
        """Counts bytes of tensors for the stage and the call."""
        for event in tuple(self._open):
            event.nbytes += nbytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the block as a wait for other ranks."""
        began = time.perf_counter()
        try:
            yield
        finally:
            for event in tuple(self._open):
                event.waited += time.perf_counter() - began

    def end_stage(self, error: str) -> None:
        if len(self._open) > 1:
            _tell(self._open.pop().close(error))

    def end(self, error: str) -> None:
        """Ends the stage and the call; `error` is the class of the error that ended both."""
        while self._open:
            _tell(self._open.pop().close(error))


_pauses: set[object] = set()
"""The blocks of `pause_collection`, of all threads, that have begun and not ended."""
_collects = True
"""Whether the garbage collector was enabled before the first of them."""
_pauses_lock = threading.RLock()


@contextmanager
def pause_collection() -> Iterator[None]:
    """Disables the garbage collector inside the block, for work of seconds without cyclic garbage.

    A plan has several objects for each tensor. Python searches all objects whenever their number
    has grown by a quarter: with torch imported, that is most of the time of a plan. A block that
    calls one function ends when the function's objects are gone, and none of them is searched.
    Blocks of several threads may overlap: the last one that ends enables the collector.
    """
    global _collects
    block = object()
    try:
        with _pauses_lock:  # inside `try`: an interrupt may come just after
            if not _pauses:
                _collects = gc.isenabled()
            _pauses.add(block)
            gc.disable()
        yield
    finally:
        try:
            _end_pause(block)
        finally:
            _end_pause(block)  # does what an interrupt inside the first one has left


def _end_pause(block: object) -> None:
    with _pauses_lock:
        _pauses.discard(block)
        if not _pauses and _collects:
            gc.enable()


def _begin_in_child() -> None:
    """Forgets, in a forked process, the threads that it has not: their locks, and their pauses."""
    global _requests_lock, _pauses_lock
    _requests_lock, _pauses_lock = threading.Lock(), threading.RLock()
    if _pauses and _collects:
        gc.enable()
    _pauses.clear()


os.register_at_fork(after_in_child=_begin_in_child)


@contextmanager
def time_call(call: str, rank: int = 0, world_size: int = 1) -> Iterator[Clock]:
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
        self._requests = requests_since({})

    def part(self, stage: str) -> _Open:
        call, _, rank, world_size = self._names
        return _Open(call, stage, rank, world_size)

    def close(self, error: str) -> Event:
        seconds = time.perf_counter() - self._since
        counts = self.waited, self.nbytes, error, _rereads - self._rereads
        return Event(*self._names, self._began, seconds, *counts, requests_since(self._requests))


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
