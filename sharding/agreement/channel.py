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
   finds the failure, and raises it too. It does so in each call that the others have left: no rank
   leaves a call out, so the tenth call of one rank is the tenth call of all.
4. A rank whose process has ended fails every later call at once.
5. Ranks in different calls or operations are out of step: the error names both.
6. Calls inside a call are part of it. Two threads do not mix: one waits for the other's call.
7. Background work of a call, its *continuation*, uses a channel of its own and reuses the number of
   the call, so that counters agree even on ranks that never started it. A rank that leaves a call
   while the others may have begun the continuation tells them in both channels.

Connections carry the messages, in order. Rules:

8. Only `wait` waits. A link keeps bytes that the socket does not take at once, and sends them
   when there is room.
9. A process that ends in any way ends its connections. `is_lost` is set at once, after all
   messages that the process had sent are read.
10. An exception that a signal raises (KeyboardInterrupt) tears no message apart: bytes are received
    and sent in single steps of the interpreter.
11. Rank 0 takes a *greeting* of fixed size first, and not one byte more. It compares the secret in
    the greeting in constant time, and parses nothing before. A connection without the secret is
    closed.
12. The JSON of a message has a bounded size and one form. All else ends the connection, and nothing
    but the connection.

A rank that waits unusually long warns through the logger `ckpt`, and waits on. Rules:

13. Only the first operation of a call is watched. In later operations a missing rank is at work,
    for any length of time.
14. A rank says that it has called as it enters the call: it may be at work before the first
    operation too. Rank 0 names the missing ranks that have not said so. Another rank names rank 0.
"""

from __future__ import annotations

import hmac
import json
import logging
import select
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass, replace
from enum import Enum
from functools import lru_cache
from struct import Struct
from threading import Lock, RLock
from time import monotonic

from sharding.errors import describe_error

READ_BYTES = 1 << 16
"""The most bytes of one `recv`."""
MOST_SECONDS = 1e6
"""The longest time of one `poll`."""
PROTOCOL = 2
"""The number of this form of greetings and messages, which all ranks of a group have in common."""
SECRET_CHARS = 32
_GREETING = Struct(f"!4sH{SECRET_CHARS}sI")
"""The first bytes to rank 0: a mark, `PROTOCOL`, the secret, the sender's rank."""
_MARK = b"ckpt"
_LENGTHS = Struct("!II")
"""The lengths of a message's JSON and of the bytes behind it."""
MOST_JSON_BYTES = 4 << 20
"""The longest JSON of a message."""
MOST_TEXT_CHARS = 1 << 18
"""The longest text of a failure, whose JSON has up to 12 bytes for a character."""


def greeting(secret: str, rank: int) -> bytes:
    """Returns the first bytes of a rank to rank 0."""
    return _GREETING.pack(_MARK, PROTOCOL, secret.encode(), rank)


def rank_of(greeting: bytes, secret: str) -> int | None:
    """Returns the rank in a greeting; None without the secret or of another version."""
    mark, protocol, their_secret, rank = _GREETING.unpack(greeting)
    is_known = hmac.compare_digest(their_secret, secret.encode())
    return rank if is_known and (mark, protocol) == (_MARK, PROTOCOL) else None


class Kind(Enum):
    """The kind of a message."""

    HERE = "here"
    """To rank 0: the record that a rank brings to an operation, or its failure."""
    ANSWER = "answer"
    """From rank 0: the answer of the operation."""
    CALLED = "called"
    """Both ways: the sender has entered the call, and is perhaps far from its first operation."""
    LEFT = "left"
    """Both ways: this failure has ended the call and all before it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a call, as all ranks hear of it."""

    stage: str
    rank: int
    error: str
    """The name of the exception's class."""
    message: str

    @classmethod
    def of(cls, stage: str, rank: int, error: BaseException) -> Failure:
        """Returns an exception of this rank as the others see it."""
        text = describe_error(error)
        if (left := len(text) - MOST_TEXT_CHARS) > 0:
            text = f"{text[:MOST_TEXT_CHARS]} ... and {left:,} characters more"
        return cls(stage, rank, type(error).__name__, text)


@dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    kind: Kind
    call: int
    """The number of the message's call; calls are counted from 1, alike on all ranks."""
    op: int = 0
    """The number of the operation in its call, counted from 1."""
    name: str = ""
    """The name of the call."""
    stage: str = ""
    """The stage of the operation."""
    seconds: float = 0.0
    """The time that the sender will wait."""
    failure: Failure | None = None
    data: bytes = b""

    def pack(self) -> bytes:
        failure = None if self.failure is None else astuple(self.failure)
        values = (self.call, self.op, self.name, self.stage, float(self.seconds), failure)
        head = json.dumps([self.kind.value, *values]).encode()
        return b"".join((_LENGTHS.pack(len(head), len(self.data)), head, self.data))

    @classmethod
    def unpack(cls, head: bytes, data: bytes) -> Message:
        """Returns the message from its JSON and the bytes behind it.

        Raises ValueError, TypeError or RecursionError if this is no message.
        """
        parse = _parse if len(head) <= REPEATED_BYTES else _parse.__wrapped__
        return cls(*parse(head), data)


@lru_cache(maxsize=4)  # all ranks send rank 0 the same JSON: one parse serves thousands
def _parse(head: bytes) -> tuple[Kind, int, int, str, str, float, Failure | None]:
    kind, call, op, name, stage, seconds, failure = json.loads(head)
    failed = None if failure is None else Failure(*failure)
    types = tuple(map(type, (call, op, name, stage, seconds, *(failure or ()))))
    if types not in _TYPES:
        raise TypeError(f"the values of a message have the types {types}")
    return Kind(kind), call, op, name, stage, seconds, failed


REPEATED_BYTES = 1 << 10
"""Longer JSON has the error of one rank."""

_TYPES = {(int, int, str, str, float), (int, int, str, str, float, str, int, str, str)}
"""The types of a message's values, without and with a failure."""


class Link:
    """One connection."""

    def __init__(self, connected: socket.socket, is_stranger: bool = False) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_stranger = is_stranger
        """Whether the other process has yet to show the secret (rule 11)."""
        self.messages: deque[Message] = deque()
        """The messages that have arrived, and that no operation has taken."""
        self.is_lost = False
        """Whether the other process has ended, or has closed its side."""
        self.has_heard = False
        """Whether any message has arrived."""
        self.called = 0
        """The last call that the other rank is known to have entered."""
        self._socket = connected
        self._greeted: list[bytes] = []
        """The greeting of a stranger, as far as it has arrived."""
        self._received: list[bytes] = []
        self._outgoing = b""
        self._sent: list[int] = []
        """The bytes of `_outgoing` that each send has taken."""

    def fileno(self) -> int:
        """Returns the socket's file descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        self.is_lost = True
        self._socket.close()

    @property
    def is_sending(self) -> bool:
        """Whether bytes are left to send."""
        return not self.is_lost and sum(self._sent) < len(self._outgoing)

    def send(self, message: bytes) -> None:
        """Sends a message as far as there is room; `flush` sends the rest."""
        self.add(message)
        self.flush()

    def add(self, message: bytes) -> None:
        """Adds a message to the bytes that the next `flush` sends."""
        self._outgoing, self._sent = self._outgoing[sum(self._sent) :] + message, []

    def flush(self) -> None:
        """Sends as many bytes as there is room for."""
        while self.is_sending:
            rest = memoryview(self._outgoing)[sum(self._sent) :]
            try:
                self._sent.extend(map(self._socket.send, (rest,)))  # rule 10
            except BlockingIOError:
                return
            except OSError:
                # The messages that the other process sent before it ended can still be read.
                self._outgoing, self._sent = b"", []

    @property
    def greeting(self) -> bytes | None:
        """The greeting of the other process; None before all of it has arrived."""
        received = b"".join(self._greeted)
        return received if len(received) == _GREETING.size else None

    def _take_in(self, received: list[bytes], most: int) -> int:
        """Adds bytes that have come, at most so many; returns their number."""
        try:
            received.extend(map(self._socket.recv, (most,)))  # rule 10
        except BlockingIOError:
            return 0
        except OSError:
            self.is_lost = True
            return 0
        self.is_lost = not received[-1]
        return len(received[-1])

    def receive(self) -> None:
        """Takes in the messages that have come; of a stranger, the greeting."""
        if self.is_stranger:
            while not self.is_lost and (missing := _GREETING.size - sum(map(len, self._greeted))):
                if not self._take_in(self._greeted, missing):
                    return
            return
        while not self.is_lost and self._take_in(self._received, READ_BYTES) == READ_BYTES:
            pass
        data, at, messages = b"".join(self._received), 0, []
        while len(data) >= at + _LENGTHS.size:
            head, body = _LENGTHS.unpack_from(data, at)
            begin = at + _LENGTHS.size
            if head > MOST_JSON_BYTES:
                self.is_lost = True
                break
            if len(data) < begin + head + body:
                break
            at = begin + head + body
            try:
                messages.append(Message.unpack(data[begin : begin + head], data[begin + head : at]))
            except (ValueError, TypeError, RecursionError):  # the sender is not a rank
                self.is_lost = True
                break
        self.has_heard |= bool(messages)
        self.messages, self._received = deque((*self.messages, *messages)), [data[at:]]

    def wait(self, seconds: float) -> None:
        """Returns when bytes have arrived or have been sent, or after so many seconds."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self.is_sending else 0))
        for _, events in poll.poll(milliseconds(seconds)):
            if events & select.POLLOUT:
                self.flush()
            if events & ~select.POLLOUT:
                self.receive()


