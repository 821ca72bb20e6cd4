"""A catalog as streams: what a format's writer is handed when a checkpoint is converted.

Rules:

1. Every tensor, or a run of its elements, is read in row-major parts of at most `BLOCK_BYTES`. As
   many parts as fit are read together into one block, the next block while the last is being
   written, so no more than two blocks are ever in memory. What is read together is what the writer
   has announced; a stream that comes unannounced is read by itself.
2. Before the first block is asked for, every element has been found in files that are as long as
   they should be, by their headers alone: a checkpoint that is not whole is an error before
   anything is written.
3. Every checksum is compared. Of a record that has one for all its bytes, what no stream has read
   is read before the last block of all is given.
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

from ckpt.errors import Difference, MismatchError
from ckpt.match.selection import Selection
from ckpt.plan.read_plan import ReadRequest, requests_for
from ckpt.state.saved import Missing, Saved, join
from ckpt.structure import names_of
from ckpt.transfer.read import Array, RangeReader, bytes_of
from ckpt.transfer.record_sums import RecordSums
from formats.catalog import Catalog, TensorRecord, TensorRef, Tree
from formats.dtypes import DType, dtype_of_torch
from formats.errors import UnsupportedError
from formats.native.manifest import WRITER_KEYS
from formats.outgoing import Outgoing, OutgoingTensor
from formats.storage import Reader
from formats.threads import Pool
from sharding.layout import HoleError, Piece, span_boxes
from sharding.url_secrets import without_secrets

BLOCK_BYTES = 8 << 20
"""What is read at once: a part of a tensor, or many small tensors."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

_WRITTEN = {"ckpt": WRITER_KEYS, "safetensors": ("format",), "huggingface": ("format",)}
"""Formats with a place for metadata, and what their writers put there."""

_ALIGN_BYTES = 16
"""Parts of a block begin at multiples of the largest element."""


class Elements(Protocol):
    """A tensor's row-major elements, read as a stream of packed bytes."""

    def announce(self, lo: int, hi: int) -> None:
        """Elements `[lo, hi)` will be asked for after what was announced before."""
        ...

    def blocks(self, lo: int, hi: int) -> Iterator[memoryview]:
        """The bytes of elements `[lo, hi)` in order; each block is valid until the next."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams(Outgoing):
    """A whole checkpoint to write, of which parts of tensors can be streamed too."""

    elements: Mapping[str, Elements]
    """By name, for the tensor's row-major elements."""

    def part(self, name: str, shape: tuple[int, ...], lo: int, hi: int) -> OutgoingTensor:
        """Row-major elements `[lo, hi)` of a tensor, to write in this shape under its name."""
        return _outgoing(name, shape, self.tensors[name].dtype, self.elements[name], lo, hi)


@contextmanager
def outgoing(
    url: str,
    reader: Reader,
    catalog: Catalog,
    select: str | None,
    selection: Selection,
    dtype: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Streams]:
    """The part of the checkpoint at `url` that `select` and `selection` name, ready to be written.

    `select` is a key path: what lies below it, under names without it. `selection` then goes by
    those names. `dtype`, a torch name, casts the floating-point tensors. The streams are read one
    at a time, within the block.

    Raises:
        MismatchError: nothing lies at `select`.
        ArgumentError: a pattern matches no name, or nothing is left over.
        UnsupportedError: a top entry has an empty name, which would be nowhere in other names.
        CorruptError, FormatError: a file that is needed is missing, shorter or longer than it was,
            or not what the checkpoint says of it.
        HoleError: some elements of a tensor are stored nowhere.
    """
    tree = _below(catalog, select or "", url)
    if isinstance(tree, dict) and "" in tree and selected(tree[""], "", selection):
        raise UnsupportedError(
            f"{url}: the name of a top entry is empty; give it one where it is saved, or leave it "
            "out (exclude=, --exclude '')"
        )
    selection.check_chooses(set(names_of(tree)), without_secrets(url))
    target = dtype_of_torch(dtype, "dtype=") if dtype is not None else None
    tensors: dict[str, OutgoingTensor] = {}
    elements: dict[str, Elements] = {}
    aliases: dict[str, str] = {}
    first_names: dict[str, str] = {}

    def walk(node: Tree, path: str) -> Tree:
        if isinstance(node, TensorRef):
            first = first_names.setdefault(node.name, path)
            if first == path:
                record = catalog.tensors[node.name]
                check_located(record)
                written, stream = reading.of(record, target)
                whole = prod(record.shape)
                tensors[path] = _outgoing(path, record.shape, written, stream, 0, whole)
                elements[path] = stream
            else:
                aliases[path] = first
            return TensorRef(first)
        if isinstance(node, dict):
            return {
                key: walk(item, join(path, key))
                for key, item in node.items()
                if selected(item, join(path, key), selection)
            }
        if isinstance(node, list | tuple):
            items = [
                walk(item, join(path, i)) if selected(item, join(path, i), selection) else None
                for i, item in enumerate(node)
            ]
            return items if isinstance(node, list) else tuple(items)
        return node

    with Pool(1, "ckpt-ahead") as ahead:
        reading = _Reading(reader, ahead, progress)
        walked = walk(tree, "")
        yield Streams(tensors, walked, aliases, _kept_metadata(catalog), elements=elements)


