"""Turns a catalog into the tensors that a conversion writes.

Rules:

1. Files that a format has planned are copied by `ckpt.transfer.copy_files`. A shard file of ckpt's
   own is written from streams: a tensor, or a run of its elements, is read in row-major parts of at
   most `BLOCK_BYTES`. One block holds as many announced parts as fit. The next block is read while
   the last one is written, so at most two blocks are in memory. A stream that the writer has not
   announced is read alone.
2. Before the first block, the headers prove that all elements are in files of the right length. An
   incomplete checkpoint is thus an error before the conversion writes a byte.
3. All checksums are compared. The bytes of a record that no stream reads are read before the last
   block is given out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from ckpt.mapping.casts import NO_CASTS, Casts
from ckpt.match.selection import Selection, map_selected
from ckpt.plan.copy_plan import CopySource
from ckpt.plan.read_plan import ReadRequest, requests_for
from ckpt.structure import names_of
from ckpt.transfer.copy_files import FileCopier
from ckpt.transfer.read import Array, RangeReader, bytes_of
from ckpt.transfer.record_sums import RecordSums
from formats.catalog import Catalog, TensorRecord, TensorRef, Tree
from formats.dtypes import DType
from formats.native.manifest import WRITER_KEYS
from formats.outgoing import Outgoing, OutgoingTensor
from formats.storage import Reader
from formats.threads import Pool
from sharding.layout import HoleError, Piece, span_boxes
from sharding.url_secrets import without_secrets

BLOCK_BYTES = 8 << 20
"""Bytes of one read: a part of a tensor, or many small tensors."""
MEMORY_BYTES = 2 * BLOCK_BYTES
"""The blocks in memory (rule 1)."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

_WRITTEN = {"ckpt": WRITER_KEYS, "safetensors": ("format",), "huggingface": ("format",), "gguf": ()}
"""Formats with metadata, and the keys that their writers add."""

_ALIGN_BYTES = 16
"""Parts of a block begin at multiples of the largest element."""


class Elements(Protocol):
    """A tensor's row-major elements, read as a stream of packed bytes."""

    def announce(self, lo: int, hi: int) -> None:
        """Announces that elements `[lo, hi)` are read after the elements announced before."""
        ...

    def blocks(self, lo: int, hi: int) -> Iterator[memoryview]:
        """Yields the bytes of elements `[lo, hi)` in order. A block is valid until the next one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams(Outgoing):
    """A whole checkpoint to write. Parts of its tensors can be streamed too."""

    elements: Mapping[str, Elements]
    """The row-major elements of each tensor, by name."""
    memory_bytes: int
    """The most memory of all blocks together."""
    copier: FileCopier
    """Writes planned files, which have all the tensors, and compares all checksums."""

    def part(self, name: str, shape: tuple[int, ...], lo: int, hi: int) -> OutgoingTensor:
        """Returns row-major elements `[lo, hi)` of a tensor, to write in this shape."""
        return _outgoing(name, shape, self.tensors[name].dtype, self.elements[name], lo, hi)


@contextmanager
def outgoing(
    url: str,
    reader: Reader,
    catalog: Catalog,
    casts: Casts = NO_CASTS,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Streams]:
    """Returns streams of the tensors of a catalog, under the names in its tree.

    The caller reads one stream at a time, inside the `with` statement.

    Raises:
        ArgumentError: a pattern of `casts` matches no name.
        CorruptError, FormatError: a needed file is missing, has another length, or contradicts the
            description of the checkpoint.
        HoleError: elements of a tensor are not stored.
    """
    casts.check_all_match(names_of(catalog.tree), without_secrets(url))
    tensors: dict[str, OutgoingTensor] = {}
    elements: dict[str, Elements] = {}
    sources: dict[str, CopySource] = {}
    aliases: dict[str, str] = {}
    first_names: dict[str, str] = {}

    def streamed(leaf: Tree, path: str) -> Tree:
        if not isinstance(leaf, TensorRef):
            return leaf
        first = first_names.setdefault(leaf.name, path)
        if first != path:
            aliases[path] = first
            return TensorRef(first)
        record = catalog.tensors[leaf.name]
        check_located(record)
        source = sources[path] = CopySource(record, casts.written(path, record))
        stream = elements[path] = reading.of(source)
        tensors[path] = _outgoing(path, record.shape, source.dtype, stream, 0, prod(record.shape))
        return TensorRef(first)

    with Pool(1, "ckpt-ahead") as ahead:
        reading = _Reading(reader, ahead, progress)
        tree: Tree = map_selected(catalog.tree, Selection.of(None, None), streamed)
        copier = FileCopier(reader, sources.__getitem__, "all", progress)
        yield Streams(
            tensors,
            tree,
            aliases,
            _kept_metadata(catalog),
            elements=elements,
            memory_bytes=max(MEMORY_BYTES, copier.sizes.memory_bytes),
            copier=copier,
        )


def _kept_metadata(catalog: Catalog) -> dict[str, str]:
    """Returns the metadata without the keys that the writer of the format added."""
    written = _WRITTEN.get(catalog.format)
    if written is None:
        return {}
    return {key: text for key, text in catalog.metadata.items() if key not in written}


def _outgoing(
    name: str, shape: tuple[int, ...], dtype: DType, stream: Elements, lo: int, hi: int
) -> OutgoingTensor:
    return OutgoingTensor(
        name,
        shape,
        dtype,
        lambda: stream.blocks(lo, hi),
        announce=lambda: stream.announce(lo, hi),
    )


def check_located(record: TensorRecord) -> None:
    """Raises as `outgoing` does unless all elements are stored. Reads no data (rule 2)."""
    found = sum(stored.piece.box.numel for stored in record.pieces)
    if found != prod(record.shape):
        raise HoleError(
            f"{record.name}: {found} of its {prod(record.shape)} elements are in the checkpoint"
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Row-major elements `[lo, hi)` of a tensor, at most one block of them."""

    record: TensorRecord
    lo: int
    hi: int

    @property
    def nbytes(self) -> int:
        return (self.hi - self.lo) * self.record.dtype.itemsize


