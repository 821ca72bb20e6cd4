"""The unsharded buffer: unsharded parameters are views of it; its memory can be freed and refilled.

Autograd saves views of parameters in forward and reads them in backward. In between, the buffer is
freed, and then filled again in the same storages, so that the saved views are valid again. Writes
use second tensors over the same storages, with version counters of their own: autograd never sees a
change of a parameter.

[Note: slabs]
A large buffer is several storages, slabs of at most `SLAB_BYTES` if parameters allow. The C
library returns blocks of more than 32 MiB to the system at once, and new memory from the system
costs a page fault for every 4 KiB, more than the fill. It keeps and reuses smaller blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sharding.engine.packing import ChunkPacking, FlatPacking, Slot, Span, chunk, slabs
from sharding.engine.shard_group import ShardGroup

SLAB_BYTES = 28 << 20
"""The largest slab; smaller ones leave more holes between them, and save no time."""

Leaf = Callable[[int, torch.Tensor], torch.Tensor]
"""Makes the parameter from a slot's index and the view of its elements."""


class UnshardedBuffer:
    """One buffer, and a leaf of autograd for every slot."""

    def __init__(
        self,
        slots: tuple[Slot, ...],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        leaf: Leaf,
        over: torch.Tensor | None = None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """Allocates memory; or, with a flat tensor `over`, uses its memory and never frees it."""
        self.slots = slots
        self.numel = numel
        self.dtype = dtype
        self.device = device
        self._owns = over is None
        limit = slab_bytes // dtype.itemsize if over is None else numel
        ranges = slabs(slots, numel, limit)
        self._slabs = [_Slab(lo, hi, dtype, device, over) for lo, hi in ranges]
        self._begins = [slab.lo for slab in self._slabs]
        self._places: list[list[torch.Tensor]] = []
        with torch.inference_mode(False), torch.no_grad():
            self.leaves = [
                leaf(index, self._slab_of(slot.at).view(slot)) for index, slot in enumerate(slots)
            ]
            """By slot, the unsharded parameter."""

    @classmethod
    def of(
        cls, slots: tuple[Slot, ...], numel: int, dtype: torch.dtype, device: torch.device
    ) -> UnshardedBuffer:
        """Returns a buffer in one piece, with plain tensors as leaves."""
        return cls(slots, numel, dtype, device, plain, slab_bytes=numel * dtype.itemsize)

    @property
    def raw(self) -> torch.Tensor:
        """A one-piece buffer as a flat tensor for writes, an alias that autograd does not see."""
        [slab] = self._slabs
        return slab.raw

    @property
    def nbytes(self) -> int:
        """The bytes that are allocated now."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def unsharded_bytes(self) -> int:
        """The bytes of the buffer when it has memory."""
        return self.numel * self.dtype.itemsize

    def allocate(self) -> None:
        """Allocates the memory. New memory is not initialized."""
        if self._owns:
            for slab in self._slabs:
                slab.allocate()

    def free(self) -> None:
        """Frees the memory."""
        if self._owns:
            for slab in self._slabs:
                slab.free()

    def set_row_major(self) -> None:
        """Puts slots into row-major order, which have arrived with the divided dimension first."""
        with torch.inference_mode(False), torch.no_grad():
            for slot in self.slots:
                if slot.dim and slot.numel:
                    arrived = self._slab_of(slot.at).part(slot.at, slot.at + slot.numel)
                    rows_first = arrived.view(slot.arrived_shape)
                    arrived.copy_(rows_first.movedim(0, slot.dim).reshape(-1))

    def is_over(self, tensor: torch.Tensor) -> bool:
        """Whether the buffer uses the memory of this tensor."""
        return self._slabs[0].raw.data_ptr() == tensor.data_ptr()

    def to(self, device: torch.device) -> UnshardedBuffer:
        """Returns a buffer in one piece on another device, with leaves that are plain tensors."""
        if self.device == device:
            return self
        moved = UnshardedBuffer.of(self.slots, self.numel, self.dtype, device)
        moved.raw.copy_(self.raw)
        return moved

    def places(self, packing: ChunkPacking | FlatPacking) -> list[list[torch.Tensor]]:
        """Returns each rank's ranges of the buffer, to fill; always the same tensors."""
        if not self._places:
            self._places = [self.parts(packing.spans(rank)) for rank in range(packing.size)]
        return self._places

    def parts(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Returns ranges of the buffer to fill: one for each span, or more if slabs divide it."""
        with torch.inference_mode(False), torch.no_grad():
            return [self._slab_of(lo).part(lo, hi) for span in spans for lo, hi in self._cut(span)]

    def cut(self, spans: Sequence[Span], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns tensors for spans of the buffer, divided as `parts` divides the spans."""
        return [
            tensor[lo - span[0] : hi - span[0]]
            for span, tensor in zip(spans, tensors, strict=True)
            for lo, hi in self._cut(span)
        ]

    def _cut(self, span: Span) -> list[Span]:
        lo, hi = span
        inner = [at for at in self._begins[1:] if lo < at < hi]
        return list(zip([lo, *inner], [*inner, hi], strict=True))

    def _slab_of(self, at: int) -> _Slab:
        return self._slabs[max(0, bisect_right(self._begins, at) - 1)]


@dataclass(frozen=True, slots=True)
class KeptPart:
    """This rank's part of an unsharded buffer that fewer ranks share than share the shards."""

    part: list[torch.Tensor]
    """The part as flat tensors."""
    shard_group: ShardGroup

    @classmethod
    def of(cls, buffer: UnshardedBuffer, shard_group: ShardGroup) -> KeptPart:
        """Returns a copy of this rank's part of a buffer that is divided evenly."""
        span = chunk(buffer.numel, shard_group.size, shard_group.rank)
        return cls([part.clone() for part in buffer.parts([span])], shard_group)

    def places(self, buffer: UnshardedBuffer) -> list[list[torch.Tensor]]:
        """Returns, by rank of the shard group, the ranges of a buffer that its part fills."""
        spans = [
            chunk(buffer.numel, self.shard_group.size, r) for r in range(self.shard_group.size)
        ]
        return [buffer.parts([span]) for span in spans]


class _Slab:
    """A range of the buffer with a storage of its own."""

    def __init__(
        self, lo: int, hi: int, dtype: torch.dtype, device: torch.device, over: torch.Tensor | None
    ) -> None:
        self.lo = lo
        self._unsharded_bytes = (hi - lo) * dtype.itemsize
        with torch.inference_mode(False), torch.no_grad():
            full = torch.empty(0, dtype=dtype, device=device)
            self._storage = full.untyped_storage() if over is None else over.untyped_storage()
            offset = 0 if over is None else over.storage_offset()
            if over is None:
                self._storage.resize_(self._unsharded_bytes)
            self._full = full.set_(self._storage, offset, (hi - lo,), (1,))
            self.raw = torch.empty(0, dtype=dtype, device=device)
            """The slab, flat, for writing."""
            self.raw.set_(self._storage, offset, (hi - lo,), (1,))

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes()

    def allocate(self) -> None:
        if self._storage.nbytes() != self._unsharded_bytes:
            self._storage.resize_(self._unsharded_bytes)

    def free(self) -> None:
        self._storage.resize_(0)

    def part(self, lo: int, hi: int) -> torch.Tensor:
        return self.raw[lo - self.lo : hi - self.lo]

    def view(self, slot: Slot) -> torch.Tensor:
        """Returns a slot's parameter: a separate tensor over the slab's memory."""
        begin = slot.at - self.lo
        return self._full[begin : begin + slot.numel].view(slot.shape).data


def plain(index: int, view: torch.Tensor) -> torch.Tensor:
    """Returns the view itself."""
    return view
