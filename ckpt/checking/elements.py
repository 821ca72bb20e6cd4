"""Compares elements of two tensors as bits and then as numbers. Works on arrays over raw memory.

Rules:

1. Elements with equal bits are equal. Only elements with different bits are compared as numbers.
2. Integers of one dtype are subtracted exactly. All other elements are subtracted as float64 or
   complex128, which hold every number of the smaller types.
3. A table, made by torch, has the numbers of an 8-bit float; nothing else here needs torch. Dtypes
   without numbers (packed 4-bit floats) are always compared as bits.
4. Two chunks of one place whose checksums are equal have equal bytes (`unlike_ranges`): xxh3 with
   128 bits. Two whose checksums differ may still decode to equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import mul
from typing import TypeAlias

import numpy as np

from ckpt.plan.copy_plan import pieces_of_range
from ckpt.plan.read_plan import requests_for
from ckpt.transfer.read import Array, RangeReader, bytes_of
from formats.catalog import TensorRecord, Tree, TypedValue
from formats.dtypes import DType
from sharding.errors import ArgumentError
from sharding.layout import Piece, Shape, row_major

_MEMORY = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


_Place: TypeAlias = tuple[Shape, Shape, int]
"""A box of elements within one chunk, by its corners, and the place of its first in the chunk."""
ZERO, INFINITE = -1000, 1000
"""The decades of equal numbers with different bits, and of elements that are not numbers."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Elements are close if `|a - b| <= atol + rtol * |b|`. If both are 0, bits must be equal.

    Raises:
        ArgumentError: a tolerance is negative or NaN.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        if not (self.rtol >= 0 and self.atol >= 0):
            raise ArgumentError(
                f"a tolerance cannot be negative: rtol={self.rtol}, atol={self.atol}"
            )

    @property
    def is_exact(self) -> bool:
        """Whether only equal bits are close."""
        return self.rtol == 0 and self.atol == 0


@dataclass(frozen=True, slots=True)
class Numbers:
    """The result of a comparison of elements."""

    unequal: int = 0
    """The number of elements with different bits; with different numbers if the dtypes differ."""
    differing: int = 0
    """The number of elements that are not within the tolerance."""
    first: int = 0
    """The index of the first such element, in row-major order."""
    first_a: str = ""
    """The first such element of A as text."""
    first_b: str = ""
    max_abs: float = 0.0
    """The largest |a - b|; infinite for elements that are not numbers."""
    max_rel: float = 0.0
    """The largest |a - b| / max(|a|, |b|)."""
    decades: Mapping[int, int] = field(default_factory=dict)
    """The number of elements with different bits by the decade of |a - b| (`decade_name`)."""

    def then(self, later: Numbers, offset: int) -> Numbers:
        """Returns this result and the result of the elements from `offset` on as one."""
        first = self if self.differing else replace(later, first=later.first + offset)
        return Numbers(
            self.unequal + later.unequal,
            self.differing + later.differing,
            first.first,
            first.first_a,
            first.first_b,
            max(self.max_abs, later.max_abs),
            max(self.max_rel, later.max_rel),
            {
                decade: self.decades.get(decade, 0) + later.decades.get(decade, 0)
                for decade in sorted({*self.decades, *later.decades})
            },
        )


def decade_name(decade: int) -> str:
    """Returns the lower end of a decade as text.

    >>> decade_name(-3), decade_name(ZERO), decade_name(INFINITE)
    ('1e-3', '0', 'inf')
    """
    return {ZERO: "0", INFINITE: "inf"}.get(decade, f"1e{decade}")


def read_elements(engine: RangeReader, record: TensorRecord, lo: int, hi: int) -> Array:
    """Reads elements `[lo, hi)` of a tensor in row-major order, and verifies them as `engine` does.

    Raises:
        CorruptError: a checksum is wrong.
        HoleError: elements are not stored.
    """
    array: Array = np.empty(hi - lo, dtype=_MEMORY[record.dtype.itemsize])
    engine.run(requests_for(record, pieces_of_range(record.shape, lo, hi)), [bytes_of(array)])
    return array


