"""Elements of two tensors, compared as bits and then as numbers. Arrays over raw memory, no torch.

Rules:

1. Elements with equal bits are equal, and most blocks end there. Only the others become numbers.
2. Integers of one dtype are subtracted exactly, however large. All else is subtracted as float64
   or complex128, which hold every number of the smaller types.
3. The 8-bit floats are looked up in a table that torch makes, the only need for torch here. Dtypes
   without numbers (packed 4-bit floats) are compared as bits, whatever the tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ckpt.plan.read_plan import requests_for
from ckpt.transfer.read import Array, RangeReader, bytes_of
from formats.catalog import TensorRecord, Tree, TypedValue
from formats.dtypes import DType
from sharding.errors import ArgumentError
from sharding.layout import Piece, span_boxes

_MEMORY = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
_NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "C64": np.complex64,
    "C128": np.complex128,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.uint8,
}
"""The dtypes that numpy has too."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Close is `|a - b| <= atol + rtol * |b|`. Both 0: equal to the bit."""

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        if not (self.rtol >= 0 and self.atol >= 0):
            raise ArgumentError(f"a tolerance is not negative: rtol={self.rtol}, atol={self.atol}")

    @property
    def is_exact(self) -> bool:
        """True when only equal bits will do."""
        return self.rtol == 0 and self.atol == 0


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a comparison of elements found."""

    unequal: int = 0
    """Elements whose bits, or numbers where the dtypes differ, are not equal."""
    differing: int = 0
    """Of those, how many are not within the tolerance."""
    first: int = 0
    """The first of these, in row-major order."""
    first_a: str = ""
    first_b: str = ""
    max_abs: float = 0.0
    """The largest |a - b|; infinite where there is no number."""
    max_rel: float = 0.0
    """The largest |a - b| / max(|a|, |b|)."""

    def then(self, later: Numbers, offset: int) -> Numbers:
        """This and what was found in the elements from `offset` on."""
        first = self if self.differing else replace(later, first=later.first + offset)
        return Numbers(
            self.unequal + later.unequal,
            self.differing + later.differing,
            first.first,
            first.first_a,
            first.first_b,
            max(self.max_abs, later.max_abs),
            max(self.max_rel, later.max_rel),
        )


def read_elements(engine: RangeReader, record: TensorRecord, lo: int, hi: int) -> Array:
    """Elements `[lo, hi)` of a tensor in row-major order, read and verified as `engine` does.

    Raises CorruptError for a wrong checksum, HoleError where some are stored nowhere.
    """
    array: Array = np.empty(hi - lo, dtype=_MEMORY[record.dtype.itemsize])
    pieces, at = [], 0
    for box in span_boxes(record.shape, lo, hi):
        pieces.append(Piece.packed(box, at))
        at += box.numel
    engine.run(requests_for(record, pieces), [bytes_of(array)])
    return array


def compare(a: Array, a_dtype: DType, b: Array, b_dtype: DType, tolerance: Tolerance) -> Numbers:
    """What is different between elements of two tensors, equally many, given as raw memory."""
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
    found = Numbers(len(unequal), max_abs=float(absolute.max()), max_rel=float(relative.max()))
    if not differs.any():
        return found
    at = int(np.argmax(differs))
    first_a, first_b = _shown(x, a, a_dtype, at), _shown(y, b, b_dtype, at)
    if first_a == first_b:
        first_a = f"{first_a} (bits {_hex(a, at)})"
        first_b = f"{first_b} (bits {_hex(b, at)})"
    return replace(
        found,
        differing=int(differs.sum()),
        first=int(unequal[at]),
        first_a=first_a,
        first_b=first_b,
    )


def same_value(a: Tree, b: Tree, tolerance: Tolerance) -> bool:
    """Whether two plain values are of one type and equal, or close where they are floats.

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
    """The indices of the elements with other bits; of other numbers, where the dtypes differ."""
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
    """The numbers that these elements are; None for a dtype without."""
    if dtype.name in _NUMPY:
        return np.asarray(raw.view(_NUMPY[dtype.name]))
    if dtype.name == "BF16":
        return np.asarray((raw.astype(np.uint32) << np.uint32(16)).view(np.float32))
    if dtype.name == "C32":
        return np.asarray(raw.view(np.float16).astype(np.float32).view(np.complex64))
    table = _float8_table(dtype)
    return None if table is None else np.asarray(table[raw])


def _float8_table(dtype: DType) -> Array | None:
    """The numbers of the 256 elements of an 8-bit float; None where torch has no such numbers."""
    if not dtype.name.startswith("F8"):
        return None
    import torch

    from ckpt.state.memory import torch_dtype  # torch, for types that numpy lacks alone

    every = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch_dtype(dtype.torch_name))
    numbers: Array = every.to(torch.float32).numpy()
    return numbers


def _absolute(x: Array, y: Array) -> Array:
    """|x - y| as float64: 0 for two NaNs, infinite where only one is a number."""
    if x.dtype == y.dtype and x.dtype.kind in "iu":
        # Modulo 2**64 the difference of the larger and the smaller is exact.
        larger, smaller = np.maximum(x, y), np.minimum(x, y)
        exact = larger.astype(np.uint64) - smaller.astype(np.uint64)
        return np.asarray(exact.astype(np.float64))
    wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    difference: Array = np.abs(x.astype(wide) - y.astype(wide))
    difference[np.isnan(difference)] = np.inf
    difference[np.isnan(x) & np.isnan(y)] = 0.0
    return np.asarray(difference)


def _close(absolute: Array, y: Array, tolerance: Tolerance) -> Array:
    limit = tolerance.atol + tolerance.rtol * _magnitude(y)
    return np.asarray((absolute <= limit) & np.isfinite(absolute) | (absolute == 0))


def _relative(absolute: Array, x: Array, y: Array) -> Array:
    """|x - y| / max(|x|, |y|); 0 where the difference is, infinite where it is."""
    relative = absolute / np.fmax(_magnitude(x), _magnitude(y))
    relative[np.isinf(absolute)] = np.inf
    relative[absolute == 0] = 0.0
    return np.asarray(relative)


def _magnitude(x: Array) -> Array:
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    return np.asarray(np.abs(x.astype(wide)))


def _shown(numbers: Array | None, raw: Array, dtype: DType, at: int) -> str:
    """One element for people, with as many digits as tell it from its neighbours."""
    if numbers is None:
        return f"bits {_hex(raw, at)}"
    value = numbers[at]
    if numbers.dtype.kind in "iu":
        return str(bool(value)) if dtype.name == "BOOL" else str(int(value))
    return f"{value:.17g}" if dtype.component_bytes == 8 else f"{value:.9g}"


def _hex(raw: Array, at: int) -> str:
    return raw[at : at + 1].tobytes()[::-1].hex()
