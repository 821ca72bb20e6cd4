"""Ctrl-C at a chosen place of the product.

Python lets a signal's exception through where a function begins and where one of C has returned.
Places are those in functions of ours, counted from the first that has a given name.
"""

import sys
from dis import opmap
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import ckpt

PRODUCT = ("ckpt", "formats", "sharding")
ROOT = Path(ckpt.__file__).parents[1]
RESUME = opmap.get("RESUME")
"""Where a function begins or goes on; not there in Python 3.10."""


class Interrupt:
    """Inside, raises KeyboardInterrupt in this thread at place number `at`; with 0 it counts."""

    def __init__(self, at: int, first: str) -> None:
        self.at, self.seen, self.where = at, 0, ""
        self._first = first
        self._has_begun = False
        # Python 3.11 has no reference to the function while it allocates the frame's object. There
        # the collector may run: an interrupt of a finalizer would free the function before its use.
        self._function = self._passed

    def __enter__(self) -> "Interrupt":
        sys.setprofile(self._function)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _passed(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not is_ours(code):
            return
        self._has_begun |= code.co_name == self._first
        is_place = event == "c_return" or (event == "call" and begins(frame))
        if is_place and self._has_begun and not self.where:
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{code.co_filename}:{frame.f_lineno}, {event} {argument}"
                raise KeyboardInterrupt


def begins(frame: FrameType) -> bool:
    """Whether a function begins or goes on, and no exception is thrown into it."""
    if RESUME is None:
        return frame.f_lasti == -1
    return frame.f_code.co_code[frame.f_lasti] == RESUME


@cache
def is_ours(code: CodeType) -> bool:
    """Whether this is a function of the product."""
    file = Path(code.co_filename)
    is_product = ROOT in file.parents and file.relative_to(ROOT).parts[0] in PRODUCT
    return is_product and code.co_name != "<module>"
