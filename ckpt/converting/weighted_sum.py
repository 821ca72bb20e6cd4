"""Sums of checkpoints as one source: means, averages over steps, task vectors.

Rules:

1. A sum is a catalog like any other. Its tensors lie in files that exist nowhere: `_Sums` computes
   their bytes when they are read, in the parts in which they are asked for. A conversion thereby
   writes a sum in any format, in bounded memory and by any number of ranks.
2. An element is the sum of rounded products in the order of the sources, in float32, or in float64
   if one dtype is float64 or the caller asks for it. Parts and ranks do not change its bits.
3. Tensors without fractions, such as counters and quantised weights, have no sum: they have to be
   equal in all sources. Names and shapes have to be equal too. All this is compared for the tensors
   of a conversion before the first byte is written (`check_has_sum`).
4. Plain values, names and files beside the weights are those of the first source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, cast

import torch

from ckpt.checking.elements import Tolerance, compare, read_elements, unlike_ranges
from ckpt.errors import ArgumentError
from ckpt.opening.sources import Source, open_source
from ckpt.state.memory import torch_dtype
from ckpt.stores.store import Options, Store
from ckpt.transfer.read import RangeReader, bytes_of
from ckpt.transfer.record_sums import RecordSums
from formats.catalog import (
    Catalog,
    Extent,
    PieceTable,
    StoredPiece,
    TensorRecord,
    TensorRef,
    iter_leaves,
)
from formats.dtypes import DType
from sharding.errors import format_names, without_secrets
from sharding.layout import Box, Piece

__all__ = ["WeightedSum"]

BLOCK_BYTES = 4 << 20
"""Bytes of a tensor that are summed at once."""
SUM = "sum-"
"""The begin of the name of a file that exists nowhere, before the number of a tensor."""


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of checkpoints of any formats and world sizes, each times a weight, as a source.

    `ckpt.convert(WeightedSum(...), dst)` writes it. Weights need no sum of one: `(a, b, c)` with
    `(1, 0.5, -0.5)` adds half of the difference of `b` and `c` to `a`.
    """

    urls: tuple[str, ...]
    weights: tuple[float, ...]
    in_float64: bool = False
    """Whether all sums are in float64."""

    def __post_init__(self) -> None:
        if len(self.urls) != len(self.weights) or not self.urls:
            raise ArgumentError(
                f"{len(self.urls)} checkpoints have {len(self.weights)} weights; give each one"
            )
        if not all(isfinite(weight) for weight in self.weights):
            raise ArgumentError(f"weights are {self.weights}; give finite numbers")

    @contextmanager
    def opened(self, options: Options = None) -> Iterator[Source]:
        """Opens the sources and yields their sum. Raises what `ckpt.load` raises for a source."""
        with ExitStack() as stack:
            sources = [stack.enter_context(open_source(url, options)) for url in self.urls]
            terms = [_Term.of(*pair) for pair in zip(sources, self.weights, strict=True)]
            first = sources[0]
            tensors, files = dict[str, TensorRecord](), dict[str, str]()
            for number, (name, record) in enumerate(first.catalog.tensors.items()):
                file = f"{SUM}{number}"
                files[file] = name
                box, extent = Box.whole(record.shape), Extent(file, 0, record.nbytes)
                table = PieceTable([StoredPiece(Piece.packed(box), extent)])
                tensors[name] = record._replace(pieces=table, layout=None, strides=None)
            store = cast(Store, _Sums(first.store, files, terms, self.in_float64))
            catalog = replace(first.catalog, tensors=tensors, bases=(), parts=())
            yield Source(" + ".join(self.urls), store, catalog)


def check_has_sum(source: Source, catalog: Catalog) -> None:
    """Raises ArgumentError unless the tensors in the tree of a catalog have a sum (rule 3).

    `source` is an opened sum, and the catalog a part of it, perhaps under other names.
    """
    sums = cast(_Sums, source.store)
    leaves = (leaf for _, leaf in iter_leaves(catalog.tree))
    records = (catalog.tensors[leaf.name] for leaf in leaves if isinstance(leaf, TensorRef))
    files = {stored.extent.file for record in records for stored in record.pieces}
    wrong = [text for file in files if (text := sums.problem(file))]
    if wrong:
        raise ArgumentError(
            f"{without_secrets(source.url)} has no sum: {format_names(sorted(wrong), 5)}; give "
            "checkpoints of one model, with select= or exclude= for the parts that have a sum, "
            "and convert quantised weights to floats before"
        )


