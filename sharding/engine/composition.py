"""The exchanges of a unit: their process groups, their composition and tag, and a failure's report.

An exchange is an all-gather or a reduction of one parameter group, or of several small ones. Its
composition lists these groups, each with the purpose and the sequence number of its part. Gloo
delivers a message to the receive with the same tag, and ends the process if their lengths differ.

Rules:

1. A tag is a hash of the composition, the dtype and the lengths of all messages that one exchange
   sends from one rank to another. The receiver computes the tag from the tensors that it expects,
   so that no message takes the place of one that differs in any of these.
2. A composition is the same on all ranks that run the same program. It holds no address, no time
   and no value that depends on Python's randomized hashes.

[Note: 30 bits]
torch takes tags from 0 to 2**31 - 1. These messages use the upper half; user programs number their
messages from 0. Two different messages have the same tag with a probability of 1 in 10**9. Equal
tags do harm only if ranks disagree, and only to the few messages that are in flight at the same
time between the same two ranks. If ranks agree, messages with the same tag arrive in the order in
which they were sent.

[Note: the report of a failure]
The report has the ranks of both sides, with the exchange of each wait. A rank whose wait ends with
an error leaves a note in the store where the processes have met, and looks for the notes of the
others. gloo closes the connections of a rank whose time-out is over, so that waiting ranks fail at
once and leave their notes within milliseconds.

Rules:

1. This module communicates only after an exchange has failed.
2. A report needs no other rank. The first report of a process group waits `ANSWER_SECONDS` at most,
   later ones do not wait. A report names the ranks that left no note.
3. A store that cannot be reached changes the report, not the type of the error.
"""

from __future__ import annotations

import json
from array import array
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cache
from hashlib import blake2b
from itertools import count
from time import monotonic, sleep
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed import ProcessGroup, distributed_c10d

from sharding.errors import ArgumentError, TransferError
from sharding.layout import Mesh
from sharding.torch_versions import GroupReference, dereference

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from torch._C._distributed_c10d import Store

FIRST_TAG = 1 << 30
"""The lowest tag of these messages."""
SHOWN = 4
"""The number of parameter groups that the text of a composition names."""


class Purpose(IntEnum):
    """The purpose of a parameter group's part in an exchange."""

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    """The sum over the ranks that hold the same shard."""
    REGATHER = 3
    """A gather in backward, from the few ranks that kept a part after forward."""
    COMPARISON = 4
    """The comparison of the units that ranks have, before anything else travels."""


