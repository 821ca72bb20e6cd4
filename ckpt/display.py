"""Formats names, sizes and tables for terminals and notebooks.

Names come from files of unknown origin. A terminal therefore gets no control characters of a name,
and a notebook gets no HTML of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_UNITS = ("kB", "MB", "GB", "TB", "PB")
_OF_NUMBERS = str.maketrans({"k": "K", "G": "B"})
"""The letters of units of bytes that differ for numbers: thousands, and billions."""
SHOWN_ROWS = 50
"""An HTML table has at most so many rows."""


def printable(text: str) -> str:
    r"""Returns the text with each character escaped that is not printable.

    >>> printable("w\x1b[2J")
    'w\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def size(nbytes: int) -> str:
    """Returns a number of bytes in decimal units, with three digits.

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
    """Returns a number with a noun.

    >>> count(1, "tensor"), count(2000, "tensor")
    ('1 tensor', '2,000 tensors')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def amount(number: int) -> str:
    """Returns a large number with three digits.

    >>> amount(999), amount(46_300_000), amount(7_240_000_000)
    ('999', '46.3 M', '7.24 B')
    """
    return str(number) if number < 1000 else size(number).translate(_OF_NUMBERS)[:-1]


def html_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], total: int) -> str:
    """Returns an HTML table for Jupyter. All texts are escaped.

    `total` is the number of all rows. A line below the table has the number of missing rows.

    >>> html_table("c", ["name"], [["<b>"]], 2)
    '<b>c</b><table><tr><th>name</th></tr><tr><td>&lt;b&gt;</td></tr></table>and 1 more'
    """
    lines = [_html_row("th", head), *(_html_row("td", row) for row in rows)]
    more = f"and {total - len(rows):,} more" if total > len(rows) else ""
    return f"<b>{_html(title)}</b><table>{''.join(lines)}</table>{more}"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_html(cell)}</{tag}>" for cell in cells) + "</tr>"


def _html(text: str) -> str:
    return escape(printable(text))
