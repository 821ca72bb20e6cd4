"""One shard file to be written from staged memory: as a message, and the writing itself.

A job and its answer are JSON: they are names and numbers. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from ckpt.errors import StoreError
from ckpt.store import open_store
from formats.dtypes import dtype_named
from formats.native.shard import ShardSummary, write_shard
from formats.outgoing import OutgoingTensor

STEP_BYTES = 8 << 20
"""Bytes between two calls of `advance`: whole chunks, so that none is cut in two."""


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What to write, and where."""

    url: str
    """The folder, as the writer reaches it."""
    name: str
    """The file in it."""
    compress: bool
    tensors: Sequence[tuple[str, Sequence[int], str]]
    """Name, shape and dtype of what lies end to end in memory, in the order of the file."""


def write(job: WriteJob, data: memoryview, advance: Callable[[int], None]) -> ShardSummary:
    """The job's file, complete and durable, from memory that stays as it is meanwhile.

    `advance` is told how many bytes have been dealt with. What it raises ends the writing, and
    leaves no file.
    """
    tensors = list(_outgoing(job, data, advance))
    with (
        open_store(job.url) as store,
        store.create(job.name, rewritable=job.compress) as file,
    ):
        summary = write_shard(file, tensors, job.compress)
        advance(sum(tensor.nbytes for tensor in tensors))
        return summary


def _outgoing(
    job: WriteJob, data: memoryview, advance: Callable[[int], None]
) -> Iterator[OutgoingTensor]:
    lo = 0
    for name, given, dtype in job.tensors:
        kind, shape = dtype_named(dtype, name), tuple(given)
        hi = lo + kind.nbytes(shape)
        yield OutgoingTensor(name, shape, kind, _stream(data, lo, hi, advance), stable=True)
        lo = hi


def _stream(
    data: memoryview, lo: int, hi: int, advance: Callable[[int], None]
) -> Callable[[], Iterator[memoryview]]:
    def blocks() -> Iterator[memoryview]:
        for at in range(lo, hi, STEP_BYTES):
            advance(at)
            yield data[at : min(at + STEP_BYTES, hi)]

    return blocks


def job_message(job: WriteJob) -> bytes:
    """A job on its way to the writer."""
    return json.dumps(asdict(job), separators=(",", ":")).encode()


def read_job(message: bytes) -> WriteJob:
    """A job that has arrived."""
    return WriteJob(**json.loads(message))


def summary_message(summary: ShardSummary) -> bytes:
    """What was written, on its way back."""
    return json.dumps({"written": asdict(summary)}).encode()


def error_message(error: Exception) -> bytes:
    """Why nothing was written, on its way back."""
    return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


def read_answer(message: bytes, where: str) -> ShardSummary:
    """The answer that has arrived. Raises StoreError where it is an error."""
    answer = json.loads(message)
    if "error" in answer:
        raise StoreError(f"{where}: {answer['error']}")
    return ShardSummary(**answer["written"])