_WORDS = {
    Purpose.ALL_GATHER: "all-gather",
    Purpose.REDUCE_SCATTER: "reduce-scatter",
    Purpose.ALL_REDUCE: "all-reduce over replicas",
    Purpose.REGATHER: "all-gather over fewer ranks",
    Purpose.COMPARISON: "comparison",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter group's part of an exchange."""

    name: str
    """The unit's path in the root module."""
    key: int
    """Identifies the parameter group: see `key_of`."""
    purpose: Purpose
    sequence: int
    """The number of this exchange among those of the group for this purpose, from 1."""


@dataclass(frozen=True, slots=True)
class Composition:
    """The parts of one exchange, in order."""

    items: tuple[Item, ...]
    stage: int = 0
    """1 for the second of an operation's two exchanges, else 0."""

    @property
    def digest(self) -> bytes:
        """A hash of 8 bytes: different compositions have different ones."""
        numbers = array("Q", [self.stage])
        for item in self.items:
            numbers.extend((item.key, item.purpose, item.sequence))
        return blake2b(numbers, digest_size=8).digest()

    def __str__(self) -> str:
        if not self.items:
            return "an exchange of nothing"
        first = self.items[0]
        named = ", ".join(f"{item.name} (number {item.sequence})" for item in self.items[:SHOWN])
        left = len(self.items) - SHOWN
        more = f" and {left} more" if left > 0 else ""
        return f"the {_WORDS[first.purpose]} of {named}{more}"


def key_of(number: int, names: Iterable[str], shapes: Iterable[Sequence[int]]) -> int:
    """Returns 64 bits that identify a parameter group by number, parameters' names and shapes."""
    text = repr((number, tuple(names), [tuple(shape) for shape in shapes]))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def tag_of(digest: bytes, tensors: Sequence[torch.Tensor]) -> int:
    """Returns the tag of messages with these flat tensors of one dtype, in this order (rule 1)."""
    numbers = array("Q", [_code(tensors[0].dtype)])
    numbers.extend(tensor.numel() for tensor in tensors)
    hashed = blake2b(digest, digest_size=4)
    hashed.update(numbers)
    return FIRST_TAG + int.from_bytes(hashed.digest(), "little") % FIRST_TAG


@cache
def _code(dtype: torch.dtype) -> int:
    """Returns a number for a dtype, the same in every process."""
    return int.from_bytes(blake2b(str(dtype).encode(), digest_size=8).digest(), "little")


_numbers: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""The counter of parameter groups of a process group: all members count alike."""


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """A part of the ranks of a process group, or all, and this process' place among them."""

    reference: GroupReference | None
    """The reference to the group; None: this process alone."""
    members: tuple[int, ...]
    """The ranks of the members in the group."""
    rank: int
    """This process' index in `members`."""

    @classmethod
    def of(cls, group: ProcessGroup) -> ShardGroup:
        """Returns all ranks of a group."""
        return cls(ref(group), tuple(range(dist.get_world_size(group))), dist.get_rank(group))

    @classmethod
    def alone(cls) -> ShardGroup:
        """Returns this process alone: no tensor is divided."""
        return cls(None, (0,), 0)

    @property
    def group(self) -> ProcessGroup | None:
        """The group; None: this process alone. Raises DestroyedGroupError."""
        return None if self.reference is None else dereference(self.reference)

    @property
    def ranks(self) -> list[int]:
        if self.group is None:
            return [dist.get_rank()]
        ranks = dist.get_process_group_ranks(self.group)
        return [ranks[member] for member in self.members]

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def others(self) -> list[int]:
        """The other indices, from the next one on, so that ranks begin with different ones."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def part(self, size: int) -> ShardGroup:
        """Returns the run of `size` consecutive ranks that contains this process."""
        first = self.rank // size * size
        return ShardGroup(self.reference, self.members[first : first + size], self.rank - first)


@dataclass(frozen=True, slots=True)
class HybridGroups:
    """The ranks over which a unit is sharded, and those over which it is replicated."""

    shard: ShardGroup
    replicate: ShardGroup
    """The ranks that hold the same shard."""
    grid: Mesh | None = None
    """All ranks, if a mesh was given: the replicas along its first axis, shards along its last."""

    @property
    def size(self) -> int:
        """The number of ranks whose gradients are summed."""
        return self.shard.size * self.replicate.size

    @property
    def group(self) -> ProcessGroup:
        """The process group that numbers the unit's parameter groups."""
        group = self.shard.group or self.replicate.group
        if group is None:
            raise ArgumentError("a unit must be shared over at least one process group")
        return group

    def next_number(self) -> int:
        """Returns the number of a new parameter group, the same on all ranks of the group."""
        return next(_numbers.setdefault(self.group, count()))


ANSWER_SECONDS = 3.0
"""The time that a failed rank looks for the notes of others."""
MOST_ASKED = 8
"""The most ranks that a report names."""
_KEY = "sharding/waits/"
_ADVICE = (
    "All ranks must run the same units, as often and in the same order; "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL compares them in every forward. This process group is of no "
    "use any more: start the job again; shards can still be saved"
)
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Note:
    """The note that a rank leaves in the store."""

    group: str
    """The name of the process group."""
    text: str
    digest: str
    """The hash of the composition; empty if the rank has failed before its exchange."""


@dataclass(frozen=True, slots=True)
class Side:
    """The other rank of a message, and its direction."""

    member: int
    """Rank in the process group."""
    is_incoming: bool
    tensor: torch.Tensor


def report(
    shard_group: ShardGroup, composition: Composition, missed: Side, error: BaseException
) -> TransferError:
    """Returns the error for a rank whose exchange failed; it names both ranks and both waits.

    `missed` is the message that did not arrive, or was not received. Not a collective: the rank
    that failed calls it. It takes `ANSWER_SECONDS` if another rank is silent.
    """
    group = shard_group.group
    assert group is not None
    here, other = dist.get_rank(), dist.get_global_rank(group, missed.member)
    way, tensor = "from" if missed.is_incoming else "to", missed.tensor
    waited = f"{composition} for {tensor.nbytes:,} bytes of {word(tensor.dtype)} {way} rank {other}"
    waits = _describe_waits(shard_group, composition, waited, other)
    return TransferError(
        f"rank {here} waited in {waited}, in vain ({_first_line(error)}). {waits} {_ADVICE}"
    )


def leave_failure(shard_group: ShardGroup, error: Exception) -> None:
    """Leaves a note of an error that keeps this rank from an exchange in which others wait."""
    if shard_group.group is not None:
        text = f"{type(error).__name__}: {error}"
        with suppress(RuntimeError, ValueError):  # the store is lost: others name no cause
            _leave(_store(), dist.get_rank(), Note(shard_group.group.group_name, text, ""))


def report_unlike(shard_group: ShardGroup, composition: Composition) -> TransferError:
    """Returns the error for a rank that found that other ranks took part in another collective.

    Not a collective: every rank that finds the difference calls it.
    """
    waits = _describe_waits(shard_group, composition, f"{composition}", None)
    return TransferError(
        f"rank {dist.get_rank()} took part in {composition}, and another rank in another "
        f"collective, now or since the last reduction; its result is not used. {waits} {_ADVICE}"
    )


def _describe_waits(
    shard_group: ShardGroup, composition: Composition, waited: str, other: int | None
) -> str:
    """Returns sentences on the waits of other ranks: the missed one, and a few more."""
    assert shard_group.group is not None
    note = Note(shard_group.group.group_name, waited, composition.digest.hex())
    asked = [] if other is None else [other]
    for index in shard_group.others[:MOST_ASKED]:
        rank = dist.get_global_rank(shard_group.group, shard_group.members[index])
        asked += [] if rank == other else [rank]
    notes = _exchange(dist.get_rank(), asked, note)
    return " ".join(_describe_wait(rank, notes.get(rank), note) for rank in asked)


def _describe_wait(rank: int, note: Note | None, mine: Note) -> str:
    if note is None:
        return (
            f"Rank {rank} has left no note of its wait within {ANSWER_SECONDS:g} s: it has ended, "
            "or is busy elsewhere."
        )
    if not note.digest:
        return f"Rank {rank} has failed with {note.text}."
    where = "" if note.group == mine.group else f" (in process group {note.group})"
    unlike = ""
    if note.text.partition(" for ")[0] == mine.text.partition(" for ")[0]:
        unlike = (
            ", as this rank does"
            if note.digest == mine.digest
            else ", but of another parameter group: there it has other parameters, or another "
            "number of units was sharded before"
        )
    return f"Rank {rank} waited in {note.text}{where}{unlike}."


def _exchange(here: int, asked: list[int], note: Note) -> dict[int, Note]:
    """Returns the notes of other ranks, by rank; stores this rank's note first."""
    notes: dict[int, Note] = {}
    with suppress(RuntimeError, ValueError):  # the store is lost: the report names no others
        store = _store()
        if store is None:
            return notes
        mine, until = _read(store, here), monotonic()
        if mine is None or mine.group != note.group:  # the note of the first failure stays
            _leave(store, here, note)
            until += ANSWER_SECONDS
        while True:
            for rank in asked:
                read = None if rank in notes else _read(store, rank)
                if read is not None and (read.group == note.group or monotonic() > until):
                    notes[rank] = read
            if len(notes) == len(asked) or monotonic() > until:
                return notes
            sleep(_POLL_SECONDS)
    return notes


def _leave(store: Store | None, here: int, note: Note) -> None:
    if store is not None:
        store.set(f"{_KEY}{here}", json.dumps(asdict(note)))


def _read(store: Store, rank: int) -> Note | None:
    key = f"{_KEY}{rank}"
    return Note(**json.loads(store.get(key))) if store.check([key]) else None


def _store() -> Store | None:
    """Returns the store of the default process group; None without one, as with MPI."""
    group = distributed_c10d._get_default_group()
    return cast("Store | None", distributed_c10d._get_process_group_store(group))


def word(dtype: torch.dtype | None) -> str:
    """Returns a dtype for messages."""
    return str(dtype).removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
