"""Exchanges of small records, never of tensors, between the processes of a job.

Rules:

1. Every rank enters every operation, in the same order. A step that can fail runs before an
   operation, which carries the failure; then all ranks raise.
2. Each wait has an end: within the time-out of the call all ranks have one answer, or one error
   that names a rank that failed, has ended or has not come (`sharding.agreement.channel`).
3. An operation is a message to rank 0 and a message back, over connections of our own. Ranks find
   each other by the store of their process group.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

from sharding.agreement.call_events import Clock, time_call
from sharding.agreement.channel import (
    TIMEOUT_SECONDS,
    Call,
    Channel,
    Continuation,
    Failure,
    FakeChannel,
    Join,
    waiting_seconds,
)
from sharding.agreement.coordinator import Coordinator, Participant
from sharding.agreement.rendezvous import Rendezvous
from sharding.errors import (
    ArgumentError,
    ArgumentTypeError,
    CkptError,
    DestroyedGroupError,
    NotAMemberError,
    RankError,
    TransferError,
)
from sharding.layout import Mesh

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    Group = ProcessGroup | Literal["self"] | None
    """The ranks that act together: a process group, this rank alone, or the default group."""

T = TypeVar("T")

SELF = "self"
"""The argument, in the place of a process group, for this process alone."""
HASH_BITS = 62
"""The bits of a hash: a hash fits into an int64, as does rank 0's number."""
_channels: WeakKeyDictionary[ProcessGroup, dict[str, Channel]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of `Ranks.agree`, equal on all ranks."""

    same: Mapping[str, bool]
    """For each hash, by its name: whether all ranks gave the same."""
    number: int
    """Rank 0's number."""
    balanced: bool
    """Whether the ranks' balances add up to zero."""
    note: bytes
    """Rank 0's note."""


class Ranks:
    """The processes that act together: those of a process group, or this process alone without one.

    A rank waits for another up to `seconds`, by default those of the call that it is in. Each
    `purpose` has its own connections, so that the messages of two threads do not mix.
    `group="self"` is this process alone, even if it belongs to process groups.
    """

    def __init__(
        self,
        group: Group = None,
        seconds: float | None = None,
        purpose: str = "calls",
    ) -> None:
        self.rank, self.world_size = 0, 1
        self.mesh = _world(1)
        """The processes by their rank in the default group. Layouts use these ranks."""
        self.told: tuple[int, str] | None = None
        """The failure that the ranks agreed on: the rank and the class of its error. All ranks have
        the same failure, also if several ranks failed."""
        self._seconds = seconds
        self._channel: Channel | None = None
        self._continuation: Continuation | None = None
        self._clock: Clock | None = None
        if group == SELF and "torch.distributed" not in sys.modules:
            return  # a second of start-up, which one process does not need
        import torch.distributed as dist

        is_here = dist.is_available() and dist.is_initialized()
        _check_group(group, is_here)
        if isinstance(group, str):
            if is_here:
                self.mesh = Mesh.of_ranks(("world",), (1,), [dist.get_rank()])
        elif is_here:
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
            if self.rank < 0:
                raise NotAMemberError(
                    "this rank is not in the process group that it passed; pass a group of its own"
                )
            if group is None:
                self.mesh = _world(self.world_size)
            else:
                members = dist.get_process_group_ranks(group)
                self.mesh = Mesh.of_ranks(("world",), (self.world_size,), members)
        if not self.is_single_process:
            assert not isinstance(group, str)
            self._channel = _channel(group, self.rank, purpose)

    @property
    def global_rank(self) -> int:
        """The rank of this process in the default group, as layouts use it."""
        return self.mesh.rank((self.rank,))

    @property
    def is_single_process(self) -> bool:
        """Whether there is no other process."""
        return self.world_size == 1

    @contextmanager
    def call(
        self, name: str, then: Ranks | None = None, clock: Clock | None = None
    ) -> Iterator[None]:
        """Enters a call that all ranks enter: an error that ends it on one rank ends it on all.

        `then` are the same ranks, with connections for the continuation of the call in another
        thread. A rank that leaves the call before its continuation has begun leaves both. `clock`
        has measured the call since before the ranks entered it; the caller ends it.
        """
        if then is not None and then._channel is not None:
            then._continuation = Continuation(then._channel)
        before = self._clock
        try:
            with (
                time_call(name, self.rank, self.world_size)
                if clock is None
                else nullcontext(clock) as self._clock,
                self._call(name, None if then is None else then._continuation),
            ):
                yield
        finally:
            self._clock = before

    def doing(self, stage: str) -> None:
        """Names the stage of this rank, which the others hear if this rank leaves the call."""
        if self._clock is not None:
            self._clock.doing(stage)
        with self._call(stage) as call:
            if call is not None:
                call.stage = stage

    def count(self, nbytes: int) -> None:
        """Counts bytes of tensors that this rank read or wrote in this stage, for observers."""
        if self._clock is not None:
            self._clock.count(nbytes)

    def connect(self) -> None:
        """Connects the ranks of the continuation: from now on they notice the end of another rank.

        All ranks call this inside the call, once they have agreed on a continuation.
        """
        if self._continuation is not None:
            call = self._continuation.call
            assert call is not None
            failure = self._continuation.channel.connect(call)
            if failure is not None:
                raise self._error(failure)

    def begin(self) -> bool:
        """Whether the continuation may begin: no failure of the call has ended it meanwhile.

        The thread of the continuation asks once, before its first operation.
        """
        return self._continuation is None or self._continuation.take()

    def agree(
        self,
        stage: str,
        error: BaseException | None = None,
        hashes: Mapping[str, int] = {},
        *,
        number: int = 0,
        balance: int = 0,
        note: bytes = b"",
    ) -> Agreement:
        """Returns the comparison of the ranks' hashes, and raises on all ranks if any has an error.

        A rank that failed raises its own exception; the others raise a RankError that names the
        lowest rank that failed. All ranks get rank 0's `number`, below 2**62, and its `note`. The
        ranks' `balance`s, from 0 to 2**64 - 1, are added modulo 2**64.
        """
        numbers = Struct(f"!{1 + len(hashes)}qQ")

        def join(records: Sequence[bytes]) -> bytes:
            rows = [numbers.unpack_from(record) for record in records]
            (_, *first, _), *others = rows
            same = [all(row[i] == value for row in others) for i, value in enumerate(first, 1)]
            is_balanced = sum(row[-1] for row in rows) % (1 << 64) == 0
            return records[0][:8] + bytes([*same, is_balanced]) + records[0][numbers.size :]

        record = numbers.pack(number, *hashes.values(), balance) + (b"" if self.rank else note)
        answer = self.merge_records(stage, record, join, error)
        end = 9 + len(hashes)
        *same, is_balanced = map(bool, answer[8:end])
        first = int.from_bytes(answer[:8], "big")
        return Agreement(dict(zip(hashes, same, strict=True)), first, is_balanced, answer[end:])

    def run_on_all(self, stage: str, action: Callable[[], T]) -> T:
        """Returns the action's result once the action has succeeded on all; raises as `agree`."""
        return self.run_and_compare(stage, action, lambda result: {})[0]

    def run_and_compare(
        self,
        stage: str,
        action: Callable[[], T],
        hashes: Callable[[T], Mapping[str, int]],
        *,
        number: int = 0,
        balance: Callable[[T], int] = lambda result: 0,
        note: Callable[[], bytes] = bytes,
    ) -> tuple[T, Agreement]:
        """As `run_on_all`; also compares hashes of each rank's result, by name, between the ranks.

        Also tells whether the ranks' `balance`s of their results add up to zero (see `agree`).
        Rank 0 makes its `note` before its action.
        """
        with self._call(stage):
            text, error = result_or_error(note) if self.rank == 0 else (b"", None)
            self.doing(stage)
            result, error = result_or_error(action) if error is None else (None, error)
            if error is not None:
                self.agree(stage, error)  # raises: no rank compares where one has failed
            made = cast(T, result)
            names, weight = hashes(made), balance(made)
            agreed = self.agree(stage, None, names, number=number, balance=weight, note=text or b"")
        return made, agreed

    def common(self, flags: bytes) -> bytes:
        """Returns the bytewise minimum of all ranks' byte strings, which are equally long."""
        return self.merge_records("comparing names", flags, _minimum) if flags else flags

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """Returns the bytes of rank `source` on every rank; the bytes travel compressed."""
        if self.is_single_process:
            return data
        record = zlib.compress(data, 1) if self.rank == source else b""
        stage = f"sending the data of rank {source}"
        answer = self.merge_records(stage, record, lambda records: records[source])
        return data if self.rank == source else zlib.decompress(answer)

    def gather(self, stage: str, record: bytes, error: BaseException | None = None) -> list[bytes]:
        """Returns all records, by rank, on rank 0; nothing on the others. Raises as `agree`."""
        everyone: list[bytes] = []

        def join(records: Sequence[bytes]) -> bytes:
            everyone[:] = records
            return b""

        self.merge_records(stage, record, join, error)
        return everyone if self.rank == 0 else []

    @contextmanager
    def _call(self, name: str, then: Continuation | None = None) -> Iterator[Call | None]:
        """Yields this rank's call, or else a new one of this name; None for a single process."""
        seconds = waiting_seconds() if self._seconds is None else self._seconds
        is_time = isinstance(seconds, (int, float)) and seconds > 0  # nan is not
        if self._channel is None:
            if not is_time:
                raise _timeout_error(seconds)
            yield None
            return
        before = None if self._continuation is None else self._continuation.call
        number = None if before is None else before.number
        allowed = seconds if is_time else TIMEOUT_SECONDS
        with self._channel.call(name, allowed, number, then) as call:
            if call.failure is not None:
                raise self._error(call.failure)
            if not is_time:
                raise _timeout_error(seconds)  # inside the call, so that the other ranks hear of it
            yield call

    def merge_records(
        self, stage: str, record: bytes, join: Join, error: BaseException | None = None
    ) -> bytes:
        """Returns the answer on every rank: rank 0 makes it from all records by `join`.

        A rank with an error raises that error, and rank 0 its own one of `join`.
        """
        failure = None if error is None else Failure.of(stage, self.rank, error)
        if self._channel is None:
            if error is not None and failure is not None:
                self.told = failure.rank, failure.error
                raise error
            return join([record])
        join_errors: list[Exception] = []

        def join_here(records: Sequence[bytes]) -> bytes:
            try:
                return join(records)
            except Exception as error:
                join_errors.append(error)
                raise

        with self._call(stage) as call:
            assert call is not None
            with nullcontext() if self._clock is None else self._clock.waiting():
                answer = self._channel.meet(call, stage, record, failure, join_here)
            if isinstance(answer, Failure):
                other = self._error(answer)
                if join_errors:
                    raise join_errors[0]
                if isinstance(error, TransferError) and answer != failure:
                    raise other from error  # the other rank has the cause
                if error is None:
                    raise other
                if isinstance(error, CkptError) and replace(answer, rank=self.rank) == failure:
                    error.shown_on = None if answer.rank == self.rank else answer.rank
                raise error
        return answer

    def _error(self, failure: Failure) -> RankError:
        self.told = failure.rank, failure.error
        return RankError(failure.stage, failure.rank, failure.error, failure.message)


def _check_group(group: object, is_here: bool) -> None:
    """Raises unless this is a process group, `SELF` or None.

    `is_here` tells whether torch.distributed is initialized: else every group was destroyed.
    """
    import torch.distributed as dist

    if group is None or (isinstance(group, str) and group == SELF):
        return
    message = f"group is a process group, {SELF!r} or None, not "
    if isinstance(group, str):
        raise ArgumentError(f"{message}{group!r:.80}")
    is_group = dist.is_available() and (
        isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER
    )
    if not is_group:
        hint = "; a mesh has groups: give mesh.get_group()" if hasattr(group, "get_group") else ""
        raise ArgumentTypeError(f"{message}a {type(group).__name__}{hint}")
    if not is_here:
        raise DestroyedGroupError(
            "group is a process group that has been destroyed; call destroy_process_group only "
            "after all saves and loads"
        )


@lru_cache(16)
def _world(size: int) -> Mesh:
    """Returns the mesh of the default group: one object for equal sizes."""
    return Mesh.grid(("world",), (size,))


def _minimum(records: Sequence[bytes]) -> bytes:
    return bytes(map(min, zip(*records, strict=True)))


def _timeout_error(seconds: object) -> ArgumentError:
    return ArgumentError(f"timeout is {seconds!r}; give seconds above 0")


def result_or_error(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Returns the action's result and None, or None and its exception."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def _channel(group: ProcessGroup | None, rank: int, purpose: str) -> Channel:
    """Returns this rank's channel to the others of a group: one for each group and purpose."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import distributed_c10d

    over = distributed_c10d._get_default_group() if group is None else group
    by_name = _channels.setdefault(over, {})
    if purpose not in by_name:
        # None for MPI, although torch declares a Store.
        store = cast("Store | None", distributed_c10d._get_process_group_store(over))
        world_size = dist.get_world_size(over)
        if "fake" in str(dist.get_backend(over)):
            by_name[purpose] = FakeChannel(rank, world_size)
        elif store is None:
            raise ArgumentError(
                "the process group has no store, by which its ranks find each other, as torch's "
                "backend mpi: make the group with gloo or nccl, which mpirun can start too"
            )
        else:
            # Not the group's own object of the store, which is freed when the group is destroyed
            # (`sharding.torch_versions`).
            rendezvous = Rendezvous(PrefixStore("ckpt", store), purpose)
            by_name[purpose] = (
                Participant(rendezvous, rank, world_size)
                if rank
                else Coordinator(rendezvous, world_size)
            )
    return by_name[purpose]


def message_device(group: ProcessGroup | None) -> torch.device:
    """Returns the device of a group's messages: the CPU if possible, else the current GPU."""
    import torch
    import torch.distributed as dist

    backend = str(dist.get_backend(group))
    if any(name in backend for name in ("gloo", "mpi", "ucc", "fake")):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
