"""One shard file to be written from staged memory: as a message, and the writing itself.

A job and its answer are JSON: they are names and numbers. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ckpt.errors import StoreError
from ckpt.stores.store import open_store
from ckpt.transfer.bases import lender
from formats.dtypes import dtype_named
from formats.native.borrowed import Lent
from formats.native.manifest_loader import load
from formats.native.shard import ShardSummary
from formats.native.shard_writer import write_shard
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
    compress: bool | Literal["delta"]
    tensors: Sequence[tuple[str, Sequence[int], str]]
    """Name, shape and dtype of what lies end to end in memory, in the order of the file."""
    base: str | None = None
    """The checkpoint to borrow from."""
    rank: int = 0
    """Whose part of the tensors this is, in their layouts."""
    layouts: str = ""
    """All tensors in their stored layouts, as a manifest has them: only for a base."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The driver's: secrets among them, which is why they are never shown."""


def write(job: WriteJob, data: memoryview, advance: Callable[[int], None]) -> ShardSummary:
    """The job's file, complete and durable, from memory that stays as it is meanwhile.

    `advance` is told how many bytes have been dealt with. What it raises ends the writing, and
    leaves no file.
    """
    tensors = list(_outgoing(job, data, advance))
    lent = _lent(job)
    with (
        open_store(job.url, job.options) as store,
        store.create(job.name, rewritable=bool(job.compress) or lent is not None) as file,
    ):
        deltas = job.compress == "delta"
        summary = write_shard(file, tensors, bool(job.compress), lent=lent, deltas=deltas)
        advance(sum(tensor.nbytes for tensor in tensors))
        return summary


def _lent(job: WriteJob) -> Lent | None:
    """What the base has of what is to be written."""
    if job.base is None:
        return None
    wanted = load(job.layouts.encode(), "the layouts of a job", stored=False)
    with lender(job.url, job.base, job.options) as found:
        return found.to(job.rank, wanted.tensors)


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
    said = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": said}).encode()


def read_answer(message: bytes, where: str) -> ShardSummary:
    """The answer that has arrived. Raises StoreError where it is an error."""
    answer = json.loads(message)
    if "error" in answer:
        said = answer["error"]
        raise StoreError(said if where in said else f"{where}: {said}")
    return ShardSummary(**answer["written"])
