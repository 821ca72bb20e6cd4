"""Writes a shard file of known sizes: the header first, then the data.

`formats.native.late_header` writes files that are compressed or borrow chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import xxhash

from formats.dtypes import DType
from formats.errors import FormatError
from formats.file_plan import FilePlan, Late, length_of
from formats.native.borrowed import Lent
from formats.native.opened_shard import OWN_ENTRIES
from formats.native.shard import (
    ALIGN,
    RECORD,
    Progress,
    ShardSummary,
    chunk_bytes_of,
    metadata_of,
    stored_order,
    table_entry,
)
from formats.native.streaming import WRITE_BYTES, Gather, chunks_of, finish
from formats.outgoing import OutgoingTensor
from formats.safetensors_header import build
from formats.storage import FileWriter


def write_shard(
    file: FileWriter,
    tensors: Sequence[OutgoingTensor],
    compress: bool = False,
    progress: Progress | None = None,
    lent: Lent | None = None,
    deltas: bool = False,
    overlap: bool = True,
) -> ShardSummary:
    """Streams the tensors into a shard file. Returns its facts for the manifest.

    With `compress` or `lent` the file must be `rewritable`: its header is written last. A chunk
    that is equal in `lent` is borrowed. With `deltas` and `compress`, another chunk may be stored
    as a delta. With `overlap`, for a writer with a second core, one thread hashes while another
    writes.
    """
    ordered = stored_order(tensors)
    codec = "zstd" if compress else "raw"
    if lent is not None and (lent.codec, lent.chunk_bytes) != (codec, chunk_bytes_of(codec)):
        lent = None  # its chunks have another size or codec, so none can be borrowed
    if compress or lent is not None:
        from formats.native.late_header import write_as_it_comes  # numpy

        return write_as_it_comes(file, ordered, codec, lent, deltas and compress, progress)
    chunk_bytes = chunk_bytes_of(codec)
    sizes = [tensor.nbytes for tensor in ordered]
    header, _ = raw_header(ordered)
    records: list[bytes] = []
    with Gather(file, overlap) as out:
        out.add(header)
        for tensor, nbytes in zip(ordered, sizes, strict=True):
            for run, ends_block in chunks_of(tensor, nbytes, chunk_bytes, WRITE_BYTES):
                records += records_of(run, chunk_bytes)
                out.add(run)
                if ends_block and not tensor.stable:
                    out.flush()
            if progress is not None:
                progress(nbytes)
        return finish(out, header, b"", records)


def plan_shard(name: str, tensors: Sequence[OutgoingTensor]) -> FilePlan:
    """Plans an uncompressed shard file, whose chunk table comes last."""
    ordered = stored_order(tensors)
    header, table_bytes = raw_header(ordered)
    table = Late(table_bytes, lambda records: records)
    return FilePlan(name, [header, *ordered, table], chunk_bytes_of("raw"))


def planned_summary(plan: FilePlan, table: bytes) -> ShardSummary:
    """Returns the facts of a planned file with this chunk table."""
    header = plan.parts[0]
    assert isinstance(header, bytes)
    hasher = xxhash.xxh3_128(header)
    hasher.update(table)
    size = sum(map(length_of, plan.parts))
    return ShardSummary(size, len(header), len(table), hasher.hexdigest())


class Sized(Protocol):
    """A tensor whose bytes are known in number."""

    @property
    def name(self) -> str:
        """Its name in the file."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its entry."""
        ...

    @property
    def dtype(self) -> DType:
        """Its dtype."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes of its data."""
        ...


def raw_header(ordered: Sequence[Sized]) -> tuple[bytes, int]:
    """Returns the header of an uncompressed file, and the size of its chunk table.

    The tensors are in the file's order. Raises FormatError for a name of the file's own entries.
    """
    if taken := [tensor.name for tensor in ordered if tensor.name in OWN_ENTRIES]:
        raise FormatError(f"{taken[0]}: this name is taken; give the tensor another one")
    entries = [(t.name, t.dtype.carrier, t.dtype.carrier_shape(t.shape), t.nbytes) for t in ordered]
    chunk_bytes = chunk_bytes_of("raw")
    table = table_entry(sum(-(-t.nbytes // chunk_bytes) for t in ordered))
    header, _ = build([*entries, table], metadata_of("raw"), align=ALIGN)
    return header, table[-1]


def records_of(run: memoryview, chunk_bytes: int) -> list[bytes]:
    """Returns the table's records of a run of uncompressed chunks, which begins with a chunk."""
    digest, size = xxhash.xxh3_128_digest, len(run)
    if size <= chunk_bytes:
        return [RECORD.pack(digest(run), size)]
    pack = RECORD.pack
    whole = size - size % chunk_bytes
    found = [
        pack(digest(run[at : at + chunk_bytes]), chunk_bytes) for at in range(0, whole, chunk_bytes)
    ]
    if whole < size:
        found.append(pack(digest(run[whole:]), size - whole))
    return found
