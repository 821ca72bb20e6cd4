"""Reads byte ranges of files, verifies and places them. The only code that reads tensors.

`ckpt.plan.read_plan` decides the ranges of files and their places in targets. This module reads
neighbouring ranges in one call, verifies checksums while the bytes are in the processor's cache,
and copies bytes from scratch memory that could not be read directly into their places.

Rules:

1. A chunk is verified before its bytes are used, or by another rank that reads the same memory
   (`ckpt.plan.load_plan`). A record with one checksum for all its bytes is verified when its last
   byte is read (`ckpt.transfer.record_sums`).
2. Files are read in ascending order. A local file is read in parts that stay in the cache until
   they are verified. A server takes time to answer, so its files are read in large parts.
3. Memory beyond the targets is at most `workers` times a scratch buffer, or one chunk, plus its
   decoded bytes.
4. There are several threads only if each has a processor to itself, or waits for a server.

[Note: unchanged chunks]
Chunks that the target has already are left out, by their checksums: a live state of which little
has changed since the last load need not travel whole. The bytes in the target's memory are hashed,
and a chunk with the checksum of the table is not read.

Rules:

1. Only whole, uncompressed chunks count that would be read directly into the target: its elements
   are contiguous there and have the stored dtype.
2. A hash costs less than a transfer, but not nothing. `Unchanged.PROBE` hashes the rest of a range
   only while at most `MISSES` of its chunks have changed.
3. `Unchanged.DELTA` asks the server for the changes since the version before, which the target has
   (`ckpt.transfer.live_deltas`). Bytes that are not right afterwards are read. After `MISSES` such
   groups of ranges no delta is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from mmap import mmap
from typing import TYPE_CHECKING, TypeAlias, cast

import xxhash

from ckpt.arguments import memory_budget, workers_for
from ckpt.plan.load_plan import NOTHING_SHARED, CheckShare
from ckpt.plan.read_plan import (
    NOWHERE,
    ByteRange,
    Limits,
    ReadRequest,
    byte_ranges_of,
    delta_groups_of,
    groups_of,
)
from ckpt.transfer.record_sums import ChangedOnTheWayError, Part, RecordSums, Verify, changed_error
from formats.catalog import Chunk, Extent
from formats.errors import CorruptError
from formats.native.shard import Progress
from formats.storage import LOCAL_READ_BYTES, Pool, Reader, in_place, memory_name, read_again
from formats.zip_plan import crc32

if TYPE_CHECKING:
    import numpy as np

    from ckpt.transfer.live_deltas import DeltaReader

MISSES = 2
"""The changed chunks of a range after which a probe takes the rest for changed."""


class Unchanged(Enum):
    """The treatment of chunks that the target may have already."""

    READ = "read"
    """They are read."""
    SKIP = "skip"
    """Each is hashed, and is read if it differs."""
    PROBE = "probe"
    """As SKIP, until a chunk differs; the rest is read (rule 2)."""
    DELTA = "delta"
    """The changes since the version before are read (rule 3)."""

    @classmethod
    def of(cls, word: str, is_far_live: bool) -> Unchanged:
        """Returns the treatment for a word of a user: "auto" probes live states elsewhere."""
        if word == "auto":
            return cls.PROBE if is_far_live else cls.READ
        return cls(word)


def find_changed(
    ranges: Iterable[ByteRange], targets: Sequence[memoryview], rule: Unchanged
) -> Iterator[ByteRange]:
    """Yields the ranges, without the chunks that their targets have already."""
    for byte_range in ranges:
        chunks = byte_range.request.extent.chunks
        is_read = rule in (Unchanged.READ, Unchanged.DELTA)
        if is_read or not byte_range.direct or byte_range.chunk < 0 or chunks is None:
            yield byte_range
        else:
            yield from _find_changed_runs(
                byte_range, targets[byte_range.request.target], chunks.chunk_bytes, rule
            )


def _find_changed_runs(
    byte_range: ByteRange, target: memoryview, chunk_bytes: int, rule: Unchanged
) -> Iterator[ByteRange]:
    """Yields the runs of chunks of one range that the target does not have."""
    chunks = byte_range.request.extent.chunks
    assert chunks is not None
    nbytes, begin, misses = byte_range.hi - byte_range.lo, 0, 0
    for at in range(0, nbytes, chunk_bytes):
        end = min(at + chunk_bytes, nbytes)
        if rule is Unchanged.PROBE and misses >= MISSES:
            break
        stored = target[byte_range.at + at : byte_range.at + end]
        if chunks.wrong(byte_range.chunk + at // chunk_bytes, stored) is not None:
            misses += 1
            continue
        if begin < at:
            yield _part(byte_range, begin, at, chunk_bytes)
        begin = end
    if begin < nbytes:
        yield _part(byte_range, begin, nbytes, chunk_bytes)


def _part(byte_range: ByteRange, lo: int, hi: int, chunk_bytes: int) -> ByteRange:
    """Returns bytes `[lo, hi)` of a range; `lo` is the start of a chunk."""
    return byte_range._replace(
        lo=byte_range.lo + lo,
        hi=byte_range.lo + hi,
        at=byte_range.at + lo,
        chunk=byte_range.chunk + lo // chunk_bytes,
    )


SCRATCH_BYTES = 2 << 20
"""The largest read of a local file that goes through a scratch buffer."""
MAPPED_BYTES = 32 << 20
"""The largest part of a file in mapped memory whose elements are placed at a time."""
DIRECT_BYTES = 8 << 20
"""Bytes of a tensor that one thread reads at a time into the tensor's memory."""
THREAD_BYTES = 32 << 20
"""The caller itself reads fewer bytes than these in all: threads would cost more. Several reads
from a server are different: each waits for an answer."""
LONG_BYTES = 64 << 10
"""A copy of so many bytes lets other threads run meanwhile."""
ROW_BYTES = 1 << 30
"""The longest row that is copied as one element; numpy's limit is 2**31 - 1 bytes."""
FAR_WORKERS = 4
"""Threads that wait for a server, which takes time to answer."""