def unlike_ranges(a: TensorRecord, b: TensorRecord) -> list[tuple[int, int]]:
    """Returns the ranges of elements, in row-major order, whose bits may differ. Reads no element.

    All others lie in chunks with equal checksums. The tensors have one shape. Where the two have no
    chunks of the same elements, such as those of other world sizes, the ranges have all elements.
    """
    a_sums, b_sums = _checksums(a), _checksums(b)
    if a.dtype != b.dtype or a_sums is None or b_sums is None:
        return [(0, math.prod(a.shape))]
    steps, ranges = row_major(a.shape), list[tuple[int, int]]()
    unlike = (box for box, checksum in a_sums.items() if b_sums.get(box) != checksum)
    ends = ((sum(map(mul, lo, steps)), sum(map(mul, hi, steps))) for lo, hi, _ in unlike)
    for lo, hi in sorted((lo, hi - sum(steps) + 1) for lo, hi in ends):
        first = ranges.pop() if ranges and lo <= ranges[-1][1] else (lo, hi)
        ranges.append((first[0], max(first[1], hi)))
    return ranges


def _checksums(record: TensorRecord) -> dict[_Place, tuple[bytes, bool]] | None:
    """Returns the checksum of the chunk of each box, and whether the chunk is compressed.

    Returns None if a piece has no chunks, or lies in them in another order than row by row.
    """
    checksums: dict[_Place, tuple[bytes, bool]] = {}
    for piece, extent in record.pieces:
        chunks = extent.chunks
        if chunks is None or not piece.is_packed:
            return None
        places = _places(piece, chunks.chunk_bytes / record.dtype.itemsize, len(chunks))
        for index, inside in enumerate(places):
            chunk = chunks[index]
            for place in inside:
                checksums[place] = chunk.digest, chunk.compressed
    return checksums


@lru_cache(maxsize=64)
def _places(piece: Piece, elements: float, count: int) -> list[list[_Place]]:
    """Returns the boxes of a piece in each of `count` chunks of so many elements."""
    return [
        [(part.box.lo, part.box.hi, part.at - first) for part in piece.within(first, end)]
        for first, end in (
            (int(index * elements), math.ceil((index + 1) * elements)) for index in range(count)
        )
    ]


def compare(a: Array, a_dtype: DType, b: Array, b_dtype: DType, tolerance: Tolerance) -> Numbers:
    """Compares the elements of two tensors, given as raw memory of equally many elements."""
    unequal = _unequal(a, a_dtype, b, b_dtype)
    if not len(unequal):
        return Numbers()
    a, b = a[unequal], b[unequal]
    x, y = _numbers(a, a_dtype), _numbers(b, b_dtype)
    differs = np.ones(len(unequal), dtype=np.bool_)
    if x is None or y is None:
        absolute = relative = np.full(len(unequal), np.inf)
    else:
        with np.errstate(all="ignore"):
            absolute = _absolute(x, y)
            relative = _relative(absolute, x, y)
            if not tolerance.is_exact:
                differs = ~_close(absolute, y, tolerance)
    largest, relatively = float(absolute.max()), float(relative.max())
    numbers = Numbers(len(unequal), max_abs=largest, max_rel=relatively, decades=_decades(absolute))
    if not differs.any():
        return numbers
    at = int(np.argmax(differs))
    first_a, first_b = _format_element(x, a, a_dtype, at), _format_element(y, b, b_dtype, at)
    if first_a == first_b:
        first_a = f"{first_a} (bits {_hex(a, at)})"
        first_b = f"{first_b} (bits {_hex(b, at)})"
    return replace(
        numbers,
        differing=int(differs.sum()),
        first=int(unequal[at]),
        first_a=first_a,
        first_b=first_b,
    )


