"""Writes planned files together with other ranks: each rank copies a share of each file.

Rules:

1. All ranks plan the same files, and agree on this before the first file appears.
2. Rank 0 creates each file. In a folder that all ranks see, each rank then writes a run of whole
   parts, about as many bytes as the others. One rank writes all of a tensor, and so knows its
   checksums. Rank 0 writes the bytes that checksums decide last.
3. In a bucket one process writes a file: each rank writes whole files. Rank 0 writes the last one,
   which may make the folder a checkpoint, once all others are complete.
4. A failure of one rank ends the call on all (`Ranks.call`), and no file appears on a disk.

The bytes of stored tensors as streams, for a caller that takes them in order.

The units of all tensors (`ckpt.plan.copy_plan`) are read in their order by several threads, at most
one unit a thread ahead of the caller.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from mmap import mmap

import xxhash

from ckpt.errors import StoreError
from ckpt.plan.copy_plan import CopyUnit
from ckpt.stores.local_files import LocalFileWriter, join_file
from ckpt.transfer.copy_files import SPAN_BYTES, FileCopier
from formats.catalog import FilePlan, Late, OutgoingTensor, Part, length_of
from formats.storage import FileWriter, Pool, Writer
from sharding.agreement.ranks import HASH_BITS, Ranks


def share_of(plan: FilePlan, rank: int, world_size: int) -> tuple[int, FilePlan]:
    """Returns the first byte of a rank's share of a file, and its parts (rule 2).

    Late bytes are zeros.

    >>> offset, share = share_of(FilePlan("f", [b"ab", b"cd", b"efgh"]), 1, 2)
    >>> offset, share.parts
    (4, (b'efgh',))
    """
    bounds = [0, *accumulate(map(length_of, plan.parts))]
    lo, hi = (_nearest(bounds, bounds[-1] * at // world_size) for at in (rank, rank + 1))
    hi = hi if rank + 1 < world_size else len(plan.parts)
    return bounds[lo], replace(plan, parts=tuple(map(_as_zeros, plan.parts[lo:hi])))


def _nearest(bounds: Sequence[int], wanted: int) -> int:
    """Returns the index of the number next to `wanted` in an ascending list."""
    after = bisect_left(bounds, wanted)
    return after - 1 if after and bounds[after] - wanted > wanted - bounds[after - 1] else after


def write_plans(
    ranks: Ranks,
    copier: FileCopier,
    placed: Callable[[], AbstractContextManager[Writer]],
    plans: Sequence[FilePlan],
    is_far: bool,
) -> list[bytes]:
    """Writes the files of a checkpoint, by this process or, if it is not alone, by all ranks.

    `placed` gives the writer, which puts the files in their place; `is_far` says it is a bucket's.
    Returns the records of each file's tensors (`formats.catalog`), on rank 0.

    Raises:
        CorruptError: a chunk or record is not as it was written.
        StoreError: the ranks have different plans, or a rank does not see rank 0's file.
        RankError: another rank failed; it has that rank's number and error.
    """
    if ranks.is_single_process:
        with placed() as writer:
            return copier.write(writer, plans)
    if not ranks.agree("planning", hashes={"plans": hash_of(plans)}).same["plans"]:
        raise StoreError(
            "the ranks have read different checkpoints, or convert to different places: give all "
            "ranks the same arguments, and do not replace the checkpoint meanwhile"
        )
    if is_far:
        with placed() as writer:
            return _write_files(ranks, copier, writer, plans)
    if ranks.rank == 0:
        with placed() as writer:
            return _write_shares(ranks, copier, writer, plans)
    return _write_shares(ranks, copier, None, plans)


def _write_shares(
    ranks: Ranks, copier: FileCopier, writer: Writer | None, plans: Sequence[FilePlan]
) -> list[bytes]:
    """Writes files on a disk that all ranks see (rule 2); `writer` is rank 0's."""
    written: list[bytes] = []
    for plan in plans:
        with ExitStack() as stack:
            file = _open_on_all(ranks, stack, writer, plan.name)
            is_last = plan is plans[-1]
            own = ranks.run_on_all(
                "copying", partial(_copy_share, ranks, copier, file, plan, is_last)
            )
            records = b"".join(ranks.gather("copying", own))
            written.append(records)
            if writer is None:
                ranks.run_on_all("flushing", stack.close)
                ranks.run_on_all("completing", int)
            else:
                ranks.run_on_all("flushing", partial(_write_late, file, plan, records))
                ranks.run_on_all("completing", stack.close)
    return written


