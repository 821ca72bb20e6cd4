"""Saves in the background that are held right after the call, until a test lets them go."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

SECONDS = 60


@contextmanager
def late_copies(main: BaseException | None = None) -> Iterator[threading.Event]:
    """Inside, whatever a save does not do in the call waits for the event, or for a step's hook.

    With staging="overlapped" that is all copies that can be put off. What the main thread then
    copies, to help, raises `main`.
    """
    staging: Any = import_module("ckpt.saving.staging")
    wait = staging.Staging.wait
    copies: Any = import_module("ckpt.saving.staging").Copies
    save: Any = import_module("ckpt.saving.background")._Save
    go, write, copy, small = threading.Event(), save._write, copies._copy, staging.SMALL_BYTES

    def late(*arguments: Any) -> Any:
        assert go.wait(SECONDS)
        return write(*arguments)

    def copying(*arguments: Any) -> None:
        if main is not None and threading.current_thread() is threading.main_thread():
            raise main
        copy(*arguments)

    def waiting(*arguments: Any) -> None:
        go.set()
        wait(*arguments)

    staging.Staging.wait = waiting
    save._write, copies._copy, staging.SMALL_BYTES = late, copying, 0
    try:
        yield go
    finally:
        go.set()
        save._write, copies._copy, staging.SMALL_BYTES = write, copy, small
        staging.Staging.wait = wait
