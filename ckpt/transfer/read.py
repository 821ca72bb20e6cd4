"""From files into memory: the one way in which bytes are read, verified and placed.

`ckpt.plan.read_plan` plans: which ranges of which files, and where they belong. This does it: reads
what lies together in one call, checks what was read against its checksums while the processor still
has it in its cache, and places what could not be read where it belongs.

Rules:

1. Bytes with a checksum of their own are verified before anybody uses them. Those of a record that
   has one for all its bytes are when the last of them is read (`ckpt.transfer.record_sums`).
2. Files are read in ascending order. A local file is read in parts that stay in the cache until
   they are verified; from a server, which takes time to answer, in large ones.
3. Memory beyond the targets is at most `workers` times a scratch buffer, or one chunk, and what
   that decodes to.
4. There are several threads only where each has a processor to itself, or where they wait for a
   server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from mmap import mmap

from ckpt.budget import memory_budget
from ckpt.plan.read_plan import Bite, Limits, Request, bites_of, groups_of
from ckpt.transfer.record_sums import Part, RecordSums, Verify, changed
from formats.catalog import Chunk, Extent
from formats.errors import CorruptError
from formats.storage import LOCAL_READ_BYTES, Reader

SCRATCH_BYTES = 2 << 20
"""The largest read of a local file that goes through a scratch buffer."""
STRAIGHT_BYTES = 8 << 20
"""What one thread takes on at once of a tensor that is read into its own memory."""
THREAD_BYTES = 32 << 20
"""Reads of less than this, all together, are done by the caller: threads would cost more."""
MAX_WORKERS = 4
FAR_WORKERS = 4
"""Threads that wait for a server, which takes time to answer."""


def transfer(
    reader: Reader,
    requests: Sequence[Request],
    verify: Verify = True,
    progress: Callable[[int], None] | None = None,
    workers: int | None = None,
    limits: Limits | None = None,
) -> tuple[str, ...]:
    """All requests are done when this returns: the tensors of which not all could be verified.

    Raises CorruptError naming file, tensor and bytes for a chunk or record that is not what was
    written; what the targets hold then is undefined.
    """
    sums = RecordSums(verify)
    sums.expect(requests)
    engine = Transfer(reader, sums, workers, limits)
    engine.run(requests, progress)
    engine.finish(progress)
    return sums.unverified


@dataclass(frozen=True, slots=True)
class Reading:
    """How much is read at once, and by how many threads."""

    workers: int
    limits: Limits

    @classmethod
    def within(cls, budget: int, reader: Reader, ranks_here: int = 1) -> Reading:
        """What suits the place that is read from, and takes no more memory than the budget."""
        is_far = reader.read_bytes > LOCAL_READ_BYTES
        workers = FAR_WORKERS if is_far else workers_for(ranks_here)
        # A thread has what does not go straight where it belongs, and what that decodes to.
        share = max(LOCAL_READ_BYTES, budget // (2 * workers))
        if is_far:
            return cls(workers, Limits(reader.read_bytes, reader.read_bytes, share))
        read = min(reader.read_bytes, share)
        scratch = min(max(read, SCRATCH_BYTES), share)
        return cls(workers, Limits(read, max(read, STRAIGHT_BYTES), scratch))


def workers_for(ranks_here: int) -> int:
    """How many threads a rank has processors for, of as many ranks on this machine."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "") or ranks_here)
    return min(MAX_WORKERS, max(1, len(os.sched_getaffinity(0)) // max(1, ranks_here)))


class Transfer:
    """Does requests from one reader, as `transfer` does, and keeps its scratch memory for the next.

    Safe to use from several threads.
    """

    def __init__(
        self,
        reader: Reader,
        sums: RecordSums,
        workers: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`sums` says what is verified, and knows what other transfers have read of records."""
        self._reader = reader
        self._sums = sums
        usual = Reading.within(memory_budget(), reader)
        self._workers = usual.workers if workers is None else workers
        self._limits = usual.limits if limits is None else limits
        self._scratch = threading.local()

    def run(
        self, requests: Sequence[Request], progress: Callable[[int], None] | None = None
    ) -> None:
        """All requests are done when this returns. Raises as `transfer` does."""
        self._read(bites_of(requests, bool(self._sums.verify), self._limits), progress)

    def finish(self, progress: Callable[[int], None] | None = None) -> None:
        """All that was to be verified is, once all requests are done: records are read to the end.

        Raises as `transfer` does.
        """
        most = min(self._limits.read_bytes, self._limits.scratch_bytes)
        self._read(self._sums.rest(most), progress)

    def _read(self, bites: list[Bite], progress: Callable[[int], None] | None) -> None:
        groups = groups_of(bites, self._limits)

        def work(group: list[Bite]) -> None:
            self._do(group)
            if progress is not None:
                progress(sum(bite.wanted_bytes for bite in group))

        nbytes = sum(bite.hi - bite.lo for bite in bites)
        if self._workers <= 1 or nbytes < THREAD_BYTES:
            for group in groups:
                work(group)
            return
        with ThreadPoolExecutor(self._workers, "ckpt-read") as pool:
            shared = _Shared(groups)
            for done in [pool.submit(shared.work, work) for _ in range(self._workers)]:
                done.result()

    def _do(self, group: list[Bite]) -> None:
        first = group[0]
        if first.straight and len(group) == 1:
            self._straight(first)
            return
        # In the order of the file: what goes straight, and the lengths of what lies between that.
        ends: list[memoryview | int] = []
        places = []  # of each bite, in scratch memory
        used, begin, end = 0, first.lo, first.lo
        for bite in group:
            places.append(used + bite.lo - begin)
            if not bite.straight:
                end = max(end, bite.hi)
                continue
            if bite.lo > begin:
                ends.append(bite.lo - begin)
                used += bite.lo - begin
            ends.append(_own(bite))
            begin = end = bite.hi
        if end > begin:
            ends.append(end - begin)
            used += end - begin
        scratch = self._buffer(used) if used else memoryview(b"")
        targets, at = [], 0
        for one in ends:
            if isinstance(one, int):
                targets.append(scratch[at : at + one])
                at += one
            else:
                targets.append(one)
        self._reader.read_into(first.file, first.lo, *targets)
        for bite, place in zip(group, places, strict=True):
            stored = _own(bite) if bite.straight else scratch[place : place + bite.hi - bite.lo]
            self._check(bite, bite.chunk, stored)
            part = self._sums.part(bite.request, bite.lo, bite.hi)
            if part is not None:
                part.take(bite.lo, stored)
                self._compare(bite, part)
            if bite.fit is not None:
                _place(bite, self._decoded(bite, stored))

    def _straight(self, bite: Bite) -> None:
        """One range into its target, in parts that are verified as they come."""
        target, step, chunk = _own(bite), self._limits.read_bytes, bite.chunk
        chunks = bite.request.extent.chunks
        if chunk >= 0 and chunks is not None:
            step = max(1, step // chunks.chunk_bytes) * chunks.chunk_bytes
        part = self._sums.part(bite.request, bite.lo, bite.hi)
        for at in range(0, len(target), step):
            some = target[at : at + step]
            self._reader.read_into(bite.file, bite.lo + at, some)
            if part is not None:
                part.take(bite.lo + at, some)
            if chunk >= 0 and chunks is not None:
                self._check(bite, chunk + at // chunks.chunk_bytes, some)
        if part is not None:
            self._compare(bite, part)

    def _check(self, bite: Bite, first: int, stored: memoryview) -> None:
        """Raise unless these are the bytes of the chunks from `first` on."""
        chunks = bite.request.extent.chunks
        if not self._sums.verify or chunks is None or first < 0:
            return
        wrong = chunks.wrong(first, stored)
        if wrong is not None:
            extent, name = bite.request.extent, bite.request.name
            raise damaged(self._reader.url, extent, name, chunks[wrong])

    def _compare(self, bite: Bite, part: Part) -> None:
        """Raise where this part, summed, was the last of a record that is not what was written."""
        wrong = self._sums.wrong(part)
        if wrong is not None:
            raise changed(self._reader.url, bite.request.extent, part.names, wrong)

    def _decoded(self, bite: Bite, stored: memoryview) -> memoryview:
        """The bytes of the extent from `bite.at` on."""
        extent = bite.request.extent
        chunks = extent.chunks
        if chunks is None or not chunks.compressed:
            return stored
        index, at, size = bite.chunk, 0, 0
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
        """This thread's scratch memory, aligned to any element; kept, for fresh memory is slow."""
        held: mmap | None = getattr(self._scratch, use, None)
        if held is None or len(held) < nbytes:
            held = None  # let go before there are two
            setattr(self._scratch, use, held)
            held = mmap(-1, max(nbytes, SCRATCH_BYTES))
            setattr(self._scratch, use, held)
        return memoryview(held)[:nbytes]


class _Shared:
    """Groups that several threads take from in turn, until one of them fails."""

    def __init__(self, groups: Iterator[list[Bite]]) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._failed = False

    def work(self, action: Callable[[list[Bite]], None]) -> None:
        """Do groups until there are none."""
        while (group := self._next()) is not None:
            try:
                action(group)
            except BaseException:
                self._failed = True
                raise

    def _next(self) -> list[Bite] | None:
        with self._lock:
            return None if self._failed else next(self._groups, None)


def damaged(url: str, extent: Extent, name: str, chunk: Chunk) -> CorruptError:
    """The error for a chunk whose bytes are not what was written."""
    return CorruptError(
        f"{url}/{extent.file}: {name}: bytes {chunk.offset}:{chunk.offset + chunk.stored_bytes} do "
        f"not have the checksum {chunk.digest.hex()} they were written with: they were changed "
        "since; restore the file from another copy"
    )


def _own(bite: Bite) -> memoryview:
    """The bytes of the target that a straight bite is."""
    return bite.request.memory[bite.at : bite.at + bite.hi - bite.lo]


def _place(bite: Bite, data: memoryview) -> None:
    """Copy a bite's box from the decoded bytes into its target."""
    fit, (_, itemsize, _, _, memory) = bite.fit, bite.request
    assert fit is not None
    source, target = fit.source, fit.target
    start = source.at * itemsize - bite.at
    shape = source.box.shape
    at = target.at * itemsize
    if fit.is_straight:
        nbytes = prod(shape) * itemsize
        memory[at : at + nbytes] = data[start : start + nbytes]
        return
    import numpy as np  # who looks into a checkpoint, and places nothing, starts without

    dtype = _CARRIERS[itemsize]
    steps = tuple([stride * itemsize for stride in source.strides])
    here = np.ndarray(shape, dtype, buffer=data, offset=start, strides=steps)
    steps = tuple([stride * itemsize for stride in target.strides])
    there = np.ndarray(shape, dtype, buffer=memory, offset=at, strides=steps)
    there[...] = here


_CARRIERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""By their bytes: what carries elements that are not looked at."""
