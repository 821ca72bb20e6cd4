"""How names, sizes, tables and JSON look in the command's output.

Names come out of files that anybody may have written, so nothing of them reaches a terminal that
could be taken for one of its own commands.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

_UNITS = ("kB", "MB", "GB", "TB", "PB")
MAX_SHOWN = 200
"""The longest text of a value or of the writer that is shown whole."""


def printable(text: str) -> str:
    r"""The text with everything that is no printable character escaped.

    >>> printable("w\x1b[2J")
    'w\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def tell(line: str) -> None:
    """Print a line on stderr; nothing happens where that is closed, full or nobody reads it."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr)


def shortened(text: str) -> str:
    """The printable text, cut where it is longer than `MAX_SHOWN` characters."""
    text = printable(text[: MAX_SHOWN + 1])
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def size(nbytes: int) -> str:
    """Bytes in decimal units, three digits.

    >>> size(999), size(16_384), size(5_000_000_000)
    ('999 B', '16.4 kB', '5.00 GB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    value, unit = nbytes / 1000, 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "tensor"), count(2000, "tensor")
    ('1 tensor', '2,000 tensors')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with aligned columns; those with an index in `right` are aligned to the right.

    >>> columns([("w", "8 B", "x"), ("bias", "16 B", "")], right=[1])
    ['w      8 B  x', 'bias  16 B']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def json_text(value: object) -> str:
    r"""The value as JSON that every reader accepts: infinite numbers and NaN are texts.

    >>> json_text({"max_abs": float("inf")})
    '{\n  "max_abs": "inf"\n}'
    """
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
