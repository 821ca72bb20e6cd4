"""Both ends of a channel with connections: rank 0 joins the records and sends the answer.

Any process that reaches the port of rank 0 may connect. It is a *stranger* until it has shown the
secret:

1. A stranger has `GREETING_SECONDS` for its greeting; bytes that wait are read before the end of
   this time counts. Without the secret it is closed at once, and nothing of it is parsed.
2. There are at most as many strangers as missing ranks, and `MOST_STRANGERS` more. A further one
   takes the place of the oldest, also if no more files may be opened.
3. A rank may thus be closed as a stranger, unheard: among many strangers, or if it stops between
   its connection and its greeting. It connects again.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from weakref import WeakSet

from sharding.agreement.channel import (
    ANSWER_SECONDS,
    ERROR_SECONDS,
    MOST_SECONDS,
    Call,
    Channel,
    Failure,
    Join,
    Kind,
    Link,
    Message,
    WaitWarning,
    flush,
    rank_of,
)
from sharding.agreement.rendezvous import BACKLOG, Rendezvous
from sharding.errors import ENDED, LATE, TransferError


class ConnectedChannel(Channel):
    """A channel with connections, which end with the channel and which no forked child uses."""

    def __init__(self, rendezvous: Rendezvous, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._rendezvous = rendezvous
        self._is_closed = False
        _open_channels.add(self)

    def __del__(self) -> None:
        with suppress(AttributeError):  # an interrupt came during the constructor
            self.close()

    def _open(self, call: Call) -> Failure | None:
        if self._is_closed:
            message = (
                f"this process has none of the connections of rank {self.rank}: it was forked from "
                "it, or the process group has ended; save and load in the rank itself"
            )
            return Failure(call.stage, self.rank, "RuntimeError", message)
        return self._connect(call)

    @abstractmethod
    def _connect(self, call: Call) -> Failure | None:
        """Connects, or gets ready for connections; returns the failure, if any."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections."""

    def forget(self) -> None:
        """Closes the connections in a forked child: they belong to the parent."""
        self.close()


def process_failure(stage: str, rank: int) -> Failure:
    """Returns the failure of a rank whose process has ended."""
    return Failure(stage, rank, ENDED, "its process has ended, or has left the process group")


def late(stage: str, missing: Sequence[int], seconds: float) -> Failure:
    """Returns the failure of ranks that have not come in time, told as that of the first one."""
    others = f", nor have ranks {list(missing[1:9])}" if missing[1:] else ""
    message = f"it has not come within {seconds:g} s{others}"
    return Failure(stage, missing[0], LATE, message)


_open_channels: WeakSet[ConnectedChannel] = WeakSet()


def _forget_in_child() -> None:
    # If a child kept a connection open, the other ranks would not notice the end of its parent.
    for channel in tuple(_open_channels):
        channel.forget()


os.register_at_fork(after_in_child=_forget_in_child)


MOST_TRIES = 10
"""The most times that a rank connects again in one operation."""