def flush(links: Sequence[Link], seconds: float) -> None:
    """Sends the links' remaining bytes, as far as the other ends take them in so many seconds."""
    until = monotonic() + seconds
    while sending := [link for link in links if link.is_sending]:
        left = until - monotonic()
        if left <= 0:
            return
        poll = select.poll()
        for link in sending:
            poll.register(link.fileno(), select.POLLOUT)
        poll.poll(milliseconds(left))
        for link in sending:
            link.flush()


def milliseconds(seconds: float) -> int:
    """Returns seconds as `poll` takes them: at least one millisecond, at most `MOST_SECONDS`."""
    return max(1, int(min(seconds, MOST_SECONDS) * 1000))


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
        """The number of the last call that began here."""

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
        """Tells the connected ranks that this rank has entered the call (rule 14)."""


class FakeChannel(Channel):
    """Ranks of torch's backend "fake", which do not exist: each brings this rank's record."""

    def _open(self, call: Call) -> Failure | None:
        return None

    def _exchange(self, call: Call, mine: Message, join: Join) -> bytes | Failure:
        return mine.failure or join([mine.data] * self.world_size)

    def _leave(self, call: Call, failure: Failure) -> None:
        pass


NOTICE_SECONDS = 10.0
"""The time after which a rank names the ranks that have not called."""
SHOWN = 8
"""The most ranks that a warning names."""
_log = logging.getLogger("ckpt")


class WaitWarning:
    """The time at which one wait of a rank becomes worth a warning."""

    def __init__(self, call: Call, rank: int) -> None:
        self._call, self._rank = call, rank
        self.began = monotonic()
        self._at = float("inf")
        if call.is_beginning:
            self._at = self.began + NOTICE_SECONDS

    def until(self, seconds: float) -> float:
        """Returns the given seconds, or the fewer ones until the warning is due."""
        return max(0.0, min(seconds, self._at - monotonic()))

    @property
    def is_due(self) -> bool:
        return monotonic() >= self._at

    def hush(self) -> None:
        """Gives no warning for this wait."""
        self._at = float("inf")

    def say(self, missing: Sequence[int]) -> None:
        """Warns once, with the ranks that have not called, if there are any."""
        self.hush()
        if not missing:
            return
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        who = f"rank {missing[0]}, which has" if len(missing) == 1 else ""
        who = who or f"the ranks {list(missing[:SHOWN])}{more}, which have"
        _log.warning(
            "%s: rank %d has waited %.0f s for %s not called it. Every rank of the process group "
            'must call it; a rank that saves or loads by itself passes group="self". All fail '
            "after %g s.",
            self._call.name,
            self._rank,
            monotonic() - self.began,
            who,
            self._call.seconds,
        )
