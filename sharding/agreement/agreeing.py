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
7. What a call begins in another thread, its *sequel*, has a channel of its own, and the call's
   number there: ranks that never came to it stay in step. Who leaves a call when the others may
   have gone on tells them in both channels.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from threading import Lock, RLock
from time import monotonic
from typing import IO, ClassVar
from weakref import WeakSet

from sharding.agreement.links import MOST_SECONDS, Failure, Kind, Link, Message, flush
from sharding.agreement.meeting import Meeting
from sharding.errors import TransferError

TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for another where nobody says otherwise."""
ANSWER_SECONDS = 5.0
"""How much longer the others wait than rank 0."""
ERROR_SECONDS = 5.0
"""How long rank 0 waits for the rest once one has failed."""
FULL = (errno.EMFILE, errno.ENFILE)
"""Of a process that may open no more files, or a machine."""
ENDED, LATE, OUT_OF_STEP = "ProcessEnded", "TimeoutError", "OutOfStep"
"""Errors of ranks that could not say them themselves."""

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


class Sequel:
    """What goes on after a call in another thread: either that begins it, or the call leaves it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.call: Call | None = None
        """That it is the sequel of."""
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
        self, name: str, seconds: float, number: int | None = None, then: Sequel | None = None
    ) -> Iterator[Call]:
        """Be in a call, the same on all ranks; or, inside of one, in that.

        A sequel has the number of the call that it goes on from, which gave it as `then`.
        """
        with self._lock:
            if self._call is not None:
                self._prepare(then, self._call)
                yield self._call
                return
            self._number = self._number + 1 if number is None else number
            call = self._call = Call(self._number, name, seconds, name)
            token = _seconds.set(seconds)
            try:
                call.failure = self._open(call)
                self._prepare(then, call)
                yield call
            except BaseException as error:
                if call.failure is None:
                    failure = Failure.of(call.stage, self.rank, error)
                    self._leave(call, failure)
                    if then is not None and call.ops and then.take():
                        then.channel._leave_sequel(call, failure)
                raise
            finally:
                _seconds.reset(token)
                self._call = None

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

    def _prepare(self, then: Sequel | None, call: Call) -> None:
        """Let the others connect for a sequel, before they are told that this rank has come."""
        if then is not None:
            then.call = call
            if self.rank == 0 and call.failure is None:
                failure = then.channel.connect(call)
                if failure is not None:
                    self._leave(call, failure)
                    call.failure = failure

    def connect(self, call: Call) -> Failure | None:
        """For the sequel of a call: on rank 0 listen; on others connect to it, or say why not."""
        return self._open(call)  # not under the lock, which an earlier sequel may have

    def _leave_sequel(self, call: Call, failure: Failure) -> None:
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


