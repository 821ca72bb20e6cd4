"""Asking the kernel for huge pages where large host memory is filled at once.

A buffer that is given back and taken again is new memory each time, and every page of it costs a
fault when it is first written: of 50 MB in pages of 4 KiB, as much time as the copy itself. Linux
fills memory in pages of 2 MiB where a program asks for it (`madvise`); where it cannot, or does not
want to, nothing changes.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import torch

LARGE_BYTES = 8 << 20
"""Below this, memory often comes from what the process has already."""


def ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """The tensor's memory may be in huge pages, if it is large, on the host, and not in use yet."""
    if tensor.nbytes < LARGE_BYTES or tensor.device.type != "cpu":
        return
    madvise, advice = _madvise()
    if madvise is not None:
        page = mmap.PAGESIZE
        begin = -(-tensor.data_ptr() // page) * page
        end = (tensor.data_ptr() + tensor.nbytes) // page * page
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


@cache
def _madvise() -> tuple[ctypes._NamedFuncPointer | None, int]:
    """The C library's function, where it is there, and what to ask for."""
    advice: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return None, 0
    function = getattr(ctypes.CDLL(None), "madvise", None)
    return function, advice
