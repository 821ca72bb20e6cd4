"""The report of an exchange that failed: the ranks of both sides, with the exchange of each wait.

A rank whose wait ends with an error leaves a note in the store where the processes have met, and
looks for the notes of the others. gloo closes the connections of a rank whose time-out is over, so
that waiting ranks fail at once and leave their notes within milliseconds.

Rules:

1. This module communicates only after an exchange has failed.
2. A report needs no other rank. The first report of a process group waits `ANSWER_SECONDS` at most,
   later ones do not wait. A report names the ranks that left no note.
3. A store that cannot be reached changes the report, not the type of the error.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sharding.engine.composition import Composition
from sharding.engine.shard_group import ShardGroup
from sharding.errors import TransferError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

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
    """The hash of the composition."""


@dataclass(frozen=True, slots=True)
class Missed:
    """The message that did not arrive, or was not received."""

    composition: Composition
    member: int
    """The other rank, in the process group."""
    is_incoming: bool
    nbytes: int
    dtype: torch.dtype


def report(shard_group: ShardGroup, missed: Missed, error: BaseException) -> TransferError:
    """Returns the error for a rank whose exchange failed; it names both ranks and both waits.

    Not a collective: the rank that failed calls it. It takes `ANSWER_SECONDS` if another rank is
    silent.
    """
    group = shard_group.group
    assert group is not None
    here, other = dist.get_rank(), dist.get_global_rank(group, missed.member)
    way = "from" if missed.is_incoming else "to"
    waited = (
        f"{missed.composition} for {missed.nbytes:,} bytes of {_word(missed.dtype)} {way} rank "
        f"{other}"
    )
    told = _told_by_others(shard_group, missed.composition, waited, other)
    return TransferError(
        f"rank {here} waited in {waited}, in vain ({_first_line(error)}). {told} {_ADVICE}"
    )


def report_unlike(shard_group: ShardGroup, composition: Composition) -> TransferError:
    """Returns the error for a rank that found that other ranks took part in another collective.

    Not a collective: every rank that finds the difference calls it.
    """
    told = _told_by_others(shard_group, composition, f"{composition}", None)
    return TransferError(
        f"rank {dist.get_rank()} took part in {composition}, and another rank in another "
        f"collective, now or since the last reduction; its result is not used. {told} {_ADVICE}"
    )


def _told_by_others(
    shard_group: ShardGroup, composition: Composition, waited: str, other: int | None
) -> str:
    """Returns sentences on the waits of other ranks: the missed one, and a few more."""
    assert shard_group.group is not None
    note = Note(shard_group.group.group_name, waited, composition.digest.hex())
    asked = [] if other is None else [other]
    for index in shard_group.others[:MOST_ASKED]:
        rank = dist.get_global_rank(shard_group.group, shard_group.members[index])
        asked += [] if rank == other else [rank]
    notes = _exchanged(dist.get_rank(), asked, note)
    return " ".join(_told(rank, notes.get(rank), note) for rank in asked)


def _told(rank: int, note: Note | None, mine: Note) -> str:
    if note is None:
        return (
            f"Rank {rank} has left no note of its wait within {ANSWER_SECONDS:g} s: it has ended, "
            "or is busy elsewhere."
        )
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


def _exchanged(here: int, asked: list[int], note: Note) -> dict[int, Note]:
    """Returns the notes of other ranks, by rank; stores this rank's note first."""
    found: dict[int, Note] = {}
    with suppress(RuntimeError, ValueError):  # the store is lost: the report names no others
        store = _store()
        if store is None:
            return found
        mine, until = _read(store, here), monotonic()
        if mine is None or mine.group != note.group:  # the note of the first failure stays
            store.set(f"{_KEY}{here}", json.dumps(asdict(note)))
            until += ANSWER_SECONDS
        while True:
            for rank in asked:
                read = None if rank in found else _read(store, rank)
                if read is not None and (read.group == note.group or monotonic() > until):
                    found[rank] = read
            if len(found) == len(asked) or monotonic() > until:
                return found
            sleep(_POLL_SECONDS)
    return found


def _read(store: Store, rank: int) -> Note | None:
    key = f"{_KEY}{rank}"
    return Note(**json.loads(store.get(key))) if store.check([key]) else None


def _store() -> Store | None:
    """Returns the store of the default process group; None without one, as with MPI."""
    group = distributed_c10d._get_default_group()
    return cast("Store | None", distributed_c10d._get_process_group_store(group))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
