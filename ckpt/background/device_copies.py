"""Copies from CUDA memory into the arena, on separate streams.

An arena is registered with CUDA, page-locked, so that a device copies into it while the device's
other streams compute. If CUDA refuses the registration, the copies are correct, and slower.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import torch

from ckpt.background.slots import Slot


class DeviceCopies:
    """Copies that were started and not yet awaited."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._kept: list[torch.Tensor] = []
        """The tensors that the streams still read from: their memory must not be reused."""

    def start(self, slot: Slot) -> None:
        """Starts the copy of a tensor to its slot, after the work queued on its device so far."""
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
        """Returns once all started copies are in the arena."""
        for stream in self._streams.values():
            stream.synchronize()
        self._kept.clear()


_locked: dict[int, int] = {}
"""The sizes of registered arenas, by their addresses."""


def page_lock(data: memoryview) -> None:
    """Registers an arena's memory with CUDA, unless it is registered."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    if _locked.get(address, 0) >= len(data):
        return
    release(address)
    with suppress(RuntimeError, AttributeError):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, len(data), 0)) == 0:
            _locked[address] = len(data)


def release(address: int) -> None:
    """Undoes the registration of an arena, before its memory is mapped anew."""
    if _locked.pop(address, 0):
        with suppress(RuntimeError, AttributeError):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(address)