@dataclass(frozen=True, slots=True)
class _Term:
    """One source of a sum."""

    url: str
    weight: float
    engine: RangeReader
    records: Mapping[str, TensorRecord]
    """Under all names, including tied ones."""

    @classmethod
    def of(cls, source: Source, weight: float) -> _Term:
        records = dict(source.catalog.tensors)
        records |= {alias: records[name] for alias, name in source.catalog.aliases.items()}
        return cls(source.url, weight, RangeReader(source.store, RecordSums()), records)


class _Sums:
    """The folder of the first source, and beside its files those whose bytes are sums."""

    in_place = server_path = None
    """Nothing of it lies in a place."""

    def __init__(
        self, store: Store, files: Mapping[str, str], terms: Sequence[_Term], in_float64: bool
    ) -> None:
        self._store, self._files, self._terms = store, files, terms
        self._in_float64 = in_float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def size(self, name: str) -> int:
        """As `formats.storage.Reader.size`."""
        if name in self._files:
            return self._terms[0].records[self._files[name]].nbytes
        return self._store.size(name)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """As `formats.storage.Reader.read`."""
        target = bytearray(length)
        self.read_into(name, offset, memoryview(target))
        return bytes(target)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """As `formats.storage.Reader.read_into`."""
        if name not in self._files:
            self._store.read_into(name, offset, *targets)
            return
        tensor = self._files[name]
        itemsize = self._terms[0].records[tensor].dtype.itemsize
        for target in targets:
            for start in range(0, len(target), BLOCK_BYTES):
                part = target[start : start + BLOCK_BYTES]
                lo, skipped = divmod(offset + start, itemsize)
                hi = -(-(offset + start + len(part)) // itemsize)
                part[:] = self._sum(tensor, lo, hi)[skipped : skipped + len(part)]
            offset += len(target)

    def problem(self, file: str) -> str:
        """Returns why the tensor of a file has no sum; an empty text if it has one."""
        name = self._files[file]
        first, *others = self._terms
        here = first.records[name]
        for term in others:
            there = term.records.get(name)
            if there is None:
                return f"{name} is not in {without_secrets(term.url)}"
            if here.shape != there.shape:
                return f"{name} has the shapes {here.shape} and {there.shape}"
            if here.dtype != there.dtype and not (_has_sum(here.dtype) and _has_sum(there.dtype)):
                return f"{name} is {here.dtype} and {there.dtype}"
            if not _has_sum(here.dtype) and not _are_equal(first, term, name):
                return f"{name} is {here.dtype}, and its elements differ"
        return ""

    def _sum(self, tensor: str, lo: int, hi: int) -> memoryview:
        """Returns the bytes of elements `[lo, hi)`, in row-major order."""
        records = [term.records[tensor] for term in self._terms]
        if not _has_sum(records[0].dtype):  # equal in all sources
            return bytes_of(read_elements(self._terms[0].engine, records[0], lo, hi).view("u1"))
        wide = _sum_dtype([record.dtype for record in records], self._in_float64)
        total: torch.Tensor | None = None
        for term, record in zip(self._terms, records, strict=True):
            raw = torch.from_numpy(read_elements(term.engine, record, lo, hi).view("u1"))
            stored = raw.view(torch_dtype(record.dtype.torch_name))
            # Two roundings an element: a fused product would depend on the element's place.
            product = stored.to(wide) * term.weight
            total = product if total is None else total.add_(product)
        assert total is not None
        found = total.to(torch_dtype(records[0].dtype.torch_name))
        return memoryview(found.view(torch.uint8).numpy().data)


def _has_sum(dtype: DType) -> bool:
    return dtype.torch_name.startswith(("float", "bfloat", "complex")) and not _is_packed(dtype)


def _is_packed(dtype: DType) -> bool:
    """Whether an element has several numbers, or only an exponent."""
    return "_x2" in dtype.torch_name or "e8m0" in dtype.torch_name


def _sum_dtype(dtypes: Sequence[DType], in_float64: bool) -> torch.dtype:
    """Returns the dtype of a sum of tensors of these dtypes."""
    names = {dtype.torch_name for dtype in dtypes}
    wide = in_float64 or bool(names & {"float64", "complex128"})
    if any(name.startswith("complex") for name in names):
        return torch.complex128 if wide else torch.complex64
    return torch.float64 if wide else torch.float32


def _are_equal(a: _Term, b: _Term, name: str) -> bool:
    here, there = a.records[name], b.records[name]
    for lo, hi in unlike_ranges(here, there):
        for at in range(lo, hi, BLOCK_BYTES):
            end = min(hi, at + BLOCK_BYTES)
            left = read_elements(a.engine, here, at, end)
            right = read_elements(b.engine, there, at, end)
            if compare(left, here.dtype, right, there.dtype, Tolerance()).unequal:
                return False
    return True
