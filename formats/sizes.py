"""Sizes as people write them: `5GB` (decimal), `2GiB` (binary), `4096`."""

from __future__ import annotations

import re
from decimal import Decimal

from sharding.errors import ArgumentError

_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?) ?(?P<unit>[KMGT]i?B|B)?")
_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def parse_size(text: str) -> int:
    """Bytes in a size such as `5GB` (decimal), `2GiB` (binary) or `4096`.

    Raises:
        ArgumentError: it is no such size, or zero.

    >>> parse_size("5GB"), parse_size("1.5KiB"), parse_size("700")
    (5000000000, 1536, 700)
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(Decimal(match["number"]) * _UNITS[match["unit"] or "B"]) if match else 0
    if size < 1:
        raise ArgumentError(
            f"{text!r} is no size of a file; write a number of bytes, 500MB or 5GB (decimal), or "
            f"2GiB (binary)"
        )
    return size
