"""A progress bar on a terminal, and nothing in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

from ckpt.errors import CkptError
from formats.errors import FormatError

Progress = Callable[[int], None]
"""A function that is called with numbers of bytes as they are done, from any thread."""


@contextmanager
def progress(label: str, total: Callable[[], int | None]) -> Iterator[Progress | None]:
    """Yields the function for long work: a bar's if stderr is a terminal, else None.

    `total` returns the bytes of all work, or None; it is called only for a bar.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    lock = Lock()
    options = {"unit": "B", "unit_scale": True, "leave": False, "file": sys.stderr}
    with tqdm(desc=label, total=total(), **options) as bar:

        def advance(nbytes: int) -> None:
            with lock:
                bar.update(nbytes)

        yield advance


def file_bytes(url: str | os.PathLike[str], told: Mapping[str, object] | None = None) -> int | None:
    """Returns the size of a checkpoint's files; None if it cannot be read, an error for the caller.

    `told` are the driver's options.
    """
    from ckpt.sources import open_source

    try:
        with open_source(url, told) as source:
            return sum(file.size for file in source.catalog.files)
    except (CkptError, FormatError, OSError):
        return None


def tensor_bytes(
    url: str | os.PathLike[str], told: Mapping[str, object] | None = None
) -> int | None:
    """Returns the size of a checkpoint's tensors; None if it cannot be read."""
    from ckpt.sources import open_source

    try:
        with open_source(url, told) as source:
            return source.catalog.nbytes
    except (CkptError, FormatError, OSError):
        return None
