"""Writes planned files from stored tensors: several threads, each unit read, verified and written.

A unit (`ckpt.plan.copy_plan`) is small enough to stay in the processor's cache: a thread reads its
bytes, verifies them, sums them if the file needs checksums, and writes them in one call. Rules:

1. A local file is written at any place, so threads do not wait for each other. Another writer gets
   the units in their order.
2. Bytes that checksums decide are written with their unit if the tensors before them are summed by
   then. Otherwise a local file gets them last. Another writer waits for the units before.
3. A failure of one thread ends all of them. The caller's file then never appears.
4. A server may take units of its own files as they are (`CopyingFileWriter`). Their checksums are
   those that the source's table has, and nobody compares them: they go along to the new table.
5. Each thread has memory for two units and for the scratch of its reads, whatever is written.
6. A source may have a part of each tensor: the caller then writes these elements, box by box, into
   a file whose other bytes come from other processes (`write_pieces`).

The checksums of a copied file's tensors, whose bytes come in runs, in any order.

`formats.catalog` has the two kinds. Several threads take the checksums of their runs at once, and
add them one at a time.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from mmap import mmap
from operator import mul
from typing import Any

from ckpt.arguments import memory_budget, workers_for
from ckpt.plan.copy_plan import (
    CopySource,
    CopyUnit,
    TensorRun,
    find_alike,
    pieces_of_range,
    units_of,
)
from ckpt.plan.read_plan import requests_for
from ckpt.transfer.read import FAR_WORKERS, THREAD_BYTES, RangeReader, ReadPolicy
from ckpt.transfer.record_sums import RecordSums, Verify, run_twice
from formats.catalog import Chunk, FilePlan, Late, OutgoingTensor, length_of
from formats.dtypes import cast_plain
from formats.native.shard import RECORD, Progress
from formats.native.shard_writer import record_of
from formats.storage import (
    LOCAL_READ_BYTES,
    CopyingFileWriter,
    FileWriter,
    PlacedFileWriter,
    Pool,
    Reader,
    Writer,
)
from formats.zip_plan import SummedRanges, crc32
from sharding.layout import Box, Piece, Shape

UNIT_BYTES = 1 << 20
"""Bytes of a unit, with which a thread stays in its processor's cache."""
SPAN_BYTES = 8 << 20
"""Bytes at the source of elements that are moved one by one or cast."""