class _Linked(Channel):
    """A channel with connections, which end with it and are not a forked child's."""

    def __init__(self, meeting: Meeting, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._meeting = meeting
        self._is_closed = False
        _linked.add(self)

    def __del__(self) -> None:
        self.close()

    def _open(self, call: Call) -> Failure | None:
        if self._is_closed:
            said = (
                f"this process has none of the connections of rank {self.rank}: it was forked from "
                "it, or the process group has ended; save and load in the rank itself"
            )
            return Failure(call.stage, self.rank, "RuntimeError", said)
        return self._connected(call)

    @abstractmethod
    def _connected(self, call: Call) -> Failure | None:
        """Have what it takes to reach the others, or say why not."""

    @abstractmethod
    def close(self) -> None:
        """Nobody is reached any more."""

    def forget(self) -> None:
        """In a forked child: the connections are the parent's."""
        self.close()


class Leader(_Linked):
    """Rank 0's end."""

    def __init__(self, meeting: Meeting, world_size: int) -> None:
        super().__init__(meeting, 0, world_size)
        self._links: dict[int, Link] = {}
        self._strangers: set[Link] = set()
        """That have connected and not said who they are."""
        self._listener: socket.socket | None = None
        self._is_full = False
        """More have connected, and no more files may be opened."""
        self._spare: IO[bytes] | None = None
        """A file to close then, so as to tell them."""
        self._selector = selectors.DefaultSelector()
        """Of all these; its data are ranks, 0 for who has not said one."""

    def close(self) -> None:
        """Nobody is reached any more, and nobody finds the address."""
        is_found = self._listener is not None and not self._is_complete and not self._is_closed
        if is_found and not sys.is_finalizing():
            self._meeting.withdraw()
        self.forget()

    def forget(self) -> None:
        """In a forked child: the connections are the parent's."""
        for link in (*self._links.values(), *self._strangers):
            link.close()
        for each in (self._listener, self._spare):
            if each is not None:
                each.close()
        self._selector.close()
        self._is_closed = True

    @property
    def _is_complete(self) -> bool:
        """Whether all have connected."""
        return len(self._links) == self.world_size - 1

    def _connected(self, call: Call) -> Failure | None:
        if self._listener is None:
            try:
                self._listener = self._meeting.listen(self.world_size)
                self._spare = open(os.devnull, "rb")  # noqa: SIM115 - until all have connected
            except (OSError, RuntimeError) as error:
                return Failure.of(call.stage, 0, error)
            self._selector.register(self._listener, selectors.EVENT_READ)
        return None

    def _meet(self, call: Call, mine: Message, join: Join) -> bytes | Failure:
        records: dict[int, bytes] = {0: mine.data}
        failures = {} if mine.failure is None else {0: mine.failure}
        missing = set(range(1, self.world_size))
        patience = call.seconds
        until = monotonic() + patience
        has_failed = False
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
            if not missing or (left := until - monotonic()) <= 0:
                break
            news = self._news(left)
            if self._is_full:
                failures[0] = _full(mine.stage, self.world_size)
                break
        self._news(0)
        for rank in records.keys() - {0}:  # whoever has come waits for the answer, or is gone
            found = self._brought(rank, mine)
            if isinstance(found, Failure):
                failures[rank] = found
        causes = [rank for rank in failures if failures[rank].error != TransferError.__name__]
        if causes:
            return self._tell(call, failures[min(causes)])
        if missing:
            return self._tell(call, _late(mine.stage, sorted(missing), patience))
        if failures:
            return self._tell(call, failures[min(failures)])
        try:
            answer = join([records[rank] for rank in range(self.world_size)])
        except Exception as error:
            return self._tell(call, Failure.of(mine.stage, 0, error))
        self._send(replace(mine, kind=Kind.ANSWER, data=answer), call.seconds)
        return answer

    def _leave(self, call: Call, failure: Failure) -> None:
        self._news(0)
        self._tell(call, failure)

    def _tell(self, call: Call, failure: Failure) -> Failure:
        """End the call for all: and those that others have left while this rank was away."""
        for link in self._links.values():
            left = [message.call for message in link.messages if message.kind is Kind.LEFT]
            self._number = max([self._number, *left])
        if not self._is_complete and not self._is_closed:
            # Who connects from here on finds the word; who has is let in, to be told with the rest.
            with self._one_more_file():  # a store may need it
                self._meeting.leave_word(self._number, failure)
            while self._let_in():
                pass
        word = Message(Kind.LEFT, self._number, failure=failure)
        self._send(word, ANSWER_SECONDS)
        if self._is_full:
            self._turn_away(replace(word, kind=Kind.REFUSED))
        return failure

    def _turn_away(self, message: Message) -> None:
        """Tell those that cannot be let in, one after the other."""
        assert self._listener is not None
        packed, self._is_full = message.packed(), False
        with suppress(OSError):  # nobody is left; or the file that was closed is used elsewhere
            while True:
                with self._one_more_file():
                    link = Link(self._listener.accept()[0])
                    link.receive()
                    link.send(packed)
                    link.close()

    @contextmanager
    def _one_more_file(self) -> Iterator[None]:
        """Inside, one more may be opened than else."""
        if self._spare is not None:
            self._spare.close()
        try:
            yield
        finally:
            with suppress(OSError):
                self._spare = open(os.devnull, "rb")  # noqa: SIM115

    def _let_in(self) -> bool:
        """Whether somebody has connected, or said who it is, since the last look."""
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
        """What a rank has brought to an operation, if it has come."""
        link = self._links.get(rank)
        if link is None:
            return None
        while link.messages:
            found = link.messages[0]
            if found.call > mine.call:
                return _out_of_step(rank, found, mine)
            link.messages.popleft()
            if found.call < mine.call:
                continue  # it has been told that this is over
            if found.failure is not None:
                return found.failure
            if (found.op, found.name, found.stage) != (mine.op, mine.name, mine.stage):
                return _out_of_step(rank, found, mine)
            return found
        return _ended(mine.stage, rank) if link.is_lost else None

    def _news(self, seconds: float) -> list[int]:
        """The ranks that something has come from, if within so many seconds."""
        ranks: list[int] = []
        if self._is_closed:
            return ranks
        for key, _ in self._selector.select(min(seconds, MOST_SECONDS)):
            link = key.fileobj
            if not isinstance(link, Link):
                self._accept()
                continue
            link.receive()
            rank = key.data or self._introduced(link)
            if link.is_lost:
                self._selector.unregister(link)
            if link.is_lost and link in self._strangers:
                self._strangers.discard(link)
                link.close()
            if rank:
                ranks.append(rank)
        return ranks

    def _accept(self) -> None:
        assert self._listener is not None
        self._is_full = False
        try:
            while True:
                link = Link(self._listener.accept()[0])
                self._strangers.add(link)
                self._selector.register(link, selectors.EVENT_READ, 0)
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._is_full = True

    def _introduced(self, link: Link) -> int:
        """The rank of one that says who it is; 0 if it does not."""
        if not link.messages:
            return 0
        said = link.messages.popleft()
        is_known = (said.kind, said.name) == (Kind.HELLO, self._meeting.word)
        if not is_known or said.op in self._links:
            link.is_lost = True  # and not listened to
            return 0
        self._strangers.discard(link)
        self._links[said.op] = link
        self._selector.modify(link, selectors.EVENT_READ, said.op)
        if self._is_complete and self._listener is not None and self._spare is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._spare.close()
            self._meeting.withdraw()
        return said.op


class Follower(_Linked):
    """The end of any other rank."""

    def __init__(self, meeting: Meeting, rank: int, world_size: int) -> None:
        super().__init__(meeting, rank, world_size)
        self._link: Link | None = None

    def close(self) -> None:
        """Nobody is reached any more."""
        if self._link is not None:
            self._link.close()
        self._is_closed = True

    def _connected(self, call: Call) -> Failure | None:
        if self._link is not None:
            return None
        try:
            self._link = self._meeting.connect(self.rank, call.seconds + ANSWER_SECONDS)
            left = self._meeting.left()
        except (OSError, RuntimeError) as error:
            return Failure.of(call.stage, 0, error)
        finally:
            self._meeting.forget()
        if left is not None and left[0] >= call.number:
            self._number = left[0]
            return left[1]
        return None

    def _meet(self, call: Call, mine: Message, join: Join) -> bytes | Failure:
        link = self._link
        if link is None:
            return _ended(mine.stage, 0)
        link.send(mine.packed())
        patience = call.seconds + ANSWER_SECONDS
        until = monotonic() + patience
        while True:
            while link.messages:
                found = link.messages.popleft()
                if found.kind is Kind.REFUSED:
                    link.close()
                    self._link = None
                    if found.call < call.number:  # of a call that is over
                        return self._connected(call) or self._meet(call, mine, join)
                if found.failure is not None and found.call >= call.number:
                    self._catch_up(link, found)
                    return found.failure
                if (found.call, found.op) == (call.number, mine.op):
                    return found.data
            if link.is_lost:
                return _ended(mine.stage, 0)
            if (left := until - monotonic()) <= 0:
                failure = _late(mine.stage, [0], patience)
                self._leave(call, failure)
                return failure
            link.wait(left)

    def _catch_up(self, link: Link, found: Message) -> None:
        """Count on from the last call that is known to be over."""
        link.receive()
        left = [one.call for one in link.messages if one.kind is Kind.LEFT]
        self._number = max([self._number, found.call, *left])

    def _leave(self, call: Call, failure: Failure) -> None:
        if self._link is not None:
            self._link.send(Message(Kind.LEFT, call.number, failure=failure).packed())


class Pretended(Channel):
    """Ranks that are not there, as in a process group of torch's backend "fake": they all agree."""

    def _open(self, call: Call) -> Failure | None:
        return None

    def _meet(self, call: Call, mine: Message, join: Join) -> bytes | Failure:
        return mine.failure or join([mine.data] * self.world_size)

    def _leave(self, call: Call, failure: Failure) -> None:
        pass


def _ended(stage: str, rank: int) -> Failure:
    return Failure(stage, rank, ENDED, "its process has ended, or has left the process group")


def _full(stage: str, world_size: int) -> Failure:
    said = (
        f"it may open no more files, and needs one for each of the other {world_size - 1} ranks: "
        "raise its limit (ulimit -n), or that of the machine"
    )
    return Failure(stage, 0, "OSError", said)


def _late(stage: str, missing: Sequence[int], seconds: float) -> Failure:
    others = f", nor have ranks {list(missing[1:9])}" if missing[1:] else ""
    said = f"it has not come within {seconds:g} s{others}"
    return Failure(stage, missing[0], LATE, said)


def _out_of_step(rank: int, found: Message, mine: Message) -> Failure:
    said = (
        "it is in no call" if found.kind is Kind.LEFT else f"it is in {found.name} ({found.stage})"
    )
    return Failure(
        mine.stage,
        rank,
        OUT_OF_STEP,
        f"{said}, and rank 0 in {mine.name} ({mine.stage}): call the same on all ranks, in the "
        "same order",
    )


_linked: WeakSet[_Linked] = WeakSet()


def _forget_in_child() -> None:
    # A child that held a connection open would hide its parent's end from the others.
    for channel in tuple(_linked):
        channel.forget()


os.register_at_fork(after_in_child=_forget_in_child)
