"""The end of any other rank: it sends its record to rank 0, and waits for the answer."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

from sharding.agreement.channel import ANSWER_SECONDS, Call, Join
from sharding.agreement.connected import ConnectedChannel, ended, late
from sharding.agreement.links import Failure, Kind, Link, Message
from sharding.agreement.rendezvous import Rendezvous
from sharding.agreement.wait_warning import WaitWarning


class Participant(ConnectedChannel):
    """The end of any other rank."""

    def __init__(self, rendezvous: Rendezvous, rank: int, world_size: int) -> None:
        super().__init__(rendezvous, rank, world_size)
        self._link: Link | None = None

    def close(self) -> None:
        """Closes the connection."""
        if self._link is not None:
            self._link.close()
        self._is_closed = True

    def _connected(self, call: Call) -> Failure | None:
        if self._link is not None:
            if not self._link.has_heard:  # rank 0 may be interrupted as it lets this rank in
                self._link.receive()
            if self._link.has_heard or not self._link.is_lost:
                return None
        try:
            waiting = WaitWarning(call, self.rank)
            self._link = self._rendezvous.connect(self.rank, call.seconds + ANSWER_SECONDS, waiting)
            self._link.flush()
            left = self._rendezvous.left()
        except (OSError, RuntimeError) as error:
            return Failure.of(call.stage, 0, error)
        finally:
            self._rendezvous.forget()
        if left is not None and left[0] >= call.number:
            self._number = left[0]
            return left[1]
        return None

    def _meet(self, call: Call, mine: Message, join: Join) -> bytes | Failure:
        link = self._link
        if link is None:
            return ended(mine.stage, 0)
        link.send(mine.packed())
        patience = call.seconds + ANSWER_SECONDS
        until = monotonic() + patience
        waiting = WaitWarning(call, self.rank)
        while True:
            while link.messages:
                found = link.messages.popleft()
                if found.kind is Kind.CALLED:
                    link.called = found.call
                    continue
                if found.kind is Kind.REFUSED:
                    link.close()
                    self._link = None
                    if found.call < call.number:  # the refused call is over
                        return self._connected(call) or self._meet(call, mine, join)
                if found.failure is not None and found.call >= call.number:
                    self._catch_up(link, found)
                    return found.failure
                if (found.call, found.op) == (call.number, mine.op):
                    return found.data
            if link.is_lost:
                return ended(mine.stage, 0)
            if (left := until - monotonic()) <= 0:
                failure = late(mine.stage, [0], patience)
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
            self._link.send(Message(Kind.CALLED, call.number).packed())

    def _leave(self, call: Call, failure: Failure) -> None:
        if self._link is None:  # an interrupt came before this rank found rank 0
            self._connected(replace(call, seconds=0.0))
        if self._link is not None:
            self._link.send(Message(Kind.LEFT, call.number, failure=failure).packed())
