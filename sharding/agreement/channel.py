"""How the ranks of a group come to one answer, or all to one error, each within its time.

A *call* is what a user calls on all ranks: a save, a load. It consists of *operations*: every rank
brings something, rank 0 joins it all to one answer, and all get it. Calls are counted on each rank.

Rules:

1. Nobody waits longer for another than its call allows. Rank 0 waits as long as the least patient
   of those that have come, and then names who has not; the others wait ANSWER_SECONDS longer for
   rank 0, so that they hear whom it was waiting for.
2. One failure ends the call for all. Who fails outside an operation says so as it leaves. Rank 0
   gives the others ERROR_SECONDS to come, so that of several failures the lowest rank's is told; of
   a rank that only missed what another was to send, the other's.
3. A failure is told to all ranks, present or not, together with the number of the call. A rank that
   comes late finds it, raises it too, and counts on from there: the next call is the same for all.
4. A rank whose process has ended fails every call from then on, at once.
5. Ranks that do different things are out of step: an error that names both.
6. Calls inside a call are part of it. Two threads do not mix: one waits for the other's call.
7. Background work of a call, its *continuation*, uses a channel of its own and reuses the number of
   the call, so that counters agree even on ranks that never started it. A rank that leaves a call
   while the others may have gone on tells them in both channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from threading import Lock, RLock
from typing import ClassVar

from sharding.agreement.links import Failure, Kind, Message

TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for another where nobody says otherwise."""
ANSWER_SECONDS = 5.0
"""How much longer the others wait than rank 0."""
ERROR_SECONDS = 5.0
"""How long rank 0 waits for the rest once one has failed."""

Join = Callable[[Sequence[bytes]], bytes]
"""What all ranks brought, by rank -> the answer."""

_seconds: ContextVar[float] = ContextVar("seconds", default=TIMEOUT_SECONDS)


def waiting_seconds() -> float:
    """How long a rank waits for another in the call that this thread is in."""
    return _seconds.get()


@dataclass(slots=True)
class Call:
    """What a rank is in."""

    number: int
    name: str
    seconds: float
    stage: str
    """What it is doing."""
    ops: int = 0
    failure: Failure | None = None
    """By which it is over, for this rank."""
    is_continuation: bool = False

    @property
    def is_beginning(self) -> bool:
        """Whether this rank is not beyond the first operation, to which all come as they call."""
        return self.ops <= 1 and not self.is_continuation


class Continuation:
    """What goes on after a call in another thread: either that begins it, or the call leaves it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.call: Call | None = None
        """That it is the continuation of."""
        self._taken = Lock()

    def take(self) -> bool:
        """Whether nobody has begun or left it. Now somebody has."""
        return self._taken.acquire(blocking=False)


class Channel(ABC):
    """The ranks of one group, as one of them reaches them."""

    from_any_thread: ClassVar[bool] = True
    """Whether it may be used by a thread of its own, beside everything else that ranks do."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._lock = RLock()
        self._call: Call | None = None
        self._number = 0
        """The last call that began here, or that others have left."""

    @contextmanager
    def call(
        self, name: str, seconds: float, number: int | None = None, then: Continuation | None = None
    ) -> Iterator[Call]:
        """Be in a call, the same on all ranks; or, inside of one, in that.

        A continuation has the number of the call that it goes on from, which gave it as `then`.
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
        """The answer to what all ranks bring, or the failure of one, on all of them."""
        call.stage = stage
        if call.failure is None:
            call.ops += 1
            mine = Message(
                *(Kind.HERE, call.number, call.ops, call.name, stage, call.seconds),
                *(failure, record),
            )
            found = self._meet(call, mine, join)
            if not isinstance(found, Failure):
                return found
            call.failure = found
        return call.failure

    def _prepare(self, then: Continuation | None, call: Call) -> None:
        """Let the others connect for a continuation before they hear that this rank has come."""
        if then is not None:
            then.call = call
            if self.rank == 0 and call.failure is None:
                failure = then.channel.connect(call)
                if failure is not None:
                    self._leave(call, failure)
                    call.failure = failure

    def connect(self, call: Call) -> Failure | None:
        """For a continuation: listen on rank 0; on others connect to it, or say why not."""
        return self._open(call)  # not under the lock, which an earlier continuation may have

    def _leave_continuation(self, call: Call, failure: Failure) -> None:
        """Tell the others, who may have gone on to it."""
        with self._lock:
            self._number = max(self._number, call.number)
            if self._open(replace(call, seconds=0.0)) is None:
                self._leave(call, failure)

    @abstractmethod
    def _open(self, call: Call) -> Failure | None:
        """Be ready for a call, or say why it fails."""

    @abstractmethod
    def _meet(self, call: Call, mine: Message, join: Join) -> bytes | Failure: ...

    @abstractmethod
    def _leave(self, call: Call, failure: Failure) -> None:
        """Tell the others."""


class FakeChannel(Channel):
    """Ranks that are not there, as in a process group of torch's backend "fake": they all agree."""

    def _open(self, call: Call) -> Failure | None:
        return None

    def _meet(self, call: Call, mine: Message, join: Join) -> bytes | Failure:
        return mine.failure or join([mine.data] * self.world_size)

    def _leave(self, call: Call, failure: Failure) -> None:
        pass
