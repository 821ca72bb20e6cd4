"""Copies that a save puts off, and holds until a test lets them go."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

SECONDS = 60


@contextmanager
def late_copies(main: BaseException | None = None) -> Iterator[threading.Event]:
    """Inside, everything that can be put off is, and waits for the event.

    What the main thread then copies, to help, raises `main`.
    """
    staging: Any = import_module("ckpt.background.staging")
    go, copy, small = threading.Event(), staging.Staging._copy, staging.SMALL_BYTES

    def late(*arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(SECONDS)
        elif main is not None:
            raise main
        copy(*arguments)

    staging.Staging._copy, staging.SMALL_BYTES = late, 0
    try:
        yield go
    finally:
        go.set()
        staging.Staging._copy, staging.SMALL_BYTES = copy, small
