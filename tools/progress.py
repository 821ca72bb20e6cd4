"""A progress bar on a terminal, or a note that a command waits, and nothing in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, Timer

from ckpt.errors import CkptError
from formats.errors import FormatError
from tools.text import place, tell

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
    several = (one if isinstance(one, list) else [one] for one in arguments)
    urls = (one for each in several for one in each if isinstance(one, str) and "://" in one)
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


def file_bytes(url: str | os.PathLike[str], told: Mapping[str, object] | None = None) -> int | None:
    """Returns the size of a checkpoint's files; None if it cannot be read, an error for the caller.

    `told` are the driver's options.
    """
    from ckpt.opening.sources import open_source

    try:
        with open_source(url, told) as source:
            return sum(file.size for file in source.catalog.files)
    except (CkptError, FormatError, OSError):
        return None


def tensor_bytes(
    url: str | os.PathLike[str], told: Mapping[str, object] | None = None
) -> int | None:
    """Returns the size of a checkpoint's tensors; None if it cannot be read."""
    from ckpt.opening.sources import open_source

    try:
        with open_source(url, told) as source:
            return source.catalog.nbytes
    except (CkptError, FormatError, OSError):
        return None