Array: TypeAlias = "np.ndarray"
"""One-dimensional, of an unsigned integer dtype as wide as the tensor's elements."""
Targets = Sequence[memoryview]
"""The memory of each target, by its number."""


def read_requests(
    reader: Reader,
    requests: Sequence[ReadRequest],
    targets: Sequence[memoryview],
    verify: Verify = True,
    progress: Progress | None = None,
    policy: ReadPolicy | None = None,
) -> tuple[str, ...]:
    """Fulfils all requests, and returns the names of tensors that could not be verified fully.

    `targets` has the memory of each target by its number.

    Raises:
        CorruptError: a chunk or record is not as it was written. The error names file, tensor and
            bytes. The contents of the targets are undefined then.
    """
    sums = RecordSums(verify)
    sums.expect(requests)
    ranges = RangeReader(reader, sums, policy)
    ranges.run(requests, targets, progress)
    ranges.finish(progress)
    return sums.unverified


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """The sizes of reads, and the number of threads."""

    workers: int
    limits: Limits
    unchanged: Unchanged = Unchanged.READ
    share: CheckShare = NOTHING_SHARED
    """The checksums that this rank compares."""

    @classmethod
    def within(cls, budget: int, reader: Reader, ranks_here: int = 1) -> ReadPolicy:
        """Returns a policy that suits the store and takes at most `budget` bytes of memory."""
        is_far = reader.read_bytes > LOCAL_READ_BYTES
        workers = FAR_WORKERS if is_far else workers_for(ranks_here)
        # Each thread has a scratch buffer and a buffer of decoded bytes.
        share = max(LOCAL_READ_BYTES, budget // (2 * workers))
        if is_far:
            return cls(workers, Limits(reader.read_bytes, reader.read_bytes, share))
        read = min(reader.read_bytes, share)
        most = MAPPED_BYTES if memory_name(reader) else SCRATCH_BYTES
        scratch = min(max(read, most), share)
        return cls(workers, Limits(read, max(read, DIRECT_BYTES), scratch))


class RangeReader:
    """Fulfils read requests from one reader; keeps its scratch memory between runs.

    Safe to use from several threads.
    """

    def __init__(self, reader: Reader, sums: RecordSums, policy: ReadPolicy | None = None) -> None:
        """`sums` decides on verification, and knows the reads of records by other readers."""
        policy = ReadPolicy.within(memory_budget(), reader) if policy is None else policy
        self.reader = reader
        self.sums = sums
        self._policy = policy
        self._workers, self._limits = policy.workers, policy.limits
        self._unchanged, self._share = policy.unchanged, policy.share
        self._keep: Callable[[str, object], None] | None = getattr(reader, "keep", None)
        self._misses = 0
        """The groups of ranges whose target did not have the version before."""
        self._scratch = threading.local()

    def run(
        self,
        requests: Sequence[ReadRequest],
        targets: Targets,
        progress: Progress | None = None,
    ) -> None:
        """Fulfils all requests; `targets` has memory by number. Raises as `read_requests` does."""
        limits = self._limits
        if self._unchanged is Unchanged.DELTA:
            most = cast("DeltaReader", self.reader).delta_range_bytes
            limits = replace(limits, direct_bytes=min(limits.direct_bytes, most))
        ranges = byte_ranges_of(requests, bool(self.sums.verify), limits)
        self.read(ranges, targets, progress)

    def finish(self, progress: Progress | None = None) -> None:
        """Reads records to their ends for their checksums, with `verify="all"`.

        Called once all requests are fulfilled. Raises as `read_requests` does.
        """
        most = min(self._limits.read_bytes, self._limits.scratch_bytes)
        self.read(self.sums.rest(most), (), progress)

    def read(
        self, ranges: list[ByteRange], targets: Targets, progress: Progress | None = None
    ) -> None:
        """Reads byte ranges, in the order of the files. Raises as `read_requests` does."""
        call = _Call(targets)
        expect: Callable[[list[ByteRange]], None] | None = getattr(self.reader, "expect", None)
        if expect is not None:
            expect(ranges)
        self._read_groups(ranges, call, progress)
        for part, found in call.wrong:
            self._read_record_again(part, found, ranges, targets)

    def _read_groups(
        self, ranges: list[ByteRange], call: _Call, progress: Progress | None = None
    ) -> None:
        changed = find_changed(ranges, call.targets, self._unchanged)
        is_delta = self._unchanged is Unchanged.DELTA
        groups = delta_groups_of(changed) if is_delta else groups_of(changed, self._limits)

        def work(group: list[ByteRange]) -> None:
            left = self._without_delta(group, call) if is_delta else group
            for part in groups_of(left, self._limits) if is_delta else [left]:
                self._do(part, call)
            if self._keep is not None:
                from ckpt.transfer.live_deltas import parts_in  # as below

                self._keep(group[0].file, parts_in(group, call.targets))
            if progress is not None:
                progress(sum(byte_range.wanted_bytes for byte_range in group))

        nbytes = sum(byte_range.hi - byte_range.lo for byte_range in ranges)
        if nbytes < THREAD_BYTES:
            few = [*groups]
            groups = iter(few)
            if self.reader.read_bytes <= LOCAL_READ_BYTES or len(few) < FAR_WORKERS:
                nbytes = 0
        if self._workers <= 1 or not nbytes:
            for group in groups:
                work(group)
            return
        with Pool(self._workers, "ckpt-read") as pool:
            shared = _SharedGroups(groups)
            for done in [pool.submit(shared.work, work) for _ in range(self._workers)]:
                done.result()

    def _read_record_again(
        self, part: Part, found: int, ranges: list[ByteRange], targets: Targets
    ) -> None:
        """Reads a record with a wrong CRC-32 again, and fills the targets with right bytes.

        Raises CorruptError if it is damaged, ChangedOnTheWayError if other calls have read bytes
        of it.
        """
        extent = part.record.extent
        lo, hi = extent.offset, extent.offset + extent.nbytes

        def crc32_of_record() -> int:
            value, step = 0, min(self._limits.read_bytes, self._limits.scratch_bytes)
            for at in range(lo, hi, step):
                data = self._buffer(min(step, hi - at))
                self.reader.read_into(extent.file, at, data)
                value = crc32(data, value)
            return value

        place = extent.file, lo, hi
        is_right = extent.crc32.__eq__
        if read_again(self.reader, place, found, crc32_of_record, is_right) is None:
            raise changed_error(self.reader.url, extent, part.names, found)
        if not part.is_of_one_call:
            raise ChangedOnTheWayError(
                f"{self.reader.url}/{extent.file}: {part.names}: bytes {lo}:{hi} were changed on "
                "the way from the store, where they are right; nothing is damaged: begin again"
            )
        requests = {
            id(byte_range.request): byte_range.request
            for byte_range in ranges
            if byte_range.request.extent[:3] == extent[:3] and byte_range.request.target != NOWHERE
        }
        sums = RecordSums("all")
        again = RangeReader(self.reader, sums, replace(self._policy, unchanged=Unchanged.READ))
        again.run([*requests.values()], targets)
        again.finish()

    def _without_delta(self, group: list[ByteRange], call: _Call) -> list[ByteRange]:
        """Brings what it can of a group to this version by a delta; returns the other ranges."""
        from ckpt.transfer.live_deltas import apply_delta  # numpy is for those who need it

        if self._misses >= MISSES:
            return group
        applied = apply_delta(self.reader, group, call.targets)
        self._misses += MISSES if applied is None else not applied.is_base
        return group if applied is None else applied.left

    def _do(self, group: list[ByteRange], call: _Call) -> None:
        """Reads, verifies and places one group."""
        first, targets = group[0], call.targets
        lo, hi = first.lo, max(byte_range.hi for byte_range in group)
        lent = in_place(self.reader, first.file, lo, hi - lo)
        if lent is not None:
            with lent as stored:
                for byte_range in group:
                    self._use(byte_range, stored[byte_range.lo - lo : byte_range.hi - lo], call)
        elif first.direct and len(group) == 1:
            read = self.reader.read_into
            self._fill(
                first,
                _own(first, targets),
                lambda at, data: read(first.file, first.lo + at, data),
                call,
            )
        else:
            self._do_copied(group, call)

    def _do_copied(self, group: list[ByteRange], call: _Call) -> None:
        """Reads one group into targets and scratch memory, verifies and places it."""
        first, targets = group[0], call.targets
        # Buffers in the order of the file: memory of targets, and lengths of scratch between them.
        ends: list[memoryview | int] = []
        stored: list[memoryview | int] = []  # of each range: its target, or its place in scratch
        used, begin, end = 0, first.lo, first.lo
        for byte_range in group:
            lo, hi = byte_range.lo, byte_range.hi
            if not byte_range.direct:
                stored.append(used + lo - begin)
                end = max(end, hi)
                continue
            if lo > begin:
                ends.append(lo - begin)
                used += lo - begin
            direct_target = _own(byte_range, targets)
            ends.append(direct_target)
            stored.append(direct_target)
            begin = end = hi
        if end > begin:
            ends.append(end - begin)
            used += end - begin
        scratch = self._buffer(used) if used else memoryview(b"")
        buffers, at = [], 0
        for part in ends:
            if isinstance(part, int):
                buffers.append(scratch[at : at + part])
                at += part
            else:
                buffers.append(part)
        self.reader.read_into(first.file, first.lo, *buffers)
        for byte_range, place in zip(group, stored, strict=True):
            if isinstance(place, int):
                place = scratch[place : place + byte_range.hi - byte_range.lo]
            self._verify_and_place(byte_range, place, call)

    def _use(self, byte_range: ByteRange, stored: memoryview, call: _Call) -> None:
        """Verifies and places one range whose bytes lie in memory."""
        if byte_range.direct:
            direct_target = _own(byte_range, call.targets)
            self._fill(byte_range, direct_target, _copier(stored, direct_target), call)
            return
        self._verify_and_place(byte_range, stored, call)

    def _verify_and_place(self, byte_range: ByteRange, stored: memoryview, call: _Call) -> None:
        """Raises unless these are the bytes of the range; copies its box, if it has one."""
        self._check(byte_range, byte_range.chunk, stored)
        part = self._part(byte_range, call)
        if part is not None:
            part.take(byte_range.lo, stored)
            self._compare(part, call)
        if byte_range.box_copy is not None:
            target = call.targets[byte_range.request.target]
            _place(byte_range, self._decode(byte_range, stored), target)

    def _fill(
        self,
        byte_range: ByteRange,
        target: memoryview,
        read: Callable[[int, memoryview], None],
        call: _Call,
    ) -> None:
        """Fills a target with one range, in parts that are verified one by one.

        `read` fills memory with the bytes of the range from a place on.
        """
        step, chunk = self._limits.read_bytes, byte_range.chunk
        chunks = byte_range.request.extent.chunks
        if chunk >= 0 and chunks is not None:
            step = max(1, step // chunks.chunk_bytes) * chunks.chunk_bytes
        part = self._part(byte_range, call)
        if chunk < 0 and part is None and self.reader.read_bytes <= LOCAL_READ_BYTES:
            step = len(target)  # nothing is compared, so no part has to stay in the cache
        for at in range(0, len(target), step):
            data = target[at : at + step]
            read(at, data)
            if part is not None:
                part.take(byte_range.lo + at, data)
            if chunk >= 0 and chunks is not None:
                self._check(byte_range, chunk + at // chunks.chunk_bytes, data)
        if part is not None:
            self._compare(part, call)

    def _part(self, byte_range: ByteRange, call: _Call) -> Part | None:
        """Returns the part of a record's checksum that a read has; None for bytes without one."""
        if byte_range.request.extent.crc32 is None:
            return None
        return self.sums.part(byte_range.request, byte_range.lo, byte_range.hi, call.token)

    def _check(self, byte_range: ByteRange, first: int, stored: memoryview) -> None:
        """Raises unless these are the bytes of the extent's chunks from `first` on.

        A chunk that was only changed on the way is read again into its place.
        """
        chunks = byte_range.request.extent.chunks
        if first < 0 or chunks is None or not self.sums.verify:
            return
        extent, name = byte_range.request.extent, byte_range.request.name
        is_divided = self._share is not NOTHING_SHARED
        runs = self._share.runs(name, chunks, first, len(stored)) if is_divided else None
        for lo, hi in runs or ((0, len(stored)),):
            index = first + lo // chunks.chunk_bytes
            while (wrong := chunks.wrong(index, stored[lo:hi])) is not None:
                chunk = chunks[wrong]
                lo += chunk.offset - chunks[index].offset
                data = stored[lo : lo + chunk.stored_bytes]
                if data.readonly or not self._read_chunk_again(extent.file, chunk, data):
                    raise damage_error(self.reader.url, extent, name, chunk)
                index, lo = wrong + 1, lo + chunk.stored_bytes
                if lo >= hi:
                    break

    def _read_chunk_again(self, file: str, chunk: Chunk, data: memoryview) -> bool:
        """Reads the stored bytes of a chunk again. Returns whether they are right now."""

        def digest() -> bytes:
            self.reader.read_into(file, chunk.offset, data)
            return xxhash.xxh3_128_digest(data)

        place = file, chunk.offset, chunk.offset + chunk.stored_bytes
        first = xxhash.xxh3_128_digest(data)
        return read_again(self.reader, place, first, digest, chunk.digest.__eq__) is not None

    def _compare(self, part: Part, call: _Call) -> None:
        """Notes a record that is not as it was written, if this part was its last."""
        wrong = self.sums.wrong(part)
        if wrong is not None:
            call.wrong.append((part, wrong))

    def _decode(self, byte_range: ByteRange, stored: memoryview) -> memoryview:
        """Returns the bytes of the extent from `one.at` on."""
        extent = byte_range.request.extent
        chunks = extent.chunks
        if chunks is None or not chunks.compressed:
            return stored
        index, at, size = byte_range.chunk, 0, 0
        found = []
        while at < len(stored):
            chunk = chunks[index]
            found.append((index, stored[at : at + chunk.stored_bytes], chunk.raw_bytes))
            at, index, size = at + chunk.stored_bytes, index + 1, size + chunk.raw_bytes
        decoded = self._buffer(size, "decoded")
        done = 0
        for index, data, raw_bytes in found:
            chunks.decode(index, data, extent.itemsize, decoded[done : done + raw_bytes])
            done += raw_bytes
        return decoded

    def _buffer(self, nbytes: int, use: str = "stored") -> memoryview:
        """Returns this thread's scratch memory, aligned for any dtype; kept: new memory is slow."""
        memory: mmap | None = getattr(self._scratch, use, None)
        if memory is None or len(memory) < nbytes:
            memory = None  # freed before the new memory is allocated
            setattr(self._scratch, use, memory)
            memory = mmap(-1, max(nbytes, SCRATCH_BYTES))
            setattr(self._scratch, use, memory)
        return memoryview(memory)[:nbytes]


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of `RangeReader.read`."""

    targets: Targets
    wrong: list[tuple[Part, int]] = field(default_factory=list)
    """The last parts of records with another CRC-32, which is the number."""
    token: object = field(default_factory=object)


class _SharedGroups:
    """Groups that several threads take in turn, until one thread fails."""

    def __init__(self, groups: Iterator[list[ByteRange]]) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._failed = False

    def work(self, action: Callable[[list[ByteRange]], None]) -> None:
        """Takes and does groups until none is left."""
        while (group := self._next()) is not None:
            try:
                action(group)
            except BaseException:
                self._failed = True
                raise

    def _next(self) -> list[ByteRange] | None:
        with self._lock:
            return None if self._failed else next(self._groups, None)


def bytes_of(array: Array) -> memoryview:
    """Returns the bytes of a one-dimensional array, in its own memory."""
    return memoryview(array.view("u1").data)


def damage_error(url: str, extent: Extent, name: str, chunk: Chunk) -> CorruptError:
    """Returns the error for a chunk whose bytes are not as they were written."""
    return CorruptError(
        f"{url}/{extent.file}: {name}: bytes {chunk.offset}:{chunk.offset + chunk.stored_bytes} do "
        f"not have the checksum {chunk.digest.hex()} they were written with: they were changed "
        "since; restore the file from another copy"
    )


def _own(byte_range: ByteRange, targets: Targets) -> memoryview:
    """Returns the memory of the target that a direct range fills."""
    at = byte_range.at
    return targets[byte_range.request.target][at : at + byte_range.hi - byte_range.lo]


def _copier(source: memoryview, target: memoryview) -> Callable[[int, memoryview], None]:
    """Returns a function that fills a part of `target`, which begins at a place, from `source`.

    Other threads run while it copies much.
    """
    if len(target) < LONG_BYTES:

        def fill(at: int, part: memoryview) -> None:
            part[:] = source[at : at + len(part)]

        return fill
    import numpy as np  # opening a checkpoint starts without numpy

    stored, own = np.frombuffer(source, "u1"), np.frombuffer(target, "u1")

    def copy(at: int, part: memoryview) -> None:
        np.copyto(own[at : at + len(part)], stored[at : at + len(part)])

    return copy


def _place(byte_range: ByteRange, data: memoryview, memory: memoryview) -> None:
    """Copies the box of a range from the decoded bytes into its target."""
    copy, itemsize = byte_range.box_copy, byte_range.request.itemsize
    assert copy is not None
    source, target = copy.source, copy.target
    start = source.at * itemsize - byte_range.at
    shape = source.box.shape
    at = target.at * itemsize
    if copy.is_direct:
        nbytes = prod(shape) * itemsize
        memory[at : at + nbytes] = data[start : start + nbytes]
        return
    import numpy as np  # opening and verifying a checkpoint start without numpy

    sizes, row = list(shape), itemsize
    steps = [stride * itemsize for stride in source.strides]
    other_steps = [stride * itemsize for stride in target.strides]
    # Dimensions that are contiguous at both ends become one element: numpy copies it as memory.
    while sizes and steps[-1] == other_steps[-1] == row and row * sizes[-1] <= ROW_BYTES:
        row *= sizes.pop()
        steps.pop()
        other_steps.pop()
    dtype = _CARRIERS[itemsize] if row == itemsize else f"V{row}"
    decoded = np.ndarray(sizes, dtype, data, start, steps)
    placed = np.ndarray(sizes, dtype, memory, at, other_steps)
    placed[...] = decoded


_CARRIERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""By itemsize: the numpy dtype that moves elements without looking at them."""
