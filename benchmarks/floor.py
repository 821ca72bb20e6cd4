"""The physical floor: the same bytes written and read with nothing else done.

    python benchmarks/floor.py --world-size 2 --store DIR

Every rank writes its own tensors' memory, as it lies, to one file of its own and flushes it, or
reads that file back into the same memory. No names, no checksums, no commit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import measure
import report
import workload

CALL_BYTES = 8 << 20
"""The most that one call writes or reads."""
VECTORS = 512


def write(path: str, buffers: Sequence[memoryview]) -> None:
    """The buffers in one file, flushed to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for group in calls(buffers):
            _whole(os.writev, descriptor, group)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: str, buffers: Sequence[memoryview]) -> None:
    """The buffers filled from such a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for group in calls(buffers):
            _whole(os.readv, descriptor, group)
    finally:
        os.close(descriptor)


def copy(source: str, target: str) -> None:
    """A file copied through a buffer and flushed, as `cp` does it."""
    buffer = memoryview(bytearray(CALL_BYTES))
    with open(source, "rb", buffering=0) as reading, open(target, "wb", buffering=0) as writing:
        while count := reading.readinto(buffer):
            _whole(os.writev, writing.fileno(), [buffer[:count]])
        os.fsync(writing.fileno())


def flushed(action: Callable[[], object], path: str) -> None:
    """Do something that writes a file, and flush the file to the disk."""
    action()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def calls(buffers: Sequence[memoryview]) -> list[list[memoryview]]:
    """The buffers in the groups that one system call takes."""
    groups: list[list[memoryview]] = [[]]
    size = 0
    for buffer in buffers:
        for start in range(0, len(buffer), CALL_BYTES):
            part = buffer[start : start + CALL_BYTES]
            if groups[-1] and (size + len(part) > CALL_BYTES or len(groups[-1]) == VECTORS):
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += len(part)
    return groups


def _whole(call: object, descriptor: int, group: Sequence[memoryview]) -> None:
    """Repeat a vectored call until it has done everything."""
    assert callable(call)
    waiting = list(group)
    while waiting:
        count = call(descriptor, waiting)
        if count <= 0:
            raise OSError("the file ends before the buffers are full")
        while waiting and count >= len(waiting[0]):
            count -= len(waiting.pop(0))
        if count:
            waiting[0] = waiting[0][count:]


def _on_rank(store: str, gib: float, rounds: int) -> tuple[measure.Samples, int]:
    import torch.distributed as dist

    training = workload.build(gib)
    buffers = training.buffers()
    path = f"{store}/raw-{dist.get_rank()}"
    contestants = {
        "raw write": measure.Contestant(lambda: write(path, buffers), lambda: report.remove(path)),
        "raw read": measure.Contestant(lambda: read(path, buffers)),
    }
    return measure.interleaved(contestants, rounds), training.nbytes()


def tables(options: report.Options) -> list[report.Table]:
    """One table: seconds of the raw write and the raw read."""
    rows = []
    for world_size in options.world_sizes:
        with options.folder() as store:
            ranks = measure.on_ranks(world_size, _on_rank, store, options.gib, options.rounds)
        samples = measure.joined(part for part, _ in ranks)
        nbytes = sum(size for _, size in ranks)
        for name, found in samples.items():
            seconds = [sample.seconds for sample in found]
            speeds = [nbytes / value / 1e9 for value in seconds]
            rows.append([str(world_size), name, report.spread(seconds), report.spread(speeds)])
    return [report.Table(f"The floor, {options.where}", ("W", "", "seconds", "GB/s"), rows)]


if __name__ == "__main__":
    report.main(__doc__, tables)