class Participant(ConnectedChannel):
    """The end of any other rank."""

    def __init__(self, rendezvous: Rendezvous, rank: int, world_size: int) -> None:
        super().__init__(rendezvous, rank, world_size)
        self._link: Link | None = None
        self._ended: tuple[int, Failure] | None = None
        """The last call that rank 0 is known to have left, and why: all before it have ended."""

    def close(self) -> None:
        self.forget()
        self._rendezvous.forget()

    def forget(self) -> None:
        """Closes the connection in a forked child; the one to the store is the parent's."""
        if self._link is not None:
            self._link.close()
        self._is_closed = True

    def _connect(self, call: Call) -> Failure | None:
        if (failure := self._failure_of(call)) is not None:
            return failure
        if self._link is not None:
            if not self._link.has_heard:  # rank 0 may be interrupted as it lets this rank in
                self._link.receive()
            if self._link.has_heard or not self._link.is_lost:
                return None
            self._link.close()
        try:
            waiting = WaitWarning(call, self.rank)
            self._link = self._rendezvous.connect(self.rank, call.seconds + ANSWER_SECONDS, waiting)
            self._link.flush()
            self._ended = self._rendezvous.last_ended()
            return self._failure_of(call)
        except (OSError, RuntimeError) as error:
            return Failure.of(call.stage, 0, error)

    def _failure_of(self, call: Call) -> Failure | None:
        """Returns the failure that has ended the call already, if any."""
        return self._ended[1] if self._ended and self._ended[0] >= call.number else None

    def _reconnect(self, call: Call, until: float) -> Link | Failure:
        """Returns a connection in the place of one that rank 0 has closed unheard."""
        try:
            link = self._rendezvous.connect_again(self.rank, until)
            if link is not None:
                self._link = link
                link.flush()
            self._ended = self._rendezvous.last_ended()
            return self._failure_of(call) or link or process_failure(call.stage, 0)
        except (OSError, RuntimeError):  # the store is lost, with rank 0 perhaps
            return process_failure(call.stage, 0)

    def _exchange(self, call: Call, mine: Message, join: Join) -> bytes | Failure:
        link = self._link
        if link is None:
            return process_failure(mine.stage, 0)
        link.send(mine.pack())
        timeout = call.seconds + ANSWER_SECONDS
        until = monotonic() + timeout
        waiting, tries = WaitWarning(call, self.rank), 0
        while True:
            if link.has_heard:
                self._rendezvous.forget()
            while link.messages:
                found = link.messages.popleft()
                if found.kind is Kind.CALLED:
                    link.called = found.call
                    continue
                if found.failure is not None and found.call >= call.number:
                    self._ended = found.call, found.failure
                    return found.failure
                if (found.call, found.op) == (call.number, mine.op):
                    return found.data
            if link.is_lost:
                tries += 1
                if link.has_heard or tries > MOST_TRIES:
                    return process_failure(mine.stage, 0)
                link.close()
                again = self._reconnect(call, until)
                if isinstance(again, Failure):
                    return again
                link = again
                link.send(mine.pack())
                continue
            if (left := until - monotonic()) <= 0:
                failure = late(mine.stage, [0], timeout)
                self._leave(call, failure)
                return failure
            link.wait(waiting.until(left))
            if waiting.is_due and not link.messages:
                # Rank 0 listens in its first call, and lets this rank in when it waits for it.
                is_there = link.called >= call.number or not link.has_heard
                waiting.say([] if is_there else [0])

    def _say_called(self, call: Call) -> None:
        if self._link is not None:
            self._link.send(Message(Kind.CALLED, call.number).pack())

    def _leave(self, call: Call, failure: Failure) -> None:
        # An interrupt came before this rank found rank 0, or rank 0 has closed a stranger.
        if self._link is None or not self._link.has_heard:
            self._connect(replace(call, seconds=0.0))
        if self._link is not None:
            self._link.send(Message(Kind.LEFT, call.number, failure=failure).pack())


FULL = (errno.EMFILE, errno.ENFILE)
"""The error numbers for too many open files, of the process or of the machine."""
GREETING_SECONDS = 10.0
"""The time that a stranger has for its greeting."""
MOST_STRANGERS = 64


