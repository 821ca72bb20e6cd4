"""Channels: the ranks of a group reach one answer, or one error, each within its time-out.

A *call* is a function that a user calls on all ranks: a save, a load. A call consists of
*operations*: every rank brings a record, rank 0 joins the records into one answer, and all ranks
get the answer. Each rank counts its calls.

Rules:

1. No rank waits longer for another than its call allows. Rank 0 waits until the shortest time-out
   of the ranks that have come is over, and then names the missing ranks. The others wait
   ANSWER_SECONDS longer for rank 0, so that they hear these names.
2. One failure ends the call for all ranks. A rank that fails outside an operation sends its
   failure as it leaves the call. Rank 0 then gives the others ERROR_SECONDS to come, and of
   several failures tells the lowest rank's. The failure of a rank that missed another rank's data
   (TransferError) counts only if there is no other failure and no missing rank.
3. A failure reaches all ranks, present or not, with the number of its call. A rank that comes late
   finds the failure, raises it too, and counts on from there, so that the next call has the same
   number on all ranks.
4. A rank whose process has ended fails every later call at once.
5. Ranks in different calls or operations are out of step: the error names both.
6. Calls inside a call are part of it. Two threads do not mix: one waits for the other's call.
7. Background work of a call, its *continuation*, uses a channel of its own and reuses the number of
   the call, so that counters agree even on ranks that never started it. A rank that leaves a call
   while the others may have begun the continuation tells them in both channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from threading import Lock, RLock

from sharding.agreement.links import Failure, Kind, Message

TIMEOUT_SECONDS = 1800.0
"""The default time that a rank waits for another."""
ANSWER_SECONDS = 5.0
"""The time that the other ranks wait longer than rank 0."""
ERROR_SECONDS = 5.0
"""The time that rank 0 waits for the rest once a rank has failed."""

Join = Callable[[Sequence[bytes]], bytes]
"""All ranks' records, by rank -> the answer."""

_seconds: ContextVar[float] = ContextVar("seconds", default=TIMEOUT_SECONDS)


def waiting_seconds() -> float:
    """Returns the time that a rank waits for another in the call of this thread."""
    return _seconds.get()


@dataclass(slots=True)
class Call:
    """A call that a rank has entered."""

    number: int
    name: str
    seconds: float
    stage: str
    """The rank's current step, for errors."""
    ops: int = 0
    failure: Failure | None = None
    """The failure that has ended the call for this rank."""
    is_continuation: bool = False

    @property
    def is_beginning(self) -> bool:
        """Whether this rank is still in the first operation, which all ranks enter as they call."""
        return self.ops <= 1 and not self.is_continuation


class Continuation:
    """The work of a call in another thread, which begins it unless the call has failed before."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.call: Call | None = None
        """The call that this work continues."""
        self._taken = Lock()

    def take(self) -> bool:
        """Takes the continuation, to begin or to end it; returns False if it is taken already."""
        return self._taken.acquire(blocking=False)


class Channel(ABC):
    """One rank's way to the other ranks of its group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._lock = RLock()
        self._call: Call | None = None
        self._number = 0
        """The number of the last call that began here, or that others have left."""

    @contextmanager
    def call(
        self, name: str, seconds: float, number: int | None = None, then: Continuation | None = None
    ) -> Iterator[Call]:
        """Enters a call, the same on all ranks; inside a call, yields that call.

        A continuation has the number of the call that it continues, which gave it as `then`.
        """
        with self._lock:
            if self._call is not None:
                self._prepare(then, self._call)
                yield self._call
                return
            number, is_continuation = (
                (self._number + 1, False) if number is None else (number, True)
            )
            call = Call(number, name, seconds, name, is_continuation=is_continuation)
            before = _seconds.get()
            try:
                self._number, self._call = call.number, call
                _seconds.set(seconds)
                call.failure = self._open(call)
                if call.failure is None and not is_continuation:
                    self._say_called(call)
                self._prepare(then, call)
                yield call
            except BaseException as error:
                if call.failure is None:
                    failure = Failure.of(call.stage, self.rank, error)
                    self._leave(call, failure)
                    if then is not None and call.ops and then.take():
                        then.channel._leave_continuation(call, failure)
                raise
            finally:
                self._call = None  # first: an interrupt may come before the other
                _seconds.set(before)

    def meet(
        self, call: Call, stage: str, record: bytes, failure: Failure | None, join: Join
    ) -> bytes | Failure:
        """Returns, on all ranks, the answer to their records, or the failure of one rank."""
        call.stage = stage
        if call.failure is None:
            call.ops += 1
            mine = Message(
                *(Kind.HERE, call.number, call.ops, call.name, stage, call.seconds),
                *(failure, record),
            )
            found = self._exchange(call, mine, join)
            if not isinstance(found, Failure):
                return found
            call.failure = found
        return call.failure

    def _prepare(self, then: Continuation | None, call: Call) -> None:
        """Lets the others connect for a continuation before they hear that this rank has come."""
        if then is not None:
            then.call = call
            if self.rank == 0 and call.failure is None:
                failure = then.channel.connect(call)
                if failure is not None:
                    self._leave(call, failure)
                    call.failure = failure

    def connect(self, call: Call) -> Failure | None:
        """For a continuation: rank 0 listens, the others connect; returns the failure, if any."""
        return self._open(call)  # without the lock, which an earlier continuation may hold

    def _leave_continuation(self, call: Call, failure: Failure) -> None:
        """Tells the ranks that may have begun the continuation."""
        with self._lock:
            self._number = max(self._number, call.number)
            if self._open(replace(call, seconds=0.0)) is None:
                self._leave(call, failure)

    @abstractmethod
    def _open(self, call: Call) -> Failure | None:
        """Gets ready for a call; returns the failure, if any."""

    @abstractmethod
    def _exchange(self, call: Call, mine: Message, join: Join) -> bytes | Failure: ...

    @abstractmethod
    def _leave(self, call: Call, failure: Failure) -> None:
        """Tells the other ranks."""

    def _say_called(self, call: Call) -> None:  # noqa: B027 - a channel without a warning needs none
        """Tells the connected ranks that this rank has entered the call (`wait_warning`)."""


class FakeChannel(Channel):
    """Ranks of torch's backend "fake", which do not exist: each brings this rank's record."""

    def _open(self, call: Call) -> Failure | None:
        return None

    def _exchange(self, call: Call, mine: Message, join: Join) -> bytes | Failure:
        return mine.failure or join([mine.data] * self.world_size)

    def _leave(self, call: Call, failure: Failure) -> None:
        pass
