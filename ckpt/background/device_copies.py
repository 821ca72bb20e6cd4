"""Copies from CUDA memory into the arena, on streams of their own.

The arena is registered with CUDA, page-locked, so that a device copies into it by itself while its
other streams compute. Where registering fails, the copies are as correct and slower.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import torch

from ckpt.background.slots import Slot


class DeviceCopies:
    """Copies that were started and not awaited yet."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._kept: list[torch.Tensor] = []
        """What the streams still read from: its memory must not be given to others."""

    def start(self, slot: Slot) -> None:
        """Copy a tensor to its slot, after what its device has been given to do so far."""
        item, local = slot.item, slot.local
        stream = self._streams.get(local.device)
        if stream is None:
            stream = self._streams[local.device] = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                local.device
            )
            page_lock(self._data)
        stream.wait_stream(torch.cuda.current_stream(local.device))
        with torch.cuda.stream(stream):
            source = slot.flat.resolve_conj().resolve_neg()
            target = torch.frombuffer(
                self._data, dtype=torch.uint8, count=source.nbytes, offset=item.offset
            )
            target.view(source.dtype).copy_(source, non_blocking=True)
        self._kept += [local, source]

    def finish(self) -> None:
        """What was started is in the arena when this returns."""
        for stream in self._streams.values():
            stream.synchronize()
        self._kept.clear()


_locked: tuple[int, int] | None = None
"""Address and size of the arena as it is registered."""


def page_lock(data: memoryview) -> None:
    """Register the arena's memory with CUDA, if it is not."""
    global _locked
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    if _locked is not None and _locked[0] == address and _locked[1] >= len(data):
        return
    release()
    with suppress(RuntimeError, AttributeError):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, len(data), 0)) == 0:
            _locked = (address, len(data))


def release() -> None:
    """Undo it: before the arena's memory is mapped anew."""
    global _locked
    if _locked is not None:
        with suppress(RuntimeError, AttributeError):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(_locked[0])
    _locked = None
