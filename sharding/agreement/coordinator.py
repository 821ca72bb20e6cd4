"""The end of rank 0: it receives each rank's record, and sends all ranks the answer."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from time import monotonic
from typing import IO

from sharding.agreement.channel import ANSWER_SECONDS, ERROR_SECONDS, Call, Join
from sharding.agreement.connected import ConnectedChannel, ended, late
from sharding.agreement.links import MOST_SECONDS, Failure, Kind, Link, Message, flush
from sharding.agreement.rendezvous import Rendezvous
from sharding.agreement.wait_warning import WaitWarning
from sharding.errors import TransferError

FULL = (errno.EMFILE, errno.ENFILE)
"""The error numbers for too many open files, of the process or of the machine."""


class Coordinator(ConnectedChannel):
    """The end of rank 0."""

    def __init__(self, rendezvous: Rendezvous, world_size: int) -> None:
        super().__init__(rendezvous, 0, world_size)
        self._links: dict[int, Link] = {}
        self._strangers: set[Link] = set()
        """Connections whose first message has not arrived."""
        self._listener: socket.socket | None = None
        self._is_full = False
        """Whether a connection waits and no more files may be opened."""
        self._spare: IO[bytes] | None = None
        """A file to close in that case, so that a waiting rank can be told."""
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
        for each in (self._listener, self._spare):
            if each is not None:
                each.close()
        self._selector.close()
        self._is_closed = True

    @property
    def _is_complete(self) -> bool:
        """Whether all ranks have connected."""
        return len(self._links) == self.world_size - 1

    def _connected(self, call: Call) -> Failure | None:
        if self._is_complete:
            return None
        # An interrupt may have ended an earlier call between any two of these steps.
        try:
            if self._listener is None:
                self._listener = self._rendezvous.listen(self.world_size)
            if self._spare is None:
                self._spare = open(os.devnull, "rb")  # noqa: SIM115 - until all have connected
        except (OSError, RuntimeError) as error:
            return Failure.of(call.stage, 0, error)
        if self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ)
        return None

    def _meet(self, call: Call, mine: Message, join: Join) -> bytes | Failure:
        records: dict[int, bytes] = {0: mine.data}
        failures = {} if mine.failure is None else {0: mine.failure}
        missing = set(range(1, self.world_size))
        patience = call.seconds
        until = monotonic() + patience
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
                        patience, until = found.seconds, monotonic() + found.seconds
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
            return self._tell(call, late(mine.stage, sorted(missing), patience))
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
        self._connected(call)  # an interrupt may have come first; others look for this rank
        self._news(0)
        self._tell(call, failure)

    def _tell(self, call: Call, failure: Failure) -> Failure:
        """Ends the call for all, and the calls that others have left while this rank was away."""
        for link in self._links.values():
            left = [message.call for message in link.messages if message.kind is Kind.LEFT]
            self._number = max([self._number, *left])
        if not self._is_complete and not self._is_closed:
            # A rank that connects later finds the failure in the store. A rank that has connected
            # is let in, and told with the rest.
            with self._one_more_file():  # a store may need a file
                self._rendezvous.leave_word(self._number, failure)
            while self._let_in():
                pass
        word = Message(Kind.LEFT, self._number, failure=failure)
        self._send(word, ANSWER_SECONDS)
        if self._is_full:
            self._turn_away(replace(word, kind=Kind.REFUSED))
        return failure

    def _turn_away(self, message: Message) -> None:
        """Tells the ranks that cannot be let in, one after the other."""
        assert self._listener is not None
        packed, self._is_full = message.packed(), False
        with suppress(OSError):  # no rank is left, or another thread has taken the free file
            while True:
                with self._one_more_file():
                    link = Link(self._listener.accept()[0])
                    link.receive()
                    link.send(packed)
                    link.close()

    @contextmanager
    def _one_more_file(self) -> Iterator[None]:
        """Allows one more open file inside the block."""
        if self._spare is not None:
            self._spare.close()
        try:
            yield
        finally:
            with suppress(OSError):
                self._spare = open(os.devnull, "rb")  # noqa: SIM115

    def _let_in(self) -> bool:
        """Whether a process has connected, or has named its rank, since the last look."""
        before = len(self._links), len(self._strangers)
        self._news(0)
        return before != (len(self._links), len(self._strangers))

    def _send(self, message: Message, seconds: float) -> None:
        packed = message.packed()
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
        return ended(mine.stage, rank) if link.is_lost else None

    def _news(self, seconds: float) -> list[int]:
        """Returns the ranks from which bytes arrive within so many seconds."""
        ranks: list[int] = []
        if self._is_closed:
            return ranks
        for stranger in self._strangers:  # an interrupt may have left one half read
            stranger.receive()
        if any(stranger.messages for stranger in self._strangers):
            seconds = 0.0
        for key, _ in self._selector.select(min(seconds, MOST_SECONDS)):
            link = key.fileobj
            if not isinstance(link, Link):
                self._accept()
                continue
            link.receive()
            if key.data:
                ranks.append(key.data)
                if link.is_lost:
                    self._selector.unregister(link)
            else:
                self._strangers.add(link)
        for stranger in tuple(self._strangers):
            if stranger.messages:
                ranks += self._introduced(stranger)
            if stranger.is_lost:
                self._selector.unregister(stranger)
            if stranger.is_lost and stranger in self._strangers:
                self._strangers.discard(stranger)
                stranger.close()
        return ranks

    def _accept(self) -> None:
        assert self._listener is not None
        self._is_full = False
        try:
            while True:
                link = Link(self._listener.accept()[0])
                self._selector.register(link, selectors.EVENT_READ, 0)
                self._strangers.add(link)
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._is_full = True

    def _introduced(self, link: Link) -> list[int]:
        """Returns the rank that a stranger names; none without the word, or for a known rank."""
        said = link.messages[0]
        is_known = (said.kind, said.name) == (Kind.HELLO, self._rendezvous.word)
        if not is_known or self._links.get(said.op, link) is not link:
            link.is_lost = True  # no more of its messages are read
            return []
        # The message is removed last: an interrupt may come between any two of these steps.
        self._links[said.op] = link
        self._selector.modify(link, selectors.EVENT_READ, said.op)
        self._strangers.discard(link)
        link.messages.popleft()
        if self._is_complete and self._listener is not None and self._spare is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._spare.close()
            self._rendezvous.withdraw()
        return [said.op]


def _full(stage: str, world_size: int) -> Failure:
    said = (
        f"it may open no more files, and needs one for each of the other {world_size - 1} ranks: "
        "raise its limit (ulimit -n), or that of the machine"
    )
    return Failure(stage, 0, "OSError", said)


def _out_of_step(rank: int, found: Message, mine: Message) -> Failure:
    said = (
        "it is in no call" if found.kind is Kind.LEFT else f"it is in {found.name} ({found.stage})"
    )
    return Failure(
        mine.stage,
        rank,
        "OutOfStep",
        f"{said}, and rank 0 in {mine.name} ({mine.stage}): call the same on all ranks, in the "
        "same order",
    )
