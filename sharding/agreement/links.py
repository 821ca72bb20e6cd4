"""Connections between ranks: messages arrive in order, and the end of a process is noticed.

Rules:

1. Only `wait` waits. A link keeps bytes that the socket does not take at once, and sends them
   when there is room.
2. A process that ends in any way ends its connections. `is_lost` is set at once, after all
   messages that the process had sent are read.
3. An exception that a signal raises (KeyboardInterrupt) tears no message apart: bytes are received
   and sent in single steps of the interpreter.
4. Rank 0 takes a *greeting* of fixed size first, and not one byte more. It compares the secret in
   the greeting in constant time, and parses nothing before. A connection without the secret is
   closed.
5. The JSON of a message has a bounded size and one form. All else ends the connection, and nothing
   but the connection.
"""

from __future__ import annotations

import hmac
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


def rank_of(said: bytes, secret: str) -> int | None:
    """Returns the rank in a greeting; None without the secret or of another version."""
    mark, protocol, their_secret, rank = _GREETING.unpack(said)
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
        text = said(error)
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

    def packed(self) -> bytes:
        """Returns the message as bytes."""
        failure = None if self.failure is None else astuple(self.failure)
        values = (self.call, self.op, self.name, self.stage, float(self.seconds), failure)
        head = json.dumps([self.kind.value, *values]).encode()
        return b"".join((_LENGTHS.pack(len(head), len(self.data)), head, self.data))

    @classmethod
    def unpacked(cls, head: bytes, data: bytes) -> Message:
        """Returns the message from its JSON and the bytes behind it.

        Raises ValueError, TypeError or RecursionError if this is no message.
        """
        kind, call, op, name, stage, seconds, failure = json.loads(head)
        failed = None if failure is None else Failure(*failure)
        types = tuple(map(type, (call, op, name, stage, seconds, *(failure or ()))))
        if types not in _TYPES:
            raise TypeError(f"the values of a message have the types {types}")
        return cls(Kind(kind), call, op, name, stage, seconds, failed, data)


_TYPES = {(int, int, str, str, float), (int, int, str, str, float, str, int, str, str)}
"""The types of a message's values, without and with a failure."""


class Link:
    """One connection."""

    def __init__(self, connected: socket.socket, is_stranger: bool = False) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_stranger = is_stranger
        """Whether the other process has yet to show the secret (rule 4)."""
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
        """Closes the connection."""
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
                self._sent.extend(map(self._socket.send, (rest,)))  # rule 3
            except BlockingIOError:
                return
            except OSError:
                # The messages that the other process sent before it ended can still be read.
                self._outgoing, self._sent = b"", []

    @property
    def greeting(self) -> bytes | None:
        """The greeting of the other process; None before all of it has arrived."""
        said = b"".join(self._greeted)
        return said if len(said) == _GREETING.size else None

    def _receive_greeting(self) -> None:
        """Takes in the greeting, as far as it has come."""
        while not self.is_lost and (missing := _GREETING.size - sum(map(len, self._greeted))):
            try:
                self._greeted.extend(map(self._socket.recv, (missing,)))  # rule 3
            except BlockingIOError:
                return
            except OSError:
                self.is_lost = True
                return
            self.is_lost = not self._greeted[-1]

    def receive(self) -> None:
        """Takes in the messages that have come; of a stranger, the greeting."""
        if self.is_stranger:
            self._receive_greeting()
            return
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
            if head > MOST_JSON_BYTES:
                self.is_lost = True
                break
            if len(data) < begin + head + body:
                break
            at = begin + head + body
            try:
                found.append(Message.unpacked(data[begin : begin + head], data[begin + head : at]))
            except (ValueError, TypeError, RecursionError):  # the sender is not a rank
                self.is_lost = True
                break
        self.has_heard |= bool(found)
        self.messages, self._received = deque((*self.messages, *found)), [data[at:]]

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