def _kept_metadata(catalog: Catalog) -> dict[str, str]:
    """What somebody said of the checkpoint; not what its writer said of itself."""
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
    """Raise as `outgoing` does unless a tensor's elements are all there; reads no data (rule 2)."""
    found = sum(stored.piece.box.numel for stored in record.pieces)
    if found != prod(record.shape):
        raise HoleError(
            f"{record.name}: {found} of its {prod(record.shape)} elements are in the checkpoint"
        )


def selected(tree: Tree, path: str, selection: Selection) -> bool:
    """True when a leaf, or anything below a container, is selected."""
    if selection.is_all:
        return True
    if isinstance(tree, dict) and tree:
        return any(selected(item, join(path, key), selection) for key, item in tree.items())
    if isinstance(tree, list | tuple) and tree:
        return path in selection or any(
            selected(item, join(path, i), selection) for i, item in enumerate(tree)
        )
    return path in selection


def _below(catalog: Catalog, select: str, url: str) -> Tree:
    found = Saved(catalog).node(select)
    if isinstance(found, Missing):
        top = list(catalog.tree) if isinstance(catalog.tree, dict) else []
        raise MismatchError(
            url,
            [
                Difference(
                    select,
                    "missing",
                    "nothing in the checkpoint is called that; at the top are "
                    + ", ".join(str(key) for key in top[:20]),
                )
            ],
        )
    return {"tensor": found} if isinstance(found, TensorRef) else found


@dataclass(frozen=True, slots=True)
class _Part:
    """Row-major elements `[lo, hi)` of a tensor: no more than fit into one block."""

    record: TensorRecord
    lo: int
    hi: int

    @property
    def nbytes(self) -> int:
        return (self.hi - self.lo) * self.record.dtype.itemsize


_Block = deque[tuple[_Part, memoryview]]
"""Parts that were read together, in order."""


class _Reading:
    """The streams of one conversion, which share their memory: one is read at a time."""

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
        """Of the streams that were given out."""
        self._announced: deque[_Part] = deque()
        """What no read has been started for."""
        self._coming: Future[_Block] | None = None
        self._here: _Block = deque()
        # Two blocks: one that is being read, one that is being written. Fresh memory for every
        # tensor would cost as much as reading it.
        self._memory: list[Array] = []
        self._turn = 0

    def of(self, record: TensorRecord, target: DType | None) -> tuple[DType, Elements]:
        """A tensor's elements, cast where `target` says so, and the type they have then."""
        self._untaken_bytes += record.nbytes
        if target is None or target == record.dtype or record.dtype.name not in _FLOATS:
            return record.dtype, _Plain(self, record)
        return target, _Cast(self, record, target)

    def announce(self, record: TensorRecord, lo: int, hi: int) -> None:
        """These elements will be taken after what was announced before."""
        step = BLOCK_BYTES // record.dtype.itemsize
        for start in range(lo, hi, step):
            self._announced.append(_Part(record, start, min(start + step, hi)))

    def take(self, record: TensorRecord, lo: int, hi: int) -> Iterator[memoryview]:
        """The packed bytes of row-major elements, verified; each block is valid until the next."""
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
        """What was announced first of all that is left; None where nothing is."""
        if not self._here:
            coming = self._coming or self._started()
            if coming is None:
                return None
            self._here = coming.result()
            self._coming = self._started()
        return self._here.popleft()

    def _forget(self) -> None:
        """Nothing was announced; nothing is being read when this returns."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.exception()
        self._here.clear()
        self._announced.clear()

    def _started(self) -> Future[_Block] | None:
        """The read of as many parts as fit into a block; None where none is left."""
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
        """The parts side by side in one block of memory."""
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
        """One of the two blocks."""
        while len(self._memory) <= which:
            self._memory.append(np.empty(BLOCK_BYTES, dtype=np.uint8))
        return self._memory[which]


@dataclass(frozen=True, slots=True)
class _Plain:
    """A tensor's elements as they are stored."""

    _reading: _Reading
    _record: TensorRecord

    def announce(self, lo: int, hi: int) -> None:
        self._reading.announce(self._record, lo, hi)

    def blocks(self, lo: int, hi: int) -> Iterator[memoryview]:
        return self._reading.take(self._record, lo, hi)


@dataclass(frozen=True, slots=True)
class _Cast:
    """A tensor's elements, cast block by block."""

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