class Coordinator(ConnectedChannel):
    """The end of rank 0."""

    def __init__(self, rendezvous: Rendezvous, world_size: int) -> None:
        super().__init__(rendezvous, 0, world_size)
        self._links: dict[int, Link] = {}
        self._strangers: dict[Link, float] = {}
        """The strangers, the oldest first, and the end of the time for their greetings."""
        self._listener: socket.socket | None = None
        self._is_full = False
        """Whether a connection waits and no more files may be opened."""
        self._selector = selectors.DefaultSelector()
        """Selects from links, strangers and the listener. Its data are ranks, 0 if unknown."""

    def close(self) -> None:
        """Closes the connections, and removes the address from the store."""
        is_found = self._listener is not None and not self._is_complete and not self._is_closed
        if is_found and not sys.is_finalizing():
            self._rendezvous.withdraw()
        self.forget()

    def forget(self) -> None:
        """Closes the connections in a forked child: they belong to the parent."""
        for link in (*self._links.values(), *self._strangers):
            link.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._is_closed = True

    @property
    def _is_complete(self) -> bool:
        """Whether all ranks have connected."""
        return len(self._links) == self.world_size - 1

    def _connect(self, call: Call) -> Failure | None:
        if self._is_complete:
            return None
        # An interrupt may have ended an earlier call between any two of these steps.
        try:
            if self._listener is None:
                self._listener = self._rendezvous.listen(self.world_size)
        except (OSError, RuntimeError) as error:
            return Failure.of(call.stage, 0, error)
        if self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ)
        return None

    def _exchange(self, call: Call, mine: Message, join: Join) -> bytes | Failure:
        records: dict[int, bytes] = {0: mine.data}
        failures = {} if mine.failure is None else {0: mine.failure}
        missing = set(range(1, self.world_size))
        timeout = call.seconds
        until = monotonic() + timeout
        has_failed = False
        waiting = WaitWarning(call, self.rank)
        news: Sequence[int] = tuple(missing)
        while True:
            for rank in news:
                found = self._brought(rank, mine) if rank in missing else None
                if found is None:
                    continue
                missing.discard(rank)
                if isinstance(found, Failure):
                    failures[rank] = found
                else:
                    records[rank] = found.data
                    if monotonic() + found.seconds < until:
                        timeout, until = found.seconds, monotonic() + found.seconds
            if failures and not has_failed:
                has_failed, until = True, min(until, monotonic() + ERROR_SECONDS)
                waiting.hush()
            if not missing or (left := until - monotonic()) <= 0:
                break
            news = self._news(waiting.until(left))
            if waiting.is_due and not news:
                waiting.say([rank for rank in sorted(missing) if not self._has_called(rank, call)])
            if self._is_full:
                failures[0] = _full(mine.stage, self.world_size)
                break
        self._news(0)
        for rank in records.keys() - {0}:  # each waits for the answer, or has ended
            found = self._brought(rank, mine)
            if isinstance(found, Failure):
                failures[rank] = found
        causes = [rank for rank in failures if failures[rank].error != TransferError.__name__]
        if causes:
            return self._tell(call, failures[min(causes)])
        if missing:
            return self._tell(call, late(mine.stage, sorted(missing), timeout))
        if failures:
            return self._tell(call, failures[min(failures)])
        try:
            answer = join([records[rank] for rank in range(self.world_size)])
        except Exception as error:
            return self._tell(call, Failure.of(mine.stage, 0, error))
        self._send(replace(mine, kind=Kind.ANSWER, data=answer), call.seconds)
        return answer

    def _has_called(self, rank: int, call: Call) -> bool:
        return rank in self._links and self._links[rank].called >= call.number

    def _say_called(self, call: Call) -> None:
        self._send(Message(Kind.CALLED, call.number), 0.0)

    def _leave(self, call: Call, failure: Failure) -> None:
        self._connect(call)  # an interrupt may have come first; others look for this rank
        self._news(0)
        self._tell(call, failure)

    def _tell(self, call: Call, failure: Failure) -> Failure:
        """Ends the call for all."""
        if not self._is_complete and not self._is_closed:
            # A rank that connects later finds the failure in the store. A rank that has connected
            # is let in, and told with the rest.
            if self._is_full and self._listener is not None:
                # A store may need a file. The ranks that wait connect again, and find the failure.
                self._selector.unregister(self._listener)
                self._listener.close()
                self._listener, self._is_full = None, False
            self._rendezvous.leave_failure(call.number, failure)
            self._connect(call)
            # A rank that is there has connected by now: the second look reads its greeting.
            # Strangers may go on to come and go.
            for _ in range(MOST_STRANGERS):
                if not self._has_news_of_strangers():
                    break
        self._send(Message(Kind.LEFT, call.number, failure=failure), ANSWER_SECONDS)
        return failure

    def _has_news_of_strangers(self) -> bool:
        """Whether a process has connected, or has named its rank, since the last look."""
        before = len(self._links), len(self._strangers)
        self._news(0)
        return before != (len(self._links), len(self._strangers))

    def _send(self, message: Message, seconds: float) -> None:
        packed = message.pack()
        links = tuple(self._links.values())
        for link in links:
            link.send(packed)
        if any(link.is_sending for link in links):
            flush(links, seconds)

    def _brought(self, rank: int, mine: Message) -> Message | Failure | None:
        """Returns a rank's message to an operation, or its failure; None before it has come."""
        link = self._links.get(rank)
        if link is None:
            return None
        while link.messages:
            found = link.messages[0]
            if found.kind is Kind.CALLED:
                link.called = found.call
                link.messages.popleft()
                continue
            if found.call > mine.call:
                return _out_of_step(rank, found, mine)
            link.messages.popleft()
            if found.call < mine.call:
                continue  # the rank has been told that this call is over
            if found.failure is not None:
                return found.failure
            if (found.op, found.name, found.stage) != (mine.op, mine.name, mine.stage):
                return _out_of_step(rank, found, mine)
            return found
        return process_failure(mine.stage, rank) if link.is_lost else None

    def _news(self, seconds: float) -> list[int]:
        """Returns the ranks from which bytes arrive within so many seconds."""
        ranks: list[int] = []
        if self._is_closed:
            return ranks
        now = monotonic()
        for stranger, until in tuple(self._strangers.items()):
            # An interrupt may have come before a stranger was registered, or a rank was let in.
            with suppress(KeyError):
                self._selector.register(stranger, selectors.EVENT_READ, 0)
            if until <= now or stranger.greeting is not None:
                ranks += self._greet(stranger)
        if ranks:
            seconds = 0.0
        elif self._strangers:
            seconds = min(seconds, max(0.0, next(iter(self._strangers.values())) - now))
        for key, _ in self._selector.select(min(seconds, MOST_SECONDS)):
            link = key.fileobj
            if not isinstance(link, Link):
                ranks += self._accept()
            elif key.data:
                link.receive()
                ranks.append(key.data)
                if link.is_lost:
                    self._selector.unregister(link)
            elif link in self._strangers:  # none has taken its place since
                ranks += self._greet(link)
        return ranks

    def _accept(self) -> list[int]:
        """Accepts the connections that wait, and returns the ranks among them."""
        ranks: list[int] = []
        self._is_full = False
        for _ in range(max(BACKLOG, self.world_size) + 1):  # the most connections that wait
            assert self._listener is not None
            until = monotonic() + GREETING_SECONDS
            try:
                link = Link(self._listener.accept()[0], is_stranger=True)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in FULL:
                    continue  # of this connection, which has ended already
                oldest = self._oldest_stranger()
                if oldest is None:
                    self._is_full = True
                    break
                ranks += self._greet(oldest, is_last=True)
                continue
            self._strangers[link] = until  # first: `_news` registers it after an interrupt here
            self._selector.register(link, selectors.EVENT_READ, 0)
            ranks += self._greet(link)
            if self._is_complete:
                break
            most = self.world_size - 1 - len(self._links) + MOST_STRANGERS
            if len(self._strangers) > most and (oldest := self._oldest_stranger()) is not None:
                ranks += self._greet(oldest, is_last=True)
        return ranks

    def _oldest_stranger(self) -> Link | None:
        return next((link for link in self._strangers if link.is_stranger), None)

    def _greet(self, link: Link, is_last: bool = False) -> list[int]:
        """Returns the rank that a stranger is; none without its greeting.

        Closes a stranger that is no missing rank, is late, or has its last look.
        """
        link.receive()
        rank = self._rank_of(link)
        if rank is not None and self._links.get(rank, link) is link:
            return self._let_in(link, rank)
        is_late = self._strangers.get(link, 0.0) <= monotonic()
        if link.greeting is not None or link.is_lost or is_last or is_late:
            self._close(link)
        return []

    def _close(self, stranger: Link) -> None:
        with suppress(KeyError, ValueError):  # an interrupt came after this step
            self._selector.unregister(stranger)
        self._strangers.pop(stranger, None)
        stranger.close()

    def _rank_of(self, link: Link) -> int | None:
        """Returns the rank in a link's greeting; None without the secret, or before it has come."""
        greeting = link.greeting
        rank = None if greeting is None else rank_of(greeting, self._rendezvous.secret)
        return rank if rank is not None and 0 < rank < self.world_size else None

    def _let_in(self, link: Link, rank: int) -> list[int]:
        # The stranger is removed last: an interrupt may come between any two of these steps.
        self._links[rank] = link
        self._selector.modify(link, selectors.EVENT_READ, rank)
        link.is_stranger = False
        link.receive()
        self._strangers.pop(link, None)
        if self._is_complete and self._listener is not None:
            for stranger in [link for link in self._strangers if link.is_stranger]:
                self._close(stranger)
            self._selector.unregister(self._listener)
            self._listener.close()
            self._rendezvous.withdraw()
        return [rank]


def _full(stage: str, world_size: int) -> Failure:
    message = (
        f"it may open no more files, and needs one for each of the other {world_size - 1} ranks: "
        "raise its limit (ulimit -n), or that of the machine"
    )
    return Failure(stage, 0, "OSError", message)


def _out_of_step(rank: int, found: Message, mine: Message) -> Failure:
    message = (
        "it is in no call" if found.kind is Kind.LEFT else f"it is in {found.name} ({found.stage})"
    )
    return Failure(
        mine.stage,
        rank,
        "OutOfStep",
        f"{message}, and rank 0 in {mine.name} ({mine.stage}): call the same on all ranks, in the "
        "same order",
    )
