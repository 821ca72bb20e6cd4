"""The common part of both ends of a channel with connections.

The end of any other rank: it sends its record to rank 0, and waits for the answer.

Rank 0 may take a rank for a stranger, and close its connection unheard: among many strangers, or if
the rank stops between its connection and its greeting. Such a rank connects again.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from weakref import WeakSet

from sharding.agreement.channel import (
    ANSWER_SECONDS,
    Call,
    Channel,
    Failure,
    Join,
    Kind,
    Link,
    Message,
    WaitWarning,
)
from sharding.agreement.rendezvous import Rendezvous
from sharding.errors import ENDED, LATE


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
            said = (
                f"this process has none of the connections of rank {self.rank}: it was forked from "
                "it, or the process group has ended; save and load in the rank itself"
            )
            return Failure(call.stage, self.rank, "RuntimeError", said)
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
    said = f"it has not come within {seconds:g} s{others}"
    return Failure(stage, missing[0], LATE, said)


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

    def close(self) -> None:
        """Closes the connection."""
        self.forget()
        self._rendezvous.forget()

    def forget(self) -> None:
        """Closes the connection in a forked child; the one to the store is the parent's."""
        if self._link is not None:
            self._link.close()
        self._is_closed = True

    def _connect(self, call: Call) -> Failure | None:
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
            return self._find_earlier_failure(call)
        except (OSError, RuntimeError) as error:
            return Failure.of(call.stage, 0, error)

    def _find_earlier_failure(self, call: Call) -> Failure | None:
        """Returns the failure that has ended the call before rank 0 let this rank in."""
        left = self._rendezvous.last_ended()
        if left is None or left[0] < call.number:
            return None
        self._number = left[0]
        return left[1]

    def _reconnect(self, call: Call, until: float) -> Link | Failure:
        """Returns a connection in the place of one that rank 0 has closed unheard."""
        try:
            link = self._rendezvous.connect_again(self.rank, until)
            if link is not None:
                self._link = link
                link.flush()
            return self._find_earlier_failure(call) or link or process_failure(call.stage, 0)
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
                    self._catch_up(link, found)
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

    def _catch_up(self, link: Link, found: Message) -> None:
        """Continues the count from the last call that is over."""
        link.receive()
        left = [one.call for one in link.messages if one.kind is Kind.LEFT]
        self._number = max([self._number, found.call, *left])

    def _say_called(self, call: Call) -> None:
        if self._link is not None:
            self._link.send(Message(Kind.CALLED, call.number).pack())

    def _leave(self, call: Call, failure: Failure) -> None:
        # An interrupt came before this rank found rank 0, or rank 0 has closed a stranger.
        if self._link is None or not self._link.has_heard:
            self._connect(replace(call, seconds=0.0))
        if self._link is not None:
            self._link.send(Message(Kind.LEFT, call.number, failure=failure).pack())
