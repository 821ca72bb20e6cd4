"""A progress bar for people at a terminal, nothing in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

from ckpt.errors import CkptError
from formats.errors import FormatError

Progress = Callable[[int], None]
"""Called with numbers of bytes as they are done, from any thread."""


@contextmanager
def progress(label: str, total: Callable[[], int | None]) -> Iterator[Progress | None]:
    """What to hand to long work: a bar on stderr where that is a terminal, else None.

    `total` gives the bytes to be done, or None; it is called only where there is a bar.
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
    """The size of a checkpoint's files; None where it cannot be read, which others will report.

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
    """The size of a checkpoint's tensors; None where it cannot be read."""
    from ckpt.sources import open_source

    try:
        with open_source(url, told) as source:
            return source.catalog.nbytes
    except (CkptError, FormatError, OSError):
        return None
