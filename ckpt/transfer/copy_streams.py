"""The bytes of stored tensors as streams, for a caller that takes them in order.

The units of all tensors (`ckpt.plan.copy_plan`) are read in their order by several threads, at most
one unit a thread ahead of the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from mmap import mmap

from ckpt.plan.copy_plan import CopyUnit
from ckpt.transfer.copy_files import SPAN_BYTES, FileCopier
from formats.outgoing import FilePlan, OutgoingTensor
from formats.threads import Pool


def streamed(copier: FileCopier, tensors: Sequence[OutgoingTensor]) -> list[OutgoingTensor]:
    """Returns the tensors with streams of their stored bytes, which the caller takes in turn.

    A block is valid until the next one. The caller calls `copier.finish` after the last stream. A
    stream raises as `FileCopier.write` does.
    """
    blocks = _blocks(copier, tensors)
    held: list[tuple[int, memoryview]] = []
    """The next block, and its tensor's number."""

    def stream(number: int) -> Iterator[memoryview]:
        while True:
            if not held:
                held.extend(islice(blocks, 1))
            if not held or held[0][0] != number:
                return
            yield held.pop()[1]

    return [one._replace(blocks=partial(stream, at)) for at, one in enumerate(tensors)]


def memory_bytes_of(copier: FileCopier) -> int:
    """Returns the most memory of the streams of a copier."""
    sizes = copier.sizes
    return sizes.memory_bytes + (sizes.workers + 1) * 2 * _unit_bytes(copier)


def _unit_bytes(copier: FileCopier) -> int:
    """Returns the size of a unit: that of a span, or of a read from a far source."""
    return max(SPAN_BYTES, copier.sizes.unit_bytes)


def _blocks(
    copier: FileCopier, tensors: Sequence[OutgoingTensor]
) -> Iterator[tuple[int, memoryview]]:
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
                if copier.progress is not None:
                    copier.progress(unit.read_bytes)
                free.append(memory)
        finally:
            for _, _, read in coming:
                read.cancel()


def _memory(free: list[mmap], nbytes: int) -> mmap:
    """Returns memory of at least `nbytes` bytes that is free, or new; new memory is slow."""
    memory = free.pop() if free else None
    return memory if memory is not None and len(memory) >= nbytes else mmap(-1, max(nbytes, 1))
