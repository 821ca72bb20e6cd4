"""CRC-32s of bytes, and of a whole by the CRC-32s of its parts, without its bytes.

A CRC-32 is the remainder of a polynomial over GF(2), divided by the polynomial of RFC 1952, section
8. Each following byte multiplies it by x^8. Numbers are reflected, as in zlib: the highest bit is
the coefficient of x^0.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

try:
    from zlib_ng.zlib_ng import crc32, crc32_combine  # twelve times as fast as zlib's
except ImportError:  # a platform without a wheel
    from zlib import crc32

    crc32_combine = None  # type: ignore[assignment]

__all__ = ["SummedRanges", "combine", "combine_in_python", "crc32"]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X8 = 1 << 23


def combine_in_python(first: int, second: int, second_bytes: int) -> int:
    """Returns the CRC-32 of two adjacent runs of bytes, by both CRC-32s and the second's length.

    >>> from zlib import crc32
    >>> combine(crc32(b"check"), crc32(b"point"), 5) == crc32(b"checkpoint")
    True
    """
    return _times(_shift(second_bytes), first) ^ second


def _times(a: int, b: int) -> int:
    """Returns the product of two polynomials modulo the polynomial of RFC 1952."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=1024)
def _shift(nbytes: int) -> int:
    """Returns x^8 to the power of `nbytes`. The cache helps: most runs have one of few lengths."""
    found, at = _ONE, 0
    while nbytes:
        if nbytes & 1:
            found = _times(_square(at), found)
        nbytes, at = nbytes >> 1, at + 1
    return found


@lru_cache(maxsize=64)
def _square(at: int) -> int:
    """Returns x^8, squared `at` times."""
    return _X8 if at == 0 else _times(_square(at - 1), _square(at - 1))


combine = combine_in_python if crc32_combine is None else crc32_combine


class SummedRanges:
    """The CRC-32s of ranges of a record, in any order; adjacent ranges become one."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []
        """Ranges with their CRC-32, in order, with gaps between."""

    def add(self, lo: int, hi: int, value: int) -> None:
        """Adds the CRC-32 of `[lo, hi)`. No part of the range was added before."""
        at, sums = bisect_left(self._ranges, (lo, 0, 0)), self._ranges
        if at < len(sums) and sums[at][0] == hi:
            _, end, after = sums.pop(at)
            value, hi = combine(value, after, end - hi), end
        if at and sums[at - 1][1] == lo:
            at -= 1
            begin, _, before = sums.pop(at)
            value, lo = combine(before, value, hi - lo), begin
        sums.insert(at, (lo, hi, value))

    def whole(self, nbytes: int) -> int | None:
        """Returns the CRC-32 of `[0, nbytes)`; None unless all of it was added."""
        if not nbytes:
            return 0
        lo, hi, value = self._ranges[0] if self._ranges else (0, 0, 0)
        return value if (lo, hi) == (0, nbytes) else None
