"""One rank's shard file: the job of writing it, and the writing, here or in the writer process.

A blocking save runs its job in place, from the tensors' memory. A save in the background sends the
job to the writer process, which writes from staged memory. A job and its answer travel as JSON:
they are names and numbers. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any, Literal

from ckpt.errors import StoreError
from ckpt.plan.save_plan import SavePlan, WriteItem
from ckpt.stores.store import Store, open_store
from ckpt.transfer.bases import opened_base
from formats.catalog import TensorRef, Tree
from formats.dtypes import dtype_named
from formats.native.borrowed import Lent
from formats.native.manifest import Manifest, StoredTensor, dump
from formats.native.manifest_loader import load
from formats.native.shard import Progress, ShardSummary
from formats.native.shard_writer import write_shard
from formats.outgoing import OutgoingTensor

STEP_BYTES = 8 << 20
"""Bytes between two calls of `advance`: whole chunks, so that none is cut in two."""


Compress = bool | Literal["delta"]
"""Whether chunks are compressed, and by what they differ in from a base's where that is less."""


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What to write, and where."""

    url: str
    """The folder, as the writer reaches it."""
    name: str
    """The file in it."""
    compress: Compress
    plan: SavePlan
    base: str | None = None
    """The checkpoint to borrow from."""
    rank: int = 0
    """Whose part of the tensors this is, in their layouts."""
    layouts: Mapping[str, StoredTensor] = field(default_factory=dict)
    """All tensors in their stored layouts: only for a base."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The driver's: secrets among them, which is why they are never shown."""


def write(
    job: WriteJob,
    store: Store,
    tensors: Sequence[OutgoingTensor],
    progress: Progress | None = None,
    overlap: bool = True,
) -> ShardSummary:
    """The job's file in the folder of `store`, complete and durable.

    `tensors` are the streams of the plan's items. What `progress`, or a stream, raises ends the
    writing and leaves no file. `overlap` is for a writer that has a second core.
    """
    chunks = _base_chunks(job)
    compress, deltas = bool(job.compress), job.compress == "delta"
    with store.create(job.name, rewritable=compress or chunks is not None) as file:
        return write_shard(file, tensors, compress, progress, chunks, deltas, overlap)


def write_staged(job: WriteJob, data: memoryview, advance: Callable[[int], None]) -> ShardSummary:
    """As `write`, from memory in which the plan's items lie end to end, and stay as they are.

    `advance` is told how many bytes have been dealt with; what it raises ends the writing.
    """
    tensors = [
        OutgoingTensor(item.name, item.shape, item.dtype, _stream(data, item, advance), stable=True)
        for item in job.plan.items
    ]
    with open_store(job.url, job.options) as store:
        summary = write(job, store, tensors)
        advance(job.plan.nbytes)
        return summary


def _base_chunks(job: WriteJob) -> Lent | None:
    """The chunks that the base has of the tensors to be written."""
    if job.base is None:
        return None
    with opened_base(job.url, job.base, job.options) as found:
        return found.to(job.rank, job.layouts)


def _stream(
    data: memoryview, item: WriteItem, advance: Callable[[int], None]
) -> Callable[[], Iterator[memoryview]]:
    lo, hi = item.offset, item.offset + item.nbytes

    def blocks() -> Iterator[memoryview]:
        for at in range(lo, hi, STEP_BYTES):
            advance(at)
            yield data[at : min(at + STEP_BYTES, hi)]

    return blocks


def job_message(job: WriteJob) -> bytes:
    """A job on its way to the writer."""
    fields = {field.name: getattr(job, field.name) for field in dataclass_fields(job)}
    fields["plan"] = [item._replace(dtype=item.dtype.name) for item in job.plan.items]  # type: ignore[arg-type]
    named: Tree = {name: TensorRef(name) for name in job.layouts}
    fields["layouts"] = dump(Manifest(job.layouts, {}, named, ())).decode()
    return json.dumps(fields, separators=(",", ":")).encode()


def read_job(message: bytes) -> WriteJob:
    """A job that has arrived."""
    fields = json.loads(message)
    items = (WriteItem(*values) for values in fields["plan"])
    plan = SavePlan(
        tuple(
            item._replace(dtype=dtype_named(str(item.dtype), item.name), shape=tuple(item.shape))
            for item in items
        )
    )
    layouts = load(fields["layouts"].encode(), "the layouts of a job", stored=False).tensors
    return WriteJob(**{**fields, "plan": plan, "layouts": layouts})


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
