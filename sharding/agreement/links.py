"""Connections between ranks: messages in order, and an end that is noticed.

Rules:

1. Nothing here waits, but `wait`. What cannot be sent at once is kept, and sent when there is room.
2. A process that ends, however it does, ends its connections: `is_lost` says so at once, after all
   that it had sent before was read.
3. An exception that a signal raises (KeyboardInterrupt) tears no message apart: bytes are received
   and sent in single steps of the interpreter.
"""

from __future__ import annotations

import json
import select
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from struct import Struct
from time import monotonic

from sharding.errors import said

READ_BYTES = 1 << 16
"""How much is read at once."""
MOST_SECONDS = 1e6
"""That the system waits for at once, whatever it is told."""
_LENGTHS = Struct("!II")
"""Of a message's JSON, and of the bytes behind it."""


class Kind(Enum):
    """What a message says."""

    HELLO = "hello"
    """To rank 0, first of all: `op` is who connects, `name` the word that only ranks know."""
    HERE = "here"
    """To rank 0: what a rank brings to an operation, or its failure."""
    ANSWER = "answer"
    """From rank 0: what came of the operation."""
    WAITING = "waiting"
    """From rank 0: it waits for others, and has said so."""
    LEFT = "left"
    """Both ways: this call and all before are over, by this failure."""
    REFUSED = "refused"
    """From rank 0: the same, and this connection is not kept; connect again for the next call."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What all ranks are told of a call that failed."""

    stage: str
    rank: int
    error: str
    """The name of the exception's class."""
    message: str

    @classmethod
    def of(cls, stage: str, rank: int, error: BaseException) -> Failure:
        """An exception of this rank, as the others see it."""
        return cls(stage, rank, type(error).__name__, said(error))


@dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    kind: Kind
    call: int
    """The call that it belongs to; calls are counted from 1, alike on all ranks."""
    op: int = 0
    """The operation of the call, counted from 1."""
    name: str = ""
    """The call's."""
    stage: str = ""
    """The operation's."""
    seconds: float = 0.0
    """How long the sender will wait."""
    failure: Failure | None = None
    data: bytes = b""

    def packed(self) -> bytes:
        """As it travels."""
        failure = None if self.failure is None else astuple(self.failure)
        head = json.dumps(
            [self.kind.value, self.call, self.op, self.name, self.stage, self.seconds, failure]
        ).encode()
        return b"".join((_LENGTHS.pack(len(head), len(self.data)), head, self.data))

    @classmethod
    def unpacked(cls, head: bytes, data: bytes) -> Message:
        """What a rank has sent."""
        kind, call, op, name, stage, seconds, failure = json.loads(head)
        failed = None if failure is None else Failure(*failure)
        return cls(Kind(kind), call, op, name, stage, seconds, failed, data)


class Link:
    """One connection."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.messages: deque[Message] = deque()
        """What has come and was not looked at."""
        self.is_lost = False
        """The other process has ended, or closed its side."""
        self.has_heard = False
        """Something has come."""
        self._socket = connected
        self._received: list[bytes] = []
        self._outgoing = b""
        self._sent: list[int] = []
        """Bytes of `_outgoing`, as they went."""

    def fileno(self) -> int:
        """The descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Nothing comes or goes any more."""
        self.is_lost = True
        self._socket.close()

    @property
    def is_sending(self) -> bool:
        """Whether something is still to be sent."""
        return not self.is_lost and sum(self._sent) < len(self._outgoing)

    def send(self, message: bytes) -> None:
        """Send it now, or what there is no room for later, by `flush`."""
        self.add(message)
        self.flush()

    def add(self, message: bytes) -> None:
        """Send it with what is sent next."""
        self._outgoing, self._sent = self._outgoing[sum(self._sent) :] + message, []

    def flush(self) -> None:
        """Send what there is room for."""
        while self.is_sending:
            rest = memoryview(self._outgoing)[sum(self._sent) :]
            try:
                self._sent.extend(map(self._socket.send, (rest,)))  # rule 3
            except BlockingIOError:
                return
            except OSError:
                # What it sent before it ended may still be there to be read.
                self._outgoing, self._sent = b"", []

    def receive(self) -> None:
        """Take in the messages that have come."""
        while not self.is_lost:
            try:
                self._received.extend(map(self._socket.recv, (READ_BYTES,)))  # rule 3
            except BlockingIOError:
                break
            except OSError:
                self.is_lost = True
                break
            size = len(self._received[-1])
            self.is_lost = size == 0
            if size < READ_BYTES:
                break
        data, at, found = b"".join(self._received), 0, []
        while len(data) >= at + _LENGTHS.size:
            head, body = _LENGTHS.unpack_from(data, at)
            begin = at + _LENGTHS.size
            if len(data) < begin + head + body:
                break
            at = begin + head + body
            try:
                found.append(Message.unpacked(data[begin : begin + head], data[begin + head : at]))
            except (ValueError, TypeError):  # it is no rank
                self.is_lost = True
                break
        self.has_heard |= bool(found)
        self.messages, self._received = deque((*self.messages, *found)), [data[at:]]

    def wait(self, seconds: float) -> None:
        """Return when something has come or gone, or after so many seconds."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self.is_sending else 0))
        for _, events in poll.poll(milliseconds(seconds)):
            if events & select.POLLOUT:
                self.flush()
            if events & ~select.POLLOUT:
                self.receive()


def flush(links: Sequence[Link], seconds: float) -> None:
    """Send what is left for these, as far as they take it within so many seconds."""
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
    """As `poll` takes them: at least one, and not more than it can."""
    return max(1, int(min(seconds, MOST_SECONDS) * 1000))