def _write_files(
    ranks: Ranks, copier: FileCopier, writer: Writer, plans: Sequence[FilePlan]
) -> list[bytes]:
    """Writes files into a bucket (rule 3)."""
    own = plans[ranks.rank : -1 : ranks.world_size]
    last = plans[-1:] if ranks.rank == 0 else ()
    records = ranks.run_on_all("writing", partial(copier.write, writer, own))
    written: list[bytes] = []
    for turn in range(-(-(len(plans) - 1) // ranks.world_size)):
        written += ranks.gather("writing", records[turn] if turn < len(records) else b"")
    records = ranks.run_on_all("writing", partial(copier.write, writer, last))
    return [*written[: len(plans) - 1], *records]


def hash_of(plans: Sequence[FilePlan]) -> int:
    """Returns a hash of the files' names, sizes and literal bytes, of `HASH_BITS` bits."""
    hasher = xxhash.xxh3_64()
    for plan in plans:
        lengths = [length_of(part) for part in plan.parts]
        hasher.update(repr((plan.name, lengths)).encode())
        for part in plan.parts:
            if isinstance(part, bytes):
                hasher.update(part)
    return hasher.intdigest() >> (64 - HASH_BITS)


def _open_on_all(
    ranks: Ranks, stack: ExitStack, writer: Writer | None, name: str
) -> LocalFileWriter:
    """Returns the file that rank 0 creates, opened on each rank."""
    if writer is not None:
        file = stack.enter_context(writer.create(name))
        assert isinstance(file, LocalFileWriter)
        ranks.broadcast(os.fsencode(file.path))
        return file
    path = os.fsdecode(ranks.broadcast(b""))
    try:
        return stack.enter_context(join_file(path, path))
    except FileNotFoundError as error:
        raise StoreError(
            f"{path}: rank 0 writes this file, and rank {ranks.rank} does not see it: convert to a "
            "folder that all hosts share, or on one host"
        ) from error


def _copy_share(
    ranks: Ranks, copier: FileCopier, file: FileWriter, plan: FilePlan, is_last: bool
) -> bytes:
    """Copies this rank's share of a file; returns the records of its tensors."""
    offset, share = share_of(plan, ranks.rank, ranks.world_size)
    records = copier.write_part(file, share, offset)
    if is_last:
        copier.finish()
    return records


def _write_late(file: LocalFileWriter, plan: FilePlan, records: bytes) -> None:
    """Writes the bytes that checksums decide, by the records of all tensors."""
    at = 0
    for part in plan.parts:
        if isinstance(part, Late):
            file.write_at(at, part.make(records))
        at += length_of(part)


def _as_zeros(part: Part) -> Part:
    return bytes(part.nbytes) if isinstance(part, Late) else part


@contextmanager
def stream_tensors(
    copier: FileCopier, tensors: Sequence[OutgoingTensor]
) -> Iterator[list[OutgoingTensor]]:
    """Gives the tensors with streams of their stored bytes, which the caller takes in turn.

    A block is valid until the next one. The caller calls `copier.finish` after the last stream. A
    stream raises as `FileCopier.write` does. At the end of the block no thread reads any more: one
    that was left would ask a server that is gone again and again, until its deadline.
    """
    blocks = _blocks(copier, tensors)
    waiting: list[tuple[int, memoryview]] = []
    """The next block, and its tensor's number."""

    def stream(number: int) -> Iterator[memoryview]:
        while True:
            if not waiting:
                waiting.extend(islice(blocks, 1))
            if not waiting or waiting[0][0] != number:
                return
            yield waiting.pop()[1]

    with closing(blocks):
        yield [tensor._replace(blocks=partial(stream, at)) for at, tensor in enumerate(tensors)]


def memory_bytes_of(copier: FileCopier) -> int:
    """Returns the most memory of the streams of a copier."""
    sizes = copier.sizes
    return sizes.memory_bytes + (sizes.workers + 1) * 2 * _unit_bytes(copier)


def _unit_bytes(copier: FileCopier) -> int:
    """Returns the size of a unit: that of a span, or of a read from a far source."""
    return max(SPAN_BYTES, copier.sizes.unit_bytes)


def _blocks(
    copier: FileCopier, tensors: Sequence[OutgoingTensor]
) -> Generator[tuple[int, memoryview], None, None]:
    """Yields the bytes of all tensors in order, each block with the number of its tensor."""
    units = copier.units(FilePlan("", tensors), _unit_bytes(copier))
    free: list[mmap] = []
    coming: deque[tuple[CopyUnit, mmap, Future[None]]] = deque()
    with Pool(copier.sizes.workers, "ckpt-ahead") as ahead:
        try:
            while True:
                while len(coming) <= copier.sizes.workers and (unit := next(units, None)):
                    memory = _memory(free, unit.nbytes)
                    view = memoryview(memory)[: unit.nbytes]
                    coming.append((unit, memory, ahead.submit(copier.fill, unit, view)))
                if not coming:
                    return
                unit, memory, read = coming.popleft()
                read.result()
                view = memoryview(memory)
                for run in unit.runs:
                    yield run.tensor, view[run.at : run.at + run.nbytes]
                copier.progress(unit.read_bytes)
                free.append(memory)
        finally:
            for _, _, read in coming:
                read.cancel()


def _memory(free: list[mmap], nbytes: int) -> mmap:
    """Returns memory of at least `nbytes` bytes that is free, or new; new memory is slow."""
    memory = free.pop() if free else None
    return memory if memory is not None and len(memory) >= nbytes else mmap(-1, max(nbytes, 1))
