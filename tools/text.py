"""Text of the commands: tables, JSON, sizes, ages and policies, printed and parsed.

`ckpt.display` has names and sizes. Long work shows a progress bar on a terminal, or a note that a
command waits, and nothing in a pipe.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, Timer
from typing import Literal, TypeVar

from ckpt.display import count, printable, size
from ckpt.errors import CkptError
from ckpt.run.policy import UNITS, parse_keep, parse_time
from formats.catalog import Catalog
from formats.errors import FormatError
from formats.limits import parse_size
from sharding.errors import without_secrets

T = TypeVar("T")

Url = str | os.PathLike[str]
Options = Mapping[str, object] | None
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


def shorten(text: str) -> str:
    """Returns the printable text, cut to `MAX_SHOWN` characters."""
    text = printable(text[: MAX_SHOWN + 1])
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


Meaning = Literal["sound", "damaged", "added", "removed", "changed"]
_COLOURS: Mapping[Meaning, int] = {
    "sound": 32,
    "damaged": 31,
    "added": 32,
    "removed": 31,
    "changed": 33,
}
_COLOUR = re.compile("\x1b\\[[0-9]+m")


def colour(text: str, meaning: Meaning) -> str:
    """Returns the text in the colour of its meaning, if stdout is a terminal that shows colours.

    NO_COLOR in the environment, with any value, prevents colours (no-color.org).
    """
    is_shown = sys.stdout is not None and sys.stdout.isatty()
    if not is_shown or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[meaning]}m{text}\x1b[0m"


def _width(cell: str) -> int:
    return len(_COLOUR.sub("", cell))


def date(text: str) -> str:
    """Returns a time of a manifest, in ISO 8601 or in seconds since 1970, as a date; or the text.

    >>> date("2026-11-26T07:33:49Z"), date("1795678428.059178"), date("today")
    ('2026-11-26 07:33:49 UTC', '2026-11-26 07:33:48 UTC', 'today')
    """
    if _ISO.fullmatch(text):
        return f"{text[:10]} {text[11:19]} UTC"
    if _SECONDS.fullmatch(text):
        with suppress(ValueError, OverflowError, OSError):
            return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(text)))
    return text


_SECONDS = re.compile(r"\d{9,11}\.\d{6}")
_ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def numbers(metrics: Mapping[str, float]) -> str:
    """Returns metrics as text for people.

    >>> numbers({"loss": 3.612345678, "tokens": 120000})
    'loss=3.61235, tokens=120,000'
    """
    return ", ".join(f"{printable(name)}={_number_text(value)}" for name, value in metrics.items())


def _number_text(number: float) -> str:
    is_whole = number == number // 1 and abs(number) < 1e15
    return f"{number:,.0f}" if is_whole else f"{number:.6g}"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Returns rows as lines with aligned columns, those in `right` aligned to the right.

    >>> columns([("w", "8 B", "x"), ("bias", "16 B", "")], right=[1])
    ['w      8 B  x', 'bias  16 B']
    """
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            " " * (width - _width(cell)) + cell
            if index in right
            else cell + " " * (width - _width(cell))
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def json_text(value: object) -> str:
    r"""Returns the value as JSON that every reader accepts: infinite numbers and NaN are texts.

    >>> json_text({"max_abs": float("inf")})
    '{\n  "max_abs": "inf"\n}'
    """
    return json.dumps(plain_json(value), indent=2, allow_nan=False)


def plain_json(value: object) -> object:
    """Returns the value with infinite numbers and NaN as texts: JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return value


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Returns the function for argparse, which shows the text of an ArgumentTypeError alone."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error

    return parsed


size_of = _argument(parse_size)
"""Returns the bytes of a size such as `5GB`."""
duration = _argument(parse_time)
"""Returns the seconds of an age such as `90m`."""
keep_of = _argument(parse_keep)
"""Returns a policy such as `last=3,every=1000,best=2`."""


def versions_kept(url: str, options: Options) -> str:
    """Returns a line on the old versions that a bucket keeps of a folder; empty without any."""
    from ckpt.removing.gc import old_versions

    number, nbytes = old_versions(url, options)
    if not number:
        return ""
    return (
        f"the bucket keeps {count(number, 'old version')} of files here, {size(nbytes)}, until a "
        "lifecycle rule of the bucket removes them (NoncurrentVersionExpiration)"
    )


def age(seconds: float) -> str:
    """Returns an age in its largest unit.

    >>> age(7260), age(3), age(-1)
    ('2 h', '3 s', '0 s')
    """
    for letter, unit in reversed(UNITS.items()):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {letter}"
    return "0 s"


Progress = Callable[[int], None]
"""A function that is called with numbers of bytes as they are done, from any thread."""
NOTE_SECONDS = 3.0
"""A command without a bar says after so long that it waits."""
_note: Timer | None = None


@contextmanager
def progress(
    label: str, total: Callable[[], int | None], quiet: bool = False
) -> Iterator[Progress | None]:
    """Yields the function for long work: a bar's if stderr is a terminal, else or if quiet None.

    `total` returns the bytes of all work, or None; it is called only for a bar.
    """
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    lock, nbytes_of_all = Lock(), total()
    has_answered()
    options = {"unit": "B", "unit_scale": True, "leave": False, "file": sys.stderr}
    with tqdm(desc=label, total=nbytes_of_all, **options) as bar:

        def advance(nbytes: int) -> None:
            with lock:
                bar.update(nbytes)

        yield advance


@contextmanager
def note_of_a_wait(arguments: Iterable[object]) -> Iterator[None]:
    """Says once that a command waits, if stderr is a terminal and an argument is a server's URL.

    The block waits for `NOTE_SECONDS` before that, and `has_answered` prevents the note.
    """
    global _note
    several = (argument if isinstance(argument, list) else [argument] for argument in arguments)
    urls = (text for each in several for text in each if isinstance(text, str) and "://" in text)
    url = next((url for url in urls if not url.startswith("file://")), None)
    if url is not None and sys.stderr is not None and sys.stderr.isatty():
        _note = Timer(NOTE_SECONDS, tell, [f"ckpt: waiting for {place(url)}; Ctrl-C ends this"])
        _note.daemon = True
        _note.start()
    try:
        yield
    finally:
        has_answered()


def has_answered() -> None:
    """Prevents the note of a wait."""
    if _note is not None:
        _note.cancel()


def file_bytes(url: Url, options: Options = None) -> int | None:
    """Returns the size of a checkpoint's files; None if it cannot be read, an error for the caller.

    `options` are the driver's.
    """
    return _measure(url, options, lambda catalog: sum(file.size for file in catalog.files))


def tensor_bytes(url: Url, options: Options = None) -> int | None:
    """Returns the size of a checkpoint's tensors; None if it cannot be read."""
    return _measure(url, options, lambda catalog: catalog.nbytes)


def _measure(url: Url, options: Options, measure: Callable[[Catalog], int]) -> int | None:
    from ckpt.opening.sources import open_source

    try:
        with open_source(url, options) as source:
            return measure(source.catalog)
    except (CkptError, FormatError, OSError):
        return None