def same_value(a: Tree, b: Tree, tolerance: Tolerance) -> bool:
    """Whether two plain values have one type and are equal; floats may be close.

    >>> same_value(1, True, Tolerance()), same_value(float("nan"), float("nan"), Tolerance())
    (False, True)
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        if math.isnan(a) or math.isnan(b) or tolerance.is_exact:
            return repr(a) == repr(b)
        return a == b or abs(a - b) <= tolerance.atol + tolerance.rtol * abs(b) < math.inf
    if isinstance(a, complex) and isinstance(b, complex):
        return same_value(a.real, b.real, tolerance) and same_value(a.imag, b.imag, tolerance)
    return str(a) == str(b) if isinstance(a, TypedValue) else bool(a == b)


def _unequal(a: Array, a_dtype: DType, b: Array, b_dtype: DType) -> Array:
    """Returns the indices of elements with different bits, or numbers if the dtypes differ."""
    if a_dtype != b_dtype:
        x, y = _numbers(a, a_dtype), _numbers(b, b_dtype)
        if x is None or y is None:
            return np.arange(len(a))
        return np.flatnonzero(~((x == y) | ((x != x) & (y != y))))
    if a_dtype.itemsize == 16:
        halves = a.view(np.uint64) != b.view(np.uint64)
        return np.flatnonzero(halves.reshape(-1, 2).any(axis=1))
    return np.flatnonzero(a != b)


def _numbers(raw: Array, dtype: DType) -> Array | None:
    """Returns the elements as numbers; None for a dtype without numbers."""
    of_numpy = getattr(np, "uint8" if dtype.name == "BOOL" else dtype.torch_name, None)
    if of_numpy is not None:
        return np.asarray(raw.view(of_numpy))
    if dtype.name == "BF16":
        return np.asarray((raw.astype(np.uint32) << np.uint32(16)).view(np.float32))
    if dtype.name == "C32":
        return np.asarray(raw.view(np.float16).astype(np.float32).view(np.complex64))
    if not dtype.name.startswith("F8"):
        return None
    import torch

    from ckpt.state.memory import torch_dtype  # imports torch, which only these dtypes need

    every = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch_dtype(dtype.torch_name))
    return np.asarray(every.to(torch.float32).numpy()[raw])


def _absolute(x: Array, y: Array) -> Array:
    """Returns |x - y| as float64: 0 for two NaNs, infinite if only one is a number."""
    if x.dtype == y.dtype and x.dtype.kind in "iu":
        # The larger minus the smaller is exact modulo 2**64.
        larger, smaller = np.maximum(x, y), np.minimum(x, y)
        exact = larger.astype(np.uint64) - smaller.astype(np.uint64)
        return np.asarray(exact.astype(np.float64))
    wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    difference: Array = np.abs(x.astype(wide) - y.astype(wide))
    difference[np.isnan(difference)] = np.inf
    difference[np.isnan(x) & np.isnan(y)] = 0.0
    return np.asarray(difference)


def _decades(absolute: Array) -> dict[int, int]:
    """Returns the number of differences in each power of ten."""
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log10(absolute))
    clipped = np.clip(exponents, ZERO, INFINITE).astype(np.int64)
    found, numbers = np.unique(clipped, return_counts=True)
    return {int(decade): int(number) for decade, number in zip(found, numbers, strict=True)}


def _close(absolute: Array, y: Array, tolerance: Tolerance) -> Array:
    limit = tolerance.atol + tolerance.rtol * _magnitude(y)
    return np.asarray((absolute <= limit) & np.isfinite(absolute) | (absolute == 0))


def _relative(absolute: Array, x: Array, y: Array) -> Array:
    """Returns |x - y| / max(|x|, |y|): 0 if the difference is 0, infinite if it is infinite."""
    relative = absolute / np.fmax(_magnitude(x), _magnitude(y))
    relative[np.isinf(absolute)] = np.inf
    relative[absolute == 0] = 0.0
    return np.asarray(relative)


def _magnitude(x: Array) -> Array:
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    return np.asarray(np.abs(x.astype(wide)))


def _format_element(numbers: Array | None, raw: Array, dtype: DType, at: int) -> str:
    """Returns one element as text, with enough digits to identify it."""
    if numbers is None:
        return f"bits {_hex(raw, at)}"
    value = numbers[at]
    if numbers.dtype.kind in "iu":
        return str(bool(value)) if dtype.name == "BOOL" else str(int(value))
    return f"{value:.17g}" if dtype.component_bytes == 8 else f"{value:.9g}"


def _hex(raw: Array, at: int) -> str:
    return raw[at : at + 1].tobytes()[::-1].hex()
