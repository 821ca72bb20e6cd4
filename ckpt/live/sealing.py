"""The shard file around a rank's part in memory: header and chunk table, without a copy of it.

An arena has a part's bytes in the order of the file. The writer process hashes them, and gives the
host server the file as segments: the header, the arena's bytes, the chunk table. The result has the
bytes that `formats.native.shard_writer.write_shard` would write. This module imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import xxhash

from ckpt.live.process import HostServer
from ckpt.live.protocol import Segment
from ckpt.plan.save_plan import SavePlan, WriteItem
from ckpt.saving.arena import HEAD_BYTES, new_memory
from ckpt.transfer.write_job import STEP_BYTES, call_message, plan_json, read_plan
from formats.native.shard import ShardSummary, chunk_bytes_of
from formats.native.shard_writer import raw_header, records_of


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
    return Sealed(raw_header(items)[0], b"".join(records), nbytes)


@dataclass(frozen=True, slots=True)
class SealJob:
    """A rank's file of one version, for the writer process."""

    name: str
    """The name of the live state."""
    version: int
    file: str
    plan: SavePlan


def seal_job_message(job: SealJob) -> bytes:
    """Returns a job as bytes for the writer process; the arena's descriptor follows them."""
    fields = {**asdict(replace(job, plan=SavePlan(()))), "plan": plan_json(job.plan)}
    return call_message(f"{__name__}:seal", fields)


def seal(
    fields: Mapping[str, Any], data: memoryview, arena: int, advance: Callable[[int], None]
) -> ShardSummary:
    """Seals the staged part of a `SealJob`, and gives it to the server of this host.

    `arena` is the descriptor of the memory of `data`. Raises UnreachableError without a server.
    """
    job = SealJob(**{**fields, "plan": read_plan(fields["plan"])})
    made = make_sealed(job.plan.items, data, advance)
    frame = in_memory(made.header + made.table)
    try:
        head = len(made.header)
        segments = [
            Segment(frame, 0, head),
            Segment(arena, HEAD_BYTES, made.data_bytes),
            Segment(frame, head, len(made.table)),
        ]
        server = HostServer(job.name)
        try:
            server.put(job.version, job.file, segments)
        finally:
            server.close()
    finally:
        os.close(frame)
    return made.summary


def in_memory(data: bytes) -> int:
    """Returns a descriptor of shared memory with these bytes."""
    descriptor = new_memory("ckpt-live")
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
