"""Delays Python's search for cyclic garbage while a plan makes many objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Disables the garbage collector inside the block, for work of seconds without cyclic garbage.

    A plan has several objects for each tensor. Python searches all objects whenever their number
    has grown by a quarter: with torch imported, that is most of the time of a plan.
    """
    back = gc.enable if gc.isenabled() else gc.disable
    try:
        gc.disable()  # inside `try`: an interrupt may come just after
        yield
    finally:
        back()
