"""The memory that whole parameters are views of: it comes and goes, its storage stays.

Autograd saves views of parameters in forward and reads them in backward. The buffer is emptied in
between and filled again, in the same storage: what was saved is right again. What fills it writes
through a second tensor over the same storage, with a version counter of its own: to autograd the
parameters never change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sharding.huge_pages import ask_for_huge_pages
from sharding.packing import ChunkPacking, FlatPacking, Slot


class FullBuffer:
    """One buffer, and a leaf of autograd for every slot."""

    def __init__(
        self,
        slots: tuple[Slot, ...],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        leaf: Callable[[int, torch.Tensor], torch.Tensor],
        over: torch.Tensor | None = None,
    ) -> None:
        """Memory of its own; or, `over` a flat tensor, that tensor's, which is never given back.

        `leaf` makes the parameter of a slot's index and the view of its elements.
        """
        self.slots = slots
        self._places: list[list[torch.Tensor]] = []
        self.numel = numel
        self._owns = over is None
        with torch.inference_mode(False), torch.no_grad():
            full = torch.empty(0, dtype=dtype, device=device)
            self._storage = full.untyped_storage() if over is None else over.untyped_storage()
            offset = 0 if over is None else over.storage_offset()
            if over is None:
                self._storage.resize_(numel * dtype.itemsize)
            full.set_(self._storage, offset, (numel,), (1,))
            self.raw = torch.empty(0, dtype=dtype, device=device)
            """The buffer as who fills it sees it."""
            self.raw.set_(self._storage, offset, (numel,), (1,))
            self.leaves = [leaf(index, _view(full, slot)) for index, slot in enumerate(slots)]
            """By slot, the whole parameter."""

    @classmethod
    def of(
        cls, slots: tuple[Slot, ...], numel: int, dtype: torch.dtype, device: torch.device
    ) -> FullBuffer:
        """A buffer whose leaves are plain tensors."""
        return cls(slots, numel, dtype, device, plain)

    def allocate(self) -> None:
        """There is memory; what is in it is not defined, unless it was there before."""
        nbytes = self.numel * self.raw.itemsize
        if self._owns and self._storage.nbytes() != nbytes:
            self._storage.resize_(nbytes)
            ask_for_huge_pages(self.raw)

    def free(self) -> None:
        """There is no memory."""
        if self._owns:
            self._storage.resize_(0)

    def to(self, device: torch.device) -> FullBuffer:
        """The buffer on another device, with leaves that are plain tensors."""
        if self.raw.device == device:
            return self
        moved = FullBuffer.of(self.slots, self.numel, self.raw.dtype, device)
        moved.raw.copy_(self.raw)
        return moved

    @property
    def nbytes(self) -> int:
        """Bytes that are live now."""
        return self._storage.nbytes()

    def places(self, packing: ChunkPacking | FlatPacking) -> list[list[torch.Tensor]]:
        """By rank, its ranges of the buffer, to be filled. Always the same."""
        if not self._places:
            with torch.inference_mode(False), torch.no_grad():
                ranks = range(packing.size)
                self._places = [[self.raw[lo:hi] for lo, hi in packing.spans(r)] for r in ranks]
        return self._places


def _view(full: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A slot's parameter: a tensor of its own over the buffer's memory."""
    view = full[slot.at : slot.at + slot.numel].view(slot.stored_shape)
    return (view.movedim(0, slot.dim) if slot.shape else view.view(())).data


def plain(index: int, view: torch.Tensor) -> torch.Tensor:
    """The view itself."""
    return view
