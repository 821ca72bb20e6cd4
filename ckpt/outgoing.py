"""A catalog as streams: what a format's writer is handed when a checkpoint is converted.

Rules:

1. Every tensor, or a run of its elements, is read in row-major blocks of at most `BLOCK_BYTES`, the
   next one while the last is being written, so no more than two blocks are ever in memory.
2. Before the first block is asked for, every element has been found in files that are as long as
   they should be, by their headers alone: a checkpoint that is not whole is an error before
   anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np

from ckpt.errors import Difference, MismatchError
from ckpt.saved import Missing, Saved, join
from ckpt.selection import Selection
from ckpt.transfer import Array, Transfer, requests_for
from formats.catalog import Catalog, TensorRecord, TensorRef, Tree
from formats.dtypes import DType, dtype_of_torch
from formats.outgoing import Outgoing, OutgoingTensor
from formats.storage import Reader
from sharding.layout import HoleError, Piece, span_boxes

BLOCK_BYTES = 16 << 20
"""The largest block of a tensor that is read at once."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

Elements = Callable[[int, int], Iterator[memoryview]]
"""Starts a stream of elements `[lo, hi)`, packed; each block is valid until the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams(Outgoing):
    """A whole checkpoint to write, of which parts of tensors can be streamed too."""

    elements: Mapping[str, Elements]
    """By name, for the tensor's row-major elements."""

    def part(self, name: str, shape: tuple[int, ...], lo: int, hi: int) -> OutgoingTensor:
        """Row-major elements `[lo, hi)` of a tensor, to write in this shape under its name."""
        stream = self.elements[name]
        return OutgoingTensor(name, shape, self.tensors[name].dtype, lambda: stream(lo, hi))


@contextmanager
def outgoing(
    reader: Reader,
    catalog: Catalog,
    select: str | None,
    selection: Selection,
    dtype: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Streams]:
    """The part of a checkpoint that `select` and `selection` name, ready to be written.

    `select` is a key path: what lies below it, under names without it. `selection` then goes by
    those names. `dtype`, a torch name, casts the floating-point tensors. The streams are read one
    at a time, within the block.

    Raises:
        MismatchError: nothing lies at `select`.
        CorruptError, FormatError: a file that is needed is missing, shorter or longer than it was,
            or not what the checkpoint says of it.
        HoleError: some elements of a tensor are stored nowhere.
    """
    tree = _below(catalog, select or "", reader.url)
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
                tensors[path] = _whole(path, record.shape, written, stream)
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

    with ThreadPoolExecutor(1, "ckpt-ahead") as ahead:
        reading = _Reading(reader, ahead, progress)
        whole = walk(tree, "")
        yield Streams(tensors, whole, aliases, {}, elements=elements)


def _whole(name: str, shape: tuple[int, ...], dtype: DType, stream: Elements) -> OutgoingTensor:
    return OutgoingTensor(name, shape, dtype, lambda: stream(0, prod(shape)))


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


class _Reading:
    """The streams of one conversion, which share their memory: one is read at a time."""

    def __init__(
        self,
        reader: Reader,
        ahead: ThreadPoolExecutor,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._transfer = Transfer(reader)
        self._ahead = ahead
        self._progress = progress
        # Two blocks: one that is being read, one that is being written. Fresh memory for every
        # tensor would cost as much as reading it.
        self._memory: list[Array] = []

    def of(self, record: TensorRecord, target: DType | None) -> tuple[DType, Elements]:
        """A tensor's elements, cast where `target` says so, and the type they have then."""
        if target is None or target == record.dtype or record.dtype.name not in _FLOATS:
            return record.dtype, lambda lo, hi: self._blocks(record, lo, hi)
        wanted = target
        return wanted, lambda lo, hi: self._cast(record, wanted, lo, hi)

    def _blocks(self, record: TensorRecord, begin: int, end: int) -> Iterator[memoryview]:
        """The packed bytes of row-major elements, verified; each block is valid until the next."""
        itemsize = record.dtype.itemsize
        step = BLOCK_BYTES // itemsize
        spans = [(lo, min(lo + step, end)) for lo in range(begin, end, step)]

        def fill(index: int) -> memoryview:
            lo, hi = spans[index]
            memory = self._buffer(index % 2, (hi - lo) * itemsize)
            array: Array = memory.view(_UNSIGNED[itemsize])
            pieces, at = [], 0
            for box in span_boxes(record.shape, lo, hi):
                pieces.append(Piece.packed(box, at))
                at += box.numel
            self._transfer.run(list(requests_for(record, pieces, array)), self._progress)
            return memoryview(array.view(np.uint8).data)

        if len(spans) <= 1:
            for index in range(len(spans)):
                yield fill(index)
            return
        coming = self._ahead.submit(fill, 0)
        for index in range(len(spans)):
            block = coming.result()
            if index + 1 < len(spans):
                coming = self._ahead.submit(fill, index + 1)
            yield block

    def _cast(
        self, record: TensorRecord, target: DType, begin: int, end: int
    ) -> Iterator[memoryview]:
        import torch

        from ckpt.memory import array_over, torch_dtype

        here, there = torch_dtype(record.dtype.torch_name), torch_dtype(target.torch_name)
        for block in self._blocks(record, begin, end):
            cast_block = torch.frombuffer(block, dtype=here).to(there)
            yield memoryview(array_over(cast_block).view(np.uint8).data)

    def _buffer(self, which: int, nbytes: int) -> Array:
        """The first bytes of one of the two blocks."""
        while len(self._memory) <= which:
            self._memory.append(np.empty(BLOCK_BYTES, dtype=np.uint8))
        return self._memory[which][:nbytes]
