"""Tables and JSON in the command's output (`ckpt.display` has names and sizes)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ckpt.display import printable
from sharding.url_secrets import without_secrets

MAX_SHOWN = 200
"""The most characters of a value that are shown."""


def tell(line: str) -> None:
    """Prints a line on stderr; does nothing if stderr is closed or full."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr)


def place(url: str) -> str:
    """Returns the printable text of a path or URL, without the secrets of a URL."""
    return printable(without_secrets(url))


def shortened(text: str) -> str:
    """Returns the printable text, cut to `MAX_SHOWN` characters."""
    text = printable(text[: MAX_SHOWN + 1])
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Returns rows as lines with aligned columns, those in `right` aligned to the right.

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
    r"""Returns the value as JSON that every reader accepts: infinite numbers and NaN are texts.

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
