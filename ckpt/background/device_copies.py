"""Copies from CUDA memory into the arena, on separate streams.

The arena is registered with CUDA, page-locked, so that a device copies into it while the device's
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


_locked: tuple[int, int] | None = None
"""Address and size of the registered arena."""


def page_lock(data: memoryview) -> None:
    """Registers the arena's memory with CUDA, unless it is registered."""
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
    """Undoes the registration, before the arena's memory is mapped anew."""
    global _locked
    if _locked is not None:
        with suppress(RuntimeError, AttributeError):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(_locked[0])
    _locked = None
