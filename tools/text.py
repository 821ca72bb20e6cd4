"""Text of the commands: tables, JSON, sizes, ages and policies, printed and parsed.

`ckpt.display` has names and sizes.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ckpt.display import printable
from ckpt.run.retention import Keep
from ckpt.run.schedule import UNITS, seconds_in
from formats.limits import parse_size
from sharding.errors import without_secrets

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


LONGEST = 1e9
"""Some thirty years: no clock of an operating system takes a much longer time."""


def size_of(text: str) -> int:
    """Returns the bytes of a size such as `5GB`, for argparse."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def duration(text: str) -> float:
    """Returns the seconds of an age such as `90m`, for argparse; at most `LONGEST`.

    >>> duration("90m"), duration("1.5d"), duration("0")
    (5400.0, 129600.0, 0.0)
    """
    seconds = seconds_in(text)
    if seconds is None or seconds > LONGEST:
        raise ArgumentTypeError(f"{text!r} is no time; say 30s, 90m, 2h or 3d")
    return seconds


def age(seconds: float) -> str:
    """Returns an age in its largest unit.

    >>> age(7260), age(3), age(-1)
    ('2 h', '3 s', '0 s')
    """
    for letter, unit in reversed(UNITS.items()):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {letter}"
    return "0 s"


def keep_of(text: str) -> Keep:
    """Parses a policy such as `last=3,every=1000,best=2,metric=loss,mode=max,one_per=1h`.

    >>> keep_of("last=3,younger_than=2h") == Keep(last=3, younger_than=7200.0)
    True
    """
    found: dict[str, Any] = {}
    for rule in text.split(","):
        name, _, value = rule.strip().partition("=")
        if name not in _RULES or not value or name in found:
            known = ", ".join(f"{name}=" for name in _RULES)
            raise ArgumentTypeError(f"{rule.strip()!r} is no rule; there are {known}, each once")
        found[name] = _RULES[name](value)
    try:
        keep = Keep(**found)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    if keep.keeps_all:
        raise ArgumentTypeError(f"{text!r} keeps every checkpoint; say last=, every= or best=")
    return keep


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


_RULES: dict[str, Callable[[str], Any]] = {
    "last": _number,
    "every": _number,
    "best": _number,
    "metric": str,
    "mode": str,
    "younger_than": duration,
    "one_per": duration,
    "last_finite": _number,
}
