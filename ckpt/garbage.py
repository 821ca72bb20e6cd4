"""Python's search for cyclic garbage, put off while many objects are made that all are needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Inside, nothing looks for cyclic garbage; for work of seconds that leaves none.

    A plan is some objects for every tensor, and Python looks through all the objects there are
    each time a quarter has come to them: with torch imported that is most of the time of a plan.
    """
    back = gc.enable if gc.isenabled() else gc.disable
    try:
        gc.disable()  # in here, for an interrupt that comes just then
        yield
    finally:
        back()
