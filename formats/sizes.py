"""Parses sizes as text: `5GB`, `40kB` and `1M` (decimal), `2GiB` (binary), `4096`."""

from __future__ import annotations

import re
from decimal import Decimal

from sharding.errors import ArgumentError

_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?) ?(?P<unit>[kKMGT](?:i?B)?|B)?")
_DECIMAL = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"k": 2**10, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as `5GB`, `40kB` or `1M` (decimal), `2GiB` or `4096`.

    Raises:
        ArgumentError: the text is not a size, or is zero.

    >>> parse_size("5GB"), parse_size("1.5KiB"), parse_size("40kB"), parse_size("1M")
    (5000000000, 1536, 40000, 1000000)
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(Decimal(match["number"]) * _bytes_of(match["unit"] or "B")) if match else 0
    if size < 1:
        raise ArgumentError(
            f"{text!r} is no size; write a number of bytes, 500MB or 5GB (decimal), or 2GiB "
            "(binary)"
        )
    return size


def _bytes_of(unit: str) -> int:
    return 1 if unit == "B" else (_BINARY if "i" in unit else _DECIMAL)[unit[0]]
