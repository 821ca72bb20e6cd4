"""CRC-32s of parts, put together: the checksum of a whole by those of its parts, without its bytes.

A CRC-32 is the remainder of a polynomial over GF(2), divided by the one of RFC 1952, section 8.
Bytes that follow multiply it by x^8, each. Numbers are reflected, as zlib has them: the highest bit
is the coefficient of x^0.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X8 = 1 << 23


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two runs of bytes end to end, by that of each and the length of the second.

    >>> from zlib import crc32
    >>> combine(crc32(b"check"), crc32(b"point"), 5) == crc32(b"checkpoint")
    True
    """
    return _times(_shift(second_bytes), first) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials, by the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=1024)
def _shift(nbytes: int) -> int:
    """x^8, as often as there are bytes: most runs have one of few lengths."""
    found, at = _ONE, 0
    while nbytes:
        if nbytes & 1:
            found = _times(_square(at), found)
        nbytes, at = nbytes >> 1, at + 1
    return found


@lru_cache(maxsize=64)
def _square(at: int) -> int:
    """x^8, squared `at` times."""
    return _X8 if at == 0 else _times(_square(at - 1), _square(at - 1))