_Block = deque[tuple[_Part, memoryview]]
"""Parts that were read together, in order."""


class _Reading:
    """The streams of one conversion. They share memory, so one is read at a time."""

    def __init__(
        self,
        reader: Reader,
        ahead: Pool,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._ranges = RangeReader(reader, RecordSums("all"))
        self._ahead = ahead
        self._progress = progress
        self._untaken_bytes = 0
        """Bytes of the streams that nobody has read yet."""
        self._announced: deque[_Part] = deque()
        """Parts without a started read."""
        self._coming: Future[_Block] | None = None
        self._here: _Block = deque()
        # Two blocks: one is read while the other is written. New memory for each tensor would cost
        # as much as reading the tensor.
        self._memory: list[Array] = []
        self._turn = 0

    def of(self, source: CopySource) -> Elements:
        """Returns the elements of a tensor."""
        record, dtype = source
        self._untaken_bytes += record.nbytes
        return _Plain(self, record) if dtype == record.dtype else _Cast(self, record, dtype)

    def announce(self, record: TensorRecord, lo: int, hi: int) -> None:
        """Announces that these elements are taken after the elements announced before."""
        step = BLOCK_BYTES // record.dtype.itemsize
        for start in range(lo, hi, step):
            self._announced.append(_Part(record, start, min(start + step, hi)))

    def take(self, record: TensorRecord, lo: int, hi: int) -> Iterator[memoryview]:
        """Yields verified packed bytes of row-major elements; a block is valid until the next."""
        while lo < hi:
            part = self._next()
            if part is None or part[0].record is not record or part[0].lo != lo:
                self._forget()
                self.announce(record, lo, hi)
                continue
            self._untaken_bytes -= part[0].nbytes
            if self._untaken_bytes == 0:
                self._ranges.finish()
            yield part[1]
            lo = part[0].hi

    def _next(self) -> tuple[_Part, memoryview] | None:
        """Returns the first announced part that is left, with its bytes; None without one."""
        if not self._here:
            coming = self._coming or self._started()
            if coming is None:
                return None
            self._here = coming.result()
            self._coming = self._started()
        return self._here.popleft()

    def _forget(self) -> None:
        """Forgets the announced parts, and waits for the present read."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.exception()
        self._here.clear()
        self._announced.clear()

    def _started(self) -> Future[_Block] | None:
        """Starts the read of as many parts as fit into a block; None if no part is left."""
        if not self._announced:
            return None
        parts: list[_Part] = []
        total = 0
        while self._announced:
            nbytes = -(-self._announced[0].nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
            if parts and total + nbytes > BLOCK_BYTES:
                break
            parts.append(self._announced.popleft())
            total += nbytes
        self._turn = 1 - self._turn
        return self._ahead.submit(self._read, parts, self._buffer(self._turn))

    def _read(self, parts: Sequence[_Part], memory: Array) -> _Block:
        """Reads the parts side by side into one block of memory."""
        block: _Block = deque()
        requests: list[ReadRequest] = []
        start = 0
        for part in parts:
            record = part.record
            array: Array = memory[start : start + part.nbytes].view(
                _UNSIGNED[record.dtype.itemsize]
            )
            pieces, at = [], 0
            for box in span_boxes(record.shape, part.lo, part.hi):
                pieces.append(Piece.packed(box, at))
                at += box.numel
            requests += requests_for(record, pieces, len(block))
            block.append((part, bytes_of(array)))
            start += -(-part.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self._ranges.run(requests, [data for _, data in block], self._progress)
        return block

    def _buffer(self, which: int) -> Array:
        """Returns one of the two blocks."""
        while len(self._memory) <= which:
            self._memory.append(np.empty(BLOCK_BYTES, dtype=np.uint8))
        return self._memory[which]


@dataclass(frozen=True, slots=True)
class _Plain:
    """The elements of a tensor in their stored dtype."""

    _reading: _Reading
    _record: TensorRecord

    def announce(self, lo: int, hi: int) -> None:
        self._reading.announce(self._record, lo, hi)

    def blocks(self, lo: int, hi: int) -> Iterator[memoryview]:
        return self._reading.take(self._record, lo, hi)


@dataclass(frozen=True, slots=True)
class _Cast:
    """The elements of a tensor, cast block by block."""

    _reading: _Reading
    _record: TensorRecord
    _target: DType

    def announce(self, lo: int, hi: int) -> None:
        self._reading.announce(self._record, lo, hi)

    def blocks(self, lo: int, hi: int) -> Iterator[memoryview]:
        import torch

        from ckpt.state.memory import memory_of, torch_dtype  # torch, which only casts need

        here = torch_dtype(self._record.dtype.torch_name)
        there = torch_dtype(self._target.torch_name)
        for block in self._reading.take(self._record, lo, hi):
            cast_block = torch.frombuffer(block, dtype=here).to(there)
            yield memory_of(cast_block)
