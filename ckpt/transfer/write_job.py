"""The job of writing one rank's shard file, and its execution in any process.

A blocking save runs its job in place, from the tensors' memory. A background save sends the job to
the writer process, which writes from staged memory. A job and its answer are names and numbers, and
travel as JSON. This module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from importlib import import_module
from typing import Any, Literal

from ckpt.errors import StoreError
from ckpt.plan.save_plan import SavePlan, WriteItem
from ckpt.stores.store import Store, open_store
from ckpt.transfer.bases import open_base
from formats.catalog import OutgoingTensor, TensorRef, Tree
from formats.dtypes import count_nonfinite, dtype_named
from formats.native.borrowed import Lent
from formats.native.manifest import Manifest, StoredTensor, dump, load
from formats.native.shard import Progress, ShardSummary
from formats.native.shard_writer import write_shard
from sharding.agreement.call_events import Requests, count_requests, take_requests

STEP_BYTES = 8 << 20
"""Bytes between two calls of `advance`: a whole number of chunks."""
CALL = b'{"function":'
"""The start of the messages with jobs of other rooms, which name their function."""

Compress = bool | Literal["delta"]
"""Whether chunks are compressed; "delta" also stores differences from a base's chunks."""


@dataclass(frozen=True, slots=True)
class WriteJob:
    """The content and the place of one shard file."""

    url: str
    """The folder, as the writer reaches it."""
    name: str
    """The name of the file."""
    compress: Compress
    plan: SavePlan
    base: str | None = None
    """The checkpoint to borrow from."""
    rank: int = 0
    """The rank in the layouts whose part is written."""
    layouts: Mapping[str, StoredTensor] = field(default_factory=dict)
    """All tensors in their stored layouts; empty without a base."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The driver's options; never shown, because they may have secrets."""
    counts: bool = False
    """Whether to count the numbers that are not finite; only for staged memory."""


def write(
    job: WriteJob,
    store: Store,
    tensors: Sequence[OutgoingTensor],
    progress: Progress | None = None,
    overlap: bool = True,
) -> ShardSummary:
    """Writes the job's file in the folder of `store`: complete and durable when this returns.

    `tensors` are the streams of the plan's items. An exception of `progress` or of a stream ends
    the writing and leaves no file. `overlap` is for a writer that has a second core.
    """
    chunks = _base_chunks(job)
    compress, deltas = bool(job.compress), job.compress == "delta"
    with store.create(job.name, rewritable=compress or chunks is not None) as file:
        return write_shard(file, tensors, compress, progress, chunks, deltas, overlap)


def write_staged(job: WriteJob, data: memoryview, advance: Callable[[int], None]) -> ShardSummary:
    """As `write`, from memory with the plan's items end to end, which does not change meanwhile.

    `advance` is called with the number of bytes done so far; an exception of it ends the writing.
    """
    nonfinite: dict[str, int] | None = {} if job.counts else None
    tensors = [
        OutgoingTensor(
            item.name, item.shape, item.dtype, _stream(data, item, advance, nonfinite), stable=True
        )
        for item in job.plan.items
    ]
    with open_store(job.url, job.options) as store:
        summary = write(job, store, tensors)
        advance(job.plan.nbytes)
        return summary if nonfinite is None else replace(summary, nonfinite=sum(nonfinite.values()))


def _base_chunks(job: WriteJob) -> Lent | None:
    """Returns the chunks of the tensors that the base can lend; None without a base."""
    if job.base is None:
        return None
    with open_base(job.url, job.base, job.options) as found:
        return found.to(job.rank, job.layouts)


def _stream(
    data: memoryview,
    item: WriteItem,
    advance: Callable[[int], None],
    nonfinite: dict[str, int] | None = None,
) -> Callable[[], Iterator[memoryview]]:
    """Returns the stream of an item's bytes; `found` gets its count of numbers not finite."""
    lo, hi = item.offset, item.offset + item.nbytes

    def blocks() -> Iterator[memoryview]:
        count = 0
        for at in range(lo, hi, STEP_BYTES):
            advance(at)
            block = data[at : min(at + STEP_BYTES, hi)]
            if (
                nonfinite is not None
            ):  # here, because the hash of the block follows: it is in the cache
                nonfinite[item.name] = count = count + count_nonfinite(block, item.dtype)
            yield block

    return blocks


def call_message(function: str, fields: Mapping[str, Any]) -> bytes:
    """Returns a job for a function of another room as bytes; an arena's descriptor follows them.

    `function` is "module:function". The writer process calls it with the fields, the staged memory,
    the arena's descriptor and `advance`; it returns a `ShardSummary`.
    """
    return json.dumps({"function": function, "fields": fields}, separators=(",", ":")).encode()


def is_call(message: bytes) -> bool:
    """Whether a message to the writer process is one of `call_message`."""
    return message.startswith(CALL)


def read_call(message: bytes) -> tuple[Callable[..., ShardSummary], Mapping[str, Any]]:
    """Returns the function and the fields in the bytes of `call_message`."""
    job = json.loads(message)
    module, name = job["function"].split(":")
    function: Callable[..., ShardSummary] = getattr(import_module(module), name)
    return function, job["fields"]


def plan_json(plan: SavePlan) -> list[WriteItem]:
    """Returns a plan as JSON."""
    return [item._replace(dtype=item.dtype.name) for item in plan.items]  # type: ignore[arg-type]


def read_plan(rows: Sequence[Sequence[Any]]) -> SavePlan:
    """Returns the plan that `plan_json` made into JSON."""
    items = (WriteItem(*values) for values in rows)
    return SavePlan(
        tuple(
            item._replace(dtype=dtype_named(str(item.dtype), item.name), shape=tuple(item.shape))
            for item in items
        )
    )


def job_message(job: WriteJob) -> bytes:
    """Returns a job as bytes for the writer process."""
    fields = {field.name: getattr(job, field.name) for field in dataclass_fields(job)}
    fields["plan"] = plan_json(job.plan)
    named: Tree = {name: TensorRef(name) for name in job.layouts}
    fields["layouts"] = dump(Manifest(job.layouts, {}, named, ())).decode()
    return json.dumps(fields, separators=(",", ":")).encode()


def read_job(message: bytes) -> WriteJob:
    """Returns the job in the bytes of `job_message`."""
    fields = json.loads(message)
    plan = read_plan(fields["plan"])
    layouts = load(fields["layouts"].encode(), "the layouts of a job", stored=False).tensors
    return WriteJob(**{**fields, "plan": plan, "layouts": layouts})


def summary_message(summary: ShardSummary) -> bytes:
    """Returns the summary of a written file as an answer in bytes, with the requests for it."""
    return json.dumps({"written": asdict(summary), "requests": take_requests()}).encode()


def error_message(error: Exception) -> bytes:
    """Returns the reason for a missing file as an answer in bytes."""
    said = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": said, "requests": take_requests()}).encode()


def read_answer(message: bytes, where: str) -> ShardSummary:
    """Returns the summary in an answer. Raises StoreError if the answer is an error.

    The requests of the process that wrote the file count as those of this one.
    """
    answer = json.loads(message)
    for operation, counts in answer.get("requests", {}).items():
        count_requests(operation, Requests(*counts))
    if "error" in answer:
        message_of_writer = answer["error"]
        raise StoreError(
            message_of_writer if where in message_of_writer else f"{where}: {message_of_writer}"
        )
    return ShardSummary(**answer["written"])
