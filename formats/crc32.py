"""Combines the CRC-32s of parts into the CRC-32 of the whole, without its bytes.

A CRC-32 is the remainder of a polynomial over GF(2), divided by the polynomial of RFC 1952, section
8. Each following byte multiplies it by x^8. Numbers are reflected, as in zlib: the highest bit is
the coefficient of x^0.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X8 = 1 << 23


def combine(first: int, second: int, second_bytes: int) -> int:
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
