"""The job of writing one rank's shard file, and its execution in any process.

A blocking save runs its job in place, from the tensors' memory. A background save sends the job to
the writer process, which writes from staged memory. A job travels as a pickle, on a connection that
nobody but the trainer can write to; its answer is JSON. This module imports no torch.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal

import xxhash

from ckpt.errors import StoreError
from ckpt.plan.save_plan import SavePlan, WriteItem
from ckpt.stores.store import Store, open_store
from ckpt.transfer.bases import open_base
from formats.catalog import OutgoingTensor
from formats.dtypes import count_nonfinite
from formats.native.borrowed import Lent
from formats.native.manifest import StoredTensor
from formats.native.shard import CHUNK_BYTES, Progress, ShardSummary, chunk_bytes_of
from formats.native.shard_writer import raw_header, records_of, write_shard
from sharding.agreement.call_events import Requests, count_requests, take_requests

STEP_BYTES = 8 << 20
"""Bytes between two calls of `advance`: a whole number of chunks."""
LEAST_RING_BYTES = 4 * CHUNK_BYTES
FREED, FILLED = b"freed ", b"filled "
"""The start of messages about a ring: from the writer process, and to it; a number follows."""

Compress = bool | Literal["delta"]
"""Whether chunks are compressed; "delta" also stores differences from a base's chunks."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The division of staged memory that is smaller than a rank's part.

        items that do not wait, end to end | the ring, through which the others pass, end to end

    Byte `n` of those that pass is at byte `n % nbytes` of the ring. Its memory is used again once
    the byte is in the file.
    """

    start: int
    """The bytes of the items that do not wait."""
    nbytes: int
    """The bytes of the ring, at least `LEAST_RING_BYTES`."""
    waiting: tuple[int, ...]
    """The numbers of the items that wait, ascending."""

    def offsets(self, plan: SavePlan) -> list[int]:
        """Returns the first byte of each item in the memory, or among the bytes that pass."""
        waiting, first, passing, offsets = set(self.waiting), 0, 0, []
        for number, item in enumerate(plan.items):
            if number in waiting:
                offsets.append(passing)
                passing += item.nbytes
            else:
                offsets.append(first)
                first += item.nbytes
        return offsets

    @property
    def step_bytes(self) -> int:
        """The most bytes that are copied or written at once: whole chunks."""
        quarter = self.nbytes // 4
        return min(STEP_BYTES, quarter - quarter % CHUNK_BYTES)


PassOn = Callable[[int, int], None]
"""Says that so many bytes have passed a ring; returns once so many are copied into it."""


@dataclass(frozen=True, slots=True)
class WriteJob:
    """The content and the place of one shard file."""

    url: str
    """The folder, as the writer reaches it."""
    name: str
    """The name of the file."""
    compress: Compress
    plan: SavePlan
    base: str | None = None
    """The checkpoint to borrow from."""
    rank: int = 0
    """The rank in the layouts whose part is written."""
    layouts: Mapping[str, StoredTensor] = field(default_factory=dict)
    """All tensors in their stored layouts; empty without a base."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The driver's options; never shown, because they may have secrets."""
    counts: bool = False
    """Whether to count the numbers that are not finite; only for staged memory."""
    ring: Ring | None = None
    """The division of staged memory, if it is smaller than the plan's items."""


def write(
    job: WriteJob,
    store: Store,
    tensors: Sequence[OutgoingTensor],
    progress: Progress | None = None,
    overlap: bool = True,
) -> ShardSummary:
    """Writes the job's file in the folder of `store`: complete and durable when this returns.

    `tensors` are the streams of the plan's items. An exception of `progress` or of a stream ends
    the writing and leaves no file. `overlap` is for a writer that has a second core.
    """
    chunks = _base_chunks(job)
    compress, deltas = bool(job.compress), job.compress == "delta"
    with store.create(job.name, rewritable=compress or chunks is not None) as file:
        return write_shard(file, tensors, compress, progress, chunks, deltas, overlap)


def write_staged(
    job: WriteJob, data: memoryview, advance: Callable[[int], None], pass_on: PassOn | None = None
) -> ShardSummary:
    """As `write`, from memory with the plan's items end to end, which does not change meanwhile.

    `advance` is called with the number of bytes done so far; an exception of it ends the writing.
    A job with a ring needs `pass_on`.
    """
    nonfinite: dict[str, int] | None = {} if job.counts else None
    ring = job.ring
    if ring is None:
        tensors = [
            _tensor(item, _staged(data, item.offset), advance, nonfinite) for item in job.plan.items
        ]
    else:
        assert pass_on is not None
        waiting, passing = set(ring.waiting), _passing(ring, data, pass_on)
        tensors = [
            _tensor(item, partial(passing, at), advance, nonfinite, ring.step_bytes)
            if number in waiting
            else _tensor(item, _staged(data, at), advance, nonfinite)
            for number, (item, at) in enumerate(
                zip(job.plan.items, ring.offsets(job.plan), strict=True)
            )
        ]
    with open_store(job.url, job.options) as store:
        summary = write(job, store, tensors)
        advance(job.plan.nbytes)
        return summary if nonfinite is None else replace(summary, nonfinite=sum(nonfinite.values()))


def _base_chunks(job: WriteJob) -> Lent | None:
    """Returns the chunks of the tensors that the base can lend; None without a base."""
    if job.base is None:
        return None
    with open_base(job.url, job.base, job.options) as found:
        return found.to(job.rank, job.layouts)


Block = Callable[[int, int], memoryview]
"""Returns bytes `[lo, hi)` of an item."""