@dataclass(frozen=True, slots=True)
class CopySizes:
    """The number of threads, and the sizes of their reads and writes."""

    workers: int
    unit_bytes: int
    policy: ReadPolicy
    """For the reads of one thread."""
    span_bytes: int = SPAN_BYTES
    thread_bytes: int = THREAD_BYTES
    """A smaller file is copied by the caller alone."""

    @classmethod
    def within(cls, budget: int, reader: Reader) -> CopySizes:
        """Returns sizes that suit the source and take no more than `budget` bytes of memory."""
        is_far = reader.read_bytes > LOCAL_READ_BYTES
        workers = FAR_WORKERS if is_far else workers_for(1)
        unit = min(reader.read_bytes, budget // 8) if is_far else UNIT_BYTES
        found = ReadPolicy.within(budget, reader).limits
        scratch = min(unit, found.scratch_bytes)
        limits = replace(found, read_bytes=unit, direct_bytes=unit, scratch_bytes=scratch)
        return cls(workers, unit, ReadPolicy(1, limits))

    @property
    def memory_bytes(self) -> int:
        """The most memory of all threads: of their units, spans and reads (rule 4)."""
        scratch = 2 * self.policy.limits.scratch_bytes
        return self.workers * (2 * max(self.unit_bytes, self.span_bytes) + scratch)

    def workers_for(self, nbytes: int) -> int:
        """Returns the number of threads for a file of so many bytes."""
        return 1 if nbytes < self.thread_bytes else self.workers


class FileCopier:
    """Writes planned files from the tensors of one reader."""

    def __init__(
        self,
        reader: Reader,
        source_of: Callable[[str], CopySource],
        verify: Verify,
        progress: Progress | None = None,
        sizes: CopySizes | None = None,
    ) -> None:
        """`source_of` gives the source of each outgoing tensor by its name.

        `progress` is called with numbers of bytes as they are read, by one thread at a time.
        """
        self.sizes = CopySizes.within(memory_budget(), reader) if sizes is None else sizes
        self.source_of = source_of
        self.sums = RecordSums(verify)
        self.ranges = RangeReader(reader, self.sums, self.sizes.policy)
        self.memory = _Memory()
        self.progress = progress or (lambda nbytes: None)

    def write(self, writer: Writer, plans: Sequence[FilePlan]) -> list[bytes]:
        """Writes the files in their order. Before the last one appears, all checksums are compared.

        Returns the records of each file's tensors; none for a file without checksums.

        Raises:
            CorruptError: a chunk or record is not as it was written.
            HoleError: elements of a tensor are not stored.
        """

        def write_file(plan: FilePlan) -> bytes:
            with writer.create(plan.name) as file:
                records = _FileCopy(self, file, plan, 0, plan.needs_sums).run()
                if plan is plans[-1]:
                    self.finish()
            return records

        records = []
        for plan in plans:
            copy = partial(write_file, plan)  # a record that began in a file before is not repeated
            records.append(copy() if self.sums.has_open else run_twice(copy, self.sums))
        return records

    def write_part(self, file: FileWriter, plan: FilePlan, offset: int) -> bytes:
        """Writes the bytes of a plan from byte `offset` of a file on; returns its tensors' records.

        The caller later calls `finish`. Raises as `write` does.
        """
        return _FileCopy(self, file, plan, offset, is_summed=True).run()

    def finish(self) -> None:
        """Compares the checksums of records that were read in part."""
        self.ranges.finish()

    def units(self, plan: FilePlan, unit_bytes: int = 0) -> Iterator[CopyUnit]:
        """Yields the units of a file, by default of the copier's size."""
        is_verified, limits = bool(self.sums.verify), self.sizes.policy.limits
        unit_bytes, span_bytes = unit_bytes or self.sizes.unit_bytes, self.sizes.span_bytes
        return units_of(plan, self.source_of, unit_bytes, span_bytes, is_verified, limits)

    def fill(self, unit: CopyUnit, memory: memoryview) -> None:
        """Fills memory with the bytes of a unit, but for the late ones."""
        for at, data in unit.literals:
            memory[at : at + len(data)] = data
        if unit.span is not None:
            source, lo, hi = unit.span
            pieces = pieces_of_range(source.record.shape, lo, hi)
            self._fill_pieces(source, pieces, (hi - lo) * source.record.dtype.itemsize, memory)
        elif unit.ranges:
            self.ranges.read(unit.ranges, [memory, *[memory[lo:hi] for lo, hi in unit.places]])

    def _fill_pieces(
        self, source: CopySource, pieces: Sequence[Piece], nbytes: int, memory: memoryview
    ) -> None:
        """Fills memory with pieces of a tensor, which have `nbytes` at the source."""
        record, dtype = source
        stored = memory if dtype == record.dtype else self.memory.of("stored", nbytes)
        self.ranges.run(requests_for(record, pieces), [stored])
        if dtype == record.dtype:
            return
        # A process without torch imports it only for casts that numpy lacks.
        if "torch" in sys.modules or not cast_plain(stored, record.dtype, memory, dtype):
            from ckpt.state.memory import cast_into

            cast_into(record.name, stored, record.dtype, memory, dtype)

    def write_pieces(self, file: PlacedFileWriter, plan: FilePlan, with_literals: bool) -> None:
        """Writes those elements of a file's tensors that the sources have, each at its place.

        The sources may have a part of a tensor: other processes write the rest of the file.
        `with_literals` also writes the bytes between the tensors. For plans without checksums.
        """
        at = 0
        for part in plan.parts:
            if isinstance(part, OutgoingTensor):
                source = self.source_of(part.name)
                most = max(1, self.sizes.span_bytes // source.record.dtype.itemsize)
                for stored in source.record.pieces:
                    for box in stored.piece.box.cut(most):
                        self._write_box(file, at, source, box)
            elif isinstance(part, bytes) and with_literals:
                file.write_at(at, part)
            at += length_of(part)

    def _write_box(self, file: PlacedFileWriter, at: int, source: CopySource, box: Box) -> None:
        """Writes the rows of a box of a tensor that begins at byte `at` of a file."""
        record, dtype = source
        nbytes = box.numel * record.dtype.itemsize
        memory = self.memory.of("unit", box.numel * dtype.itemsize)
        self._fill_pieces(source, [Piece.packed(box)], nbytes, memory)
        done = 0
        for lo, hi in rows_of(box, record.shape):
            end = done + (hi - lo) * dtype.itemsize
            file.write_at(at + lo * dtype.itemsize, memory[done:end])
            done = end
        self.progress(nbytes)


def rows_of(box: Box, shape: Shape) -> Iterator[tuple[int, int]]:
    """Yields the row-major elements `[lo, hi)` of each row of a box, as long as they are.

    >>> list(rows_of(Box((0, 1), (2, 3)), (5, 4)))
    [(1, 3), (5, 7)]
    """
    dims, row = len(shape), 1
    while dims and row == prod(shape[dims:]):
        dims -= 1
        row *= box.shape[dims]
    inside = Piece.packed(Box.whole(shape)).part(box)
    for index in product(*map(range, box.shape[:dims])):
        lo = inside.at + sum(map(mul, index, inside.strides))
        yield lo, lo + row


class _FileCopy:
    """The copy of one file, or of a part from byte `offset` on, by several threads."""

    def __init__(
        self, copier: FileCopier, file: FileWriter, plan: FilePlan, offset: int, is_summed: bool
    ) -> None:
        self._copier, self._file, self._offset = copier, file, offset
        self._placed = file if isinstance(file, PlacedFileWriter) else None
        is_copying = isinstance(file, CopyingFileWriter) and (plan.chunk_bytes or not is_summed)
        self._copying = file if is_copying and isinstance(file, CopyingFileWriter) else None
        self._chunk_bytes = plan.chunk_bytes
        self._sizes = [part.nbytes for part in plan.parts if isinstance(part, OutgoingTensor)]
        self._units = copier.units(plan)
        self._nbytes = sum(map(length_of, plan.parts))
        kind = ChunkSums if plan.chunk_bytes else Crc32Sums
        self._sums: TensorSums | None = kind(plan) if is_summed else None
        self._taking = threading.Lock()
        self._changed = threading.Condition()
        """Notified after each unit; guards the attributes below."""
        self._written = 0
        """The number of the next unit to write, for a writer that gets them in order."""
        self._is_over = False
        self._deferred: list[tuple[int, Late]] = []
        """The late bytes that were not known when their unit was written, with their place."""

    def run(self) -> bytes:
        """Writes the file; returns its tensors' records, if they are summed.

        Raises the error of the first thread that fails.
        """
        self._run_all(self._copier.sizes.workers_for(self._nbytes))
        if self._sums is None:
            return b""
        records = self._sums.all_records
        for at, part in self._deferred:
            assert self._placed is not None
            self._placed.write_at(self._offset + at, part.make(records))
        return records

    def _run_all(self, workers: int) -> None:
        if workers == 1:
            self._work()
            return
        with Pool(workers, "ckpt-copy") as pool:
            try:
                for done in [pool.submit(self._work) for _ in range(workers)]:
                    done.result()
            except BaseException:
                self._end()
                raise

    def _work(self) -> None:
        """Copies units until none is left, or another thread has failed."""
        try:
            while (unit := self._next()) is not None and self._copy(unit):
                pass
        except BaseException:
            self._end()
            raise

    def _next(self) -> CopyUnit | None:
        with self._taking:
            return None if self._is_over else next(self._units, None)

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _copy(self, unit: CopyUnit) -> bool:
        """Copies one unit. Returns whether it was written: False if another thread has failed."""
        copied = self._copy_there(unit)
        if copied is not None:
            return copied
        memory = self._copier.memory.of("unit", unit.nbytes)
        self._copier.fill(unit, memory)
        if not self._add_late(unit, memory):
            return False
        if self._placed is not None:
            self._placed.write_at(self._offset + unit.offset, memory)
        elif not self._wait(lambda: self._written == unit.number):
            return False
        else:
            self._file.write([memory])
        self._end_unit(unit)
        return True

    def _copy_there(self, unit: CopyUnit) -> bool | None:
        """Lets the server copy a unit, in its turn. Returns as `_copy`; None if it must be read."""
        copying, sums = self._copying, self._sums
        if copying is None:
            return None
        alike = find_alike(unit, self._chunk_bytes, self._sizes.__getitem__)
        if alike is None:
            return None
        if not self._wait(lambda: self._written == unit.number):
            return False
        if not copying.copy(self._copier.ranges.reader, alike.file, alike.lo, alike.hi):
            return None
        if isinstance(sums, ChunkSums):
            with self._changed:
                for run, chunks in zip(unit.runs, alike.chunks, strict=True):
                    sums.add_stored(run, chunks)
        self._end_unit(unit)
        return True

    def _end_unit(self, unit: CopyUnit) -> None:
        with self._changed:
            self._written += 1
            self._changed.notify_all()
            if unit.runs:
                self._copier.progress(unit.read_bytes)

    def _add_late(self, unit: CopyUnit, memory: memoryview) -> bool:
        """Sums a unit's tensors, and adds its late bytes. Returns as `_copy` does."""
        sums = self._sums
        if sums is None:
            return True
        found = [(run, sums.of(run, memory[run.at : run.at + run.nbytes])) for run in unit.runs]
        with self._changed:
            for run, sum_of_run in found:
                sums.add(run, sum_of_run)
            self._changed.notify_all()
        for at, tensors, part in unit.late:
            with self._changed:
                is_known = sums.has(tensors)
                if not is_known and self._placed is not None:
                    self._deferred.append((unit.offset + at, part))
                    continue
            if not is_known and not self._wait(partial(sums.has, tensors)):
                return False
            memory[at : at + part.nbytes] = part.make(sums.records)
        return True

    def _wait(self, is_ready: Callable[[], bool]) -> bool:
        """Waits for other threads. Returns False if one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or is_ready())
            return not self._is_over


class _Memory(threading.local):
    """Memory of each thread, which later units use again: new memory is slow."""

    def __init__(self) -> None:
        self._held: dict[str, mmap] = {}

    def of(self, use: str, nbytes: int) -> memoryview:
        """Returns memory for one use, aligned for any dtype; its content is undefined."""
        memory = self._held.pop(use, None)
        if memory is None or len(memory) < nbytes:
            memory = None  # let go before there are two
            memory = mmap(-1, max(nbytes, 2 * UNIT_BYTES))
        self._held[use] = memory
        return memoryview(memory)[:nbytes]


class TensorSums(ABC):
    """The records of a file's tensors."""

    def __init__(self, plan: FilePlan) -> None:
        self._sizes = [part.nbytes for part in plan.parts if isinstance(part, OutgoingTensor)]
        self._known = 0
        self._records = bytearray()

    @abstractmethod
    def of(self, run: TensorRun, data: memoryview) -> Any:
        """Returns the checksums of a run, of a type for `add`. Changes nothing."""

    @abstractmethod
    def add(self, run: TensorRun, found: Any) -> None:
        """Adds the checksums of a run."""

    @abstractmethod
    def _whole(self, tensor: int, nbytes: int) -> bytes | None:
        """Returns the records of a tensor, and forgets them; None unless all runs were added."""

    def has(self, tensors: int) -> bool:
        """Whether the records of the first `tensors` tensors are known."""
        while self._known < tensors:
            found = self._whole(self._known, self._sizes[self._known])
            if found is None:
                return False
            self._records += found
            self._known += 1
        return True

    @property
    def records(self) -> bytes:
        """The records of the first tensors: of as many as `has` was asked for."""
        return bytes(self._records)

    @property
    def all_records(self) -> bytes:
        """The records of all tensors, whose runs were added."""
        assert self.has(len(self._sizes))
        return bytes(self._records)


class Crc32Sums(TensorSums):
    """The CRC-32 of each tensor, as 4 bytes."""

    def __init__(self, plan: FilePlan) -> None:
        super().__init__(plan)
        self._parts: dict[int, SummedRanges] = {}

    def of(self, run: TensorRun, data: memoryview) -> int:
        return crc32(data)

    def add(self, run: TensorRun, found: int) -> None:
        self._parts.setdefault(run.tensor, SummedRanges()).add(run.lo, run.lo + run.nbytes, found)

    def _whole(self, tensor: int, nbytes: int) -> bytes | None:
        parts = self._parts.get(tensor)
        found = parts.whole(nbytes) if parts is not None else None
        if found is None and nbytes:
            return None
        self._parts.pop(tensor, None)
        return (found or 0).to_bytes(4, "little")


@dataclass(slots=True)
class _Chunks:
    """The chunks of one tensor so far."""

    records: dict[int, bytes] = field(default_factory=dict)
    begun: dict[int, tuple[bytearray, int]] = field(default_factory=dict)
    """Chunks that runs end in: their bytes so far, and how many are missing."""


@dataclass(frozen=True, slots=True)
class _ChunkRun:
    """The chunks of a run."""

    first: int
    """The first whole chunk."""
    records: list[bytes]
    """Those of the whole chunks."""
    ends: list[tuple[int, bytes]]
    """The bytes of chunks that other runs have parts of, each with its first byte."""


class ChunkSums(TensorSums):
    """The record of each chunk of each tensor. A run may begin and end inside a chunk."""

    def __init__(self, plan: FilePlan) -> None:
        super().__init__(plan)
        self._chunk_bytes = plan.chunk_bytes
        self._tensors: dict[int, _Chunks] = {}

    def of(self, run: TensorRun, data: memoryview) -> _ChunkRun:
        """Returns the records of a run's whole chunks, and the bytes of others."""
        step, lo, hi = self._chunk_bytes, run.lo, run.lo + run.nbytes
        begin = min(hi, -(-lo // step) * step)
        end = hi if hi == self._sizes[run.tensor] else max(begin, hi // step * step)
        records = [
            record_of(data[at - lo : min(at + step, end) - lo]) for at in range(begin, end, step)
        ]
        ends = [(at, bytes(data[at - lo : to - lo])) for at, to in ((lo, begin), (end, hi))]
        return _ChunkRun(
            begin // step, records, [last_entry for last_entry in ends if last_entry[1]]
        )

    def add(self, run: TensorRun, found: _ChunkRun) -> None:
        chunks = self._tensors.setdefault(run.tensor, _Chunks())
        chunks.records.update(enumerate(found.records, found.first))
        for at, data in found.ends:
            self._add_end(chunks, self._sizes[run.tensor], at, data)

    def add_stored(self, run: TensorRun, chunks: Sequence[Chunk]) -> None:
        """Adds the chunks of a run that begins with one, by their checksums at the source."""
        records = [RECORD.pack(chunk.digest, chunk.stored_bytes) for chunk in chunks]
        self.add(run, _ChunkRun(run.lo // self._chunk_bytes, records, []))

    def _add_end(self, chunks: _Chunks, nbytes: int, at: int, data: bytes) -> None:
        chunk, start = divmod(at, self._chunk_bytes)
        size = min(self._chunk_bytes, nbytes - chunk * self._chunk_bytes)
        memory, missing = chunks.begun.pop(chunk, (bytearray(), size))
        memory = memory or bytearray(size)
        memory[start : start + len(data)] = data
        if missing > len(data):
            chunks.begun[chunk] = memory, missing - len(data)
        else:
            chunks.records[chunk] = record_of(memory)

    def _whole(self, tensor: int, nbytes: int) -> bytes | None:
        count = -(-nbytes // self._chunk_bytes)
        found = self._tensors.get(tensor)
        if count and (found is None or len(found.records) < count):
            return None
        self._tensors.pop(tensor, None)
        return b"" if found is None else b"".join([found.records[at] for at in range(count)])