def _tensor(
    item: WriteItem,
    block_of: Block,
    advance: Callable[[int], None],
    nonfinite: dict[str, int] | None,
    passing_bytes: int = 0,
) -> OutgoingTensor:
    """Returns the stream of an item's bytes; `nonfinite` gets its count of numbers not finite.

    The memory of an item that passes a ring, in steps of `passing_bytes`, is used again.
    """

    def blocks() -> Iterator[memoryview]:
        count, nbytes, step = 0, item.nbytes, passing_bytes or STEP_BYTES
        for lo in range(0, nbytes, step):
            advance(item.offset + lo)
            block = block_of(lo, min(lo + step, nbytes))
            if (
                nonfinite is not None
            ):  # here, because the hash of the block follows: it is in the cache
                nonfinite[item.name] = count = count + count_nonfinite(block, item.dtype)
            yield block

    return OutgoingTensor(item.name, item.shape, item.dtype, blocks, stable=not passing_bytes)


def _staged(data: memoryview, offset: int) -> Block:
    return lambda lo, hi: data[offset + lo : offset + hi]


def _passing(
    ring: Ring, data: memoryview, pass_on: PassOn
) -> Callable[[int, int, int], memoryview]:
    """Returns a function that gives bytes `[at + lo, at + hi)` of those that pass the ring.

    Each call says that all bytes before are in the file: an unstable stream is asked for its next
    block only then.
    """
    memory = data[ring.start : ring.start + ring.nbytes]
    passed = 0

    def block_of(at: int, lo: int, hi: int) -> memoryview:
        nonlocal passed
        if at + lo != passed:  # other bytes may have taken the place
            raise StoreError(f"byte {at + lo} is asked for after byte {passed} of a ring")
        passed, first = at + hi, (at + lo) % ring.nbytes
        pass_on(at + lo, passed)
        last = first + hi - lo
        if last <= ring.nbytes:
            return memory[first:last]
        return memoryview(bytes(memory[first:]) + bytes(memory[: last - ring.nbytes]))

    return block_of


def call_message(function: str, job: object) -> bytes:
    """Returns a job for the writer process as bytes; its arena's descriptor follows them.

    `function` is "module:function". The process calls it with the job, the staged memory, the
    arena's descriptor and `advance`; it returns a `ShardSummary`. That of a `WriteJob` is
    `write_staged`.
    """
    return pickle.dumps((function, job))


def read_call(message: bytes) -> tuple[Callable[..., ShardSummary], Any]:
    """Returns the function and the job in the bytes of `call_message`."""
    function, job = pickle.loads(message)  # noqa: S301 - of this program's trainer
    return resolve_name(function), job


def summary_message(summary: ShardSummary) -> bytes:
    """Returns the summary of a written file as an answer in bytes, with the requests for it."""
    return json.dumps({"written": asdict(summary), "requests": take_requests()}).encode()


def error_message(error: Exception) -> bytes:
    """Returns the reason for a missing file as an answer in bytes."""
    text = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": text, "requests": take_requests()}).encode()


def read_answer(message: bytes, where: str) -> ShardSummary:
    """Returns the summary in an answer. Raises StoreError if the answer is an error.

    The requests of the process that wrote the file count as those of this one.
    """
    answer = json.loads(message)
    for operation, counts in answer.get("requests", {}).items():
        count_requests(operation, Requests(*counts))
    if "error" in answer:
        message_of_writer = answer["error"]
        raise StoreError(
            message_of_writer if where in message_of_writer else f"{where}: {message_of_writer}"
        )
    return ShardSummary(**answer["written"])


@dataclass(frozen=True, slots=True)
class Sealed:
    """The bytes of a shard file before and behind its data."""

    header: bytes
    table: bytes
    data_bytes: int

    @property
    def summary(self) -> ShardSummary:
        """The facts of the file for the manifest."""
        hasher = xxhash.xxh3_128(self.header)
        hasher.update(self.table)
        size = len(self.header) + self.data_bytes + len(self.table)
        return ShardSummary(size, len(self.header), len(self.table), hasher.hexdigest())


def make_sealed(
    items: Sequence[WriteItem], data: memoryview, advance: Callable[[int], None]
) -> Sealed:
    """Returns header and table for `data`, which has the items end to end in a file's order.

    `advance` is called with the number of bytes done so far; an exception of it ends the work.
    """
    records: list[bytes] = []
    for item in items:
        end = item.offset + item.nbytes
        for at in range(item.offset, end, STEP_BYTES):
            advance(at)
            records += records_of(data[at : min(at + STEP_BYTES, end)], chunk_bytes_of("raw"))
    nbytes = items[-1].offset + items[-1].nbytes if items else 0
    advance(nbytes)
    header, _ = raw_header([OutgoingTensor(item.name, item.shape, item.dtype) for item in items])
    return Sealed(header, b"".join(records), nbytes)


def pack_summary(summary: ShardSummary | None) -> bytes:
    """Returns the manifest's facts about a rank's file as bytes; empty without a file."""
    if summary is None:
        return b""
    s = summary
    sizes = f"{s.size} {s.header_bytes} {s.table_bytes} {s.digest}"
    counted = "" if s.nonfinite is None else f" nonfinite={s.nonfinite}"
    return (f"{sizes} {s.used:x} {s.base_digest}{counted}" if s.used else sizes + counted).encode()


def unpack_summary(record: bytes) -> ShardSummary:
    """Returns the facts that `pack_summary` made into bytes."""
    text, _, counted = record.decode().partition(" nonfinite=")
    size, header, table, digest, *borrowed = text.split()
    used, base_digest = (int(borrowed[0], 16), borrowed[1]) if borrowed else (0, "")
    sizes, count = (int(size), int(header), int(table)), int(counted) if counted else None
    return ShardSummary(*sizes, digest, used, base_digest=base_digest, nonfinite=count)
