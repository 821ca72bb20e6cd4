"""One parameter of a group, its place in the unsharded buffer, and that buffer.

The unsharded buffer holds the parameters of a group end to end, each in one contiguous *slot*, so
that a parameter is a contiguous view of the buffer, and is not copied. Autograd saves such views in
forward and reads them in backward. In between, the buffer's memory is freed, and then filled again
in the same storages, so that the saved views are valid again. Writes use second tensors over the
same storages, with version counters of their own: autograd never sees a change of a parameter.

A rank holds a list of *spans*, ranges of the unsharded buffer; end to end they are its shard. There
are two divisions, computed with integers only:

- `ChunkPacking`: each parameter by torch.chunk's rule along one dimension, a span per parameter. A
  slot's rows run along that dimension (a parameter sharded on another than its first arrives
  transposed in its slot, and is then put into row-major order by a copy). A parameter without
  dimensions cannot be divided: every rank holds it.
- `FlatPacking`: the whole buffer in equal parts, one span per rank, padded at the end.

[Note: slabs]
A large buffer is several storages, slabs of at most `SLAB_BYTES` if parameters allow. The C
library returns blocks of more than 32 MiB to the system at once, and new memory from the system
costs a page fault for every 4 KiB, more than the fill. It keeps and reuses smaller blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from sharding.engine.composition import ShardGroup
from sharding.errors import TorchAssertionError
from sharding.layout.box import chunk


def is_hooked(sharded: nn.Parameter, name: str) -> bool:
    """Whether a sharded parameter has all-gather hooks.

    Raises TorchAssertionError if it has only one of them.
    """
    local: torch.Tensor = sharded._local_tensor  # type: ignore[attr-defined]
    pre, post = hasattr(local, "fsdp_pre_all_gather"), hasattr(local, "fsdp_post_all_gather")
    if pre != post:
        raise TorchAssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined: the local tensor "
            f"of {name}, a {type(local).__name__}, has only "
            f"fsdp_{'pre' if pre else 'post'}_all_gather"
        )
    return pre


@dataclass(eq=False)
class Parameter:
    """One parameter of a unit, and every place in the modules that has it."""

    name: str
    owners: list[tuple[nn.Module, str]]
    sharded: nn.Parameter
    dim: int
    """The dimension that is divided; 0 in a flat parameter."""
    shape: tuple[int, ...]
    """The unsharded shape on this rank; tensor parallelism may have divided the parameter."""
    param_group: object = None
    """The parameter's `ParamGroup`, None before; its type here would make an import circle."""
    distributed: DTensorSpec | None = None
    """The spec of the unsharded parameter if tensor parallelism divides it; else None."""

    def place(self, tensor: torch.Tensor) -> None:
        """Puts the sharded or the unsharded parameter into its modules."""
        for module, attribute in self.owners:
            if type(module).__setattr__ is nn.Module.__setattr__ or not sees_what_is_set(module):
                module._parameters[attribute] = tensor  # type: ignore[assignment]
            else:
                setattr(module, attribute, tensor)


def sees_what_is_set(module: nn.Module) -> bool:
    """Whether the module's class has a `__setattr__` of its own, as nn.LSTM has.

    That of a compiled module hands all names on to the module inside, which would have the
    wrapper's own parameters as well.
    """
    setter = type(module).__setattr__
    if setter is nn.Module.__setattr__:
        return False
    return getattr(setter, "__module__", None) != "torch._dynamo.eval_frame"


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a group's all-gathers and reductions; None leaves them alone."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    """Whether accumulated gradients keep the dtype of the reduction."""


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Returns the DTensor of this spec with this local tensor, which it shares."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_of(tensor: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """Returns this rank's part of a tensor; a DTensor is first placed by the spec."""
    if spec is None or not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements != spec.placements:
        tensor = tensor.redistribute(spec.mesh, spec.placements)
    local = tensor.to_local()
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()


def shard_in_front(dim: int, behind: DTensorSpec | None) -> Placement:
    """Returns the placement on a mesh dimension in front of those of tensor parallelism.

    [Note: which dimension comes first]
    If tensor parallelism and sharding cut the same dimension, tensor parallelism cuts first,
    although its mesh dimension comes after. torch expresses this order by `_StridedShard`.
    """
    cuts = 1
    if behind is not None:
        for axis, other in enumerate(behind.placements):
            if isinstance(other, Shard | _StridedShard) and other.dim == dim:
                cuts *= behind.mesh.size(axis)
    return _StridedShard(dim, split_factor=cuts) if cuts > 1 else Shard(dim)


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
        if self._owns:
            for slab in self._slabs:
                slab.free()

    def set_row_major(self) -> None:
        """Puts slots into row-major order, which have arrived with the divided dimension first."""
        columns = [slot for slot in self.slots if slot.dim and slot.numel]
        if not columns:  # as nearly always: the contexts take longer than all else
            return
        with torch.inference_mode(False), torch.no_grad():
            for slot in columns:
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
            return [
                self._slab_of(lo).part(lo, hi)
                for span in spans
                for lo, hi in self._split_span(span)
            ]

    def split(self, spans: Sequence[Span], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns tensors for spans of the buffer, divided as `parts` divides the spans."""
        return [
            tensor[lo - span[0] : hi - span[0]]
            for span, tensor in zip(spans, tensors, strict=True)
            for lo, hi in self._split_span(span)
        ]

    def _split_span(self, span: Span) -> list[Span]:
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


Span = tuple[int, int]
"""`[lo, hi)`, in elements."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in the unsharded buffer."""

    shape: tuple[int, ...]
    """The unsharded shape."""
    dim: int
    """The dimension whose indices are the slot's rows."""
    at: int
    """The slot's first element in the unsharded buffer."""

    @property
    def numel(self) -> int:
        """The number of elements of the unsharded parameter."""
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """The number of indices of the sharded dimension."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def arrived_shape(self) -> tuple[int, ...]:
        """The slot's shape when its rows have arrived: the sharded dimension first."""
        if not self.shape:
            return (1,)
        return (self.shape[self.dim], *self.shape[: self.dim], *self.shape[self.dim + 1 :])

    def chunk(self, size: int, rank: int) -> Span:
        """Returns the chunk of `rank` of `size` by torch.chunk's rule, in the unsharded buffer.

        >>> Slot((5, 2), 0, 100).chunk(2, 1)
        (106, 110)
        >>> Slot((), 0, 100).chunk(2, 1)
        (100, 101)
        """
        if not self.shape:
            return self.at, self.at + 1
        lo, hi = chunk(self.rows, size, rank)
        inner = self.numel // self.rows if self.rows else 0
        return self.at + lo * inner, self.at + hi * inner


@dataclass(frozen=True)
class ChunkPacking:
    """Each parameter is divided by torch.chunk's rule along its dimension.

    >>> packing = ChunkPacking(pack([(3,), (2, 2)], [0, 0]), 2)
    >>> packing.numel, packing.spans(1), packing.cuts(1)
    (7, ((2, 3), (5, 7)), ((2, 3), (2, 4)))
    """

    slots: tuple[Slot, ...]
    size: int

    @property
    def numel(self) -> int:
        """The number of elements of the unsharded buffer."""
        return _end(self.slots)

    def spans(self, rank: int) -> tuple[Span, ...]:
        return self._spans[rank]

    def cuts(self, rank: int) -> tuple[Span, ...]:
        """Returns each slot's span of a rank, counted from the slot's first element."""
        return self._cuts[rank]

    @cached_property
    def _spans(self) -> list[tuple[Span, ...]]:
        ranks = range(self.size)
        return [tuple(slot.chunk(self.size, rank) for slot in self.slots) for rank in ranks]

    @cached_property
    def _cuts(self) -> list[tuple[Span, ...]]:
        return [
            tuple((lo - s.at, hi - s.at) for s, (lo, hi) in zip(self.slots, spans, strict=True))
            for spans in self._spans
        ]


@dataclass(frozen=True, slots=True)
class FlatPacking:
    """The buffer, padded, is divided into equal parts.

    >>> packing = FlatPacking(pack([(3,), (2, 2)], [0, 0]), 2)
    >>> packing.numel, packing.spans(1), packing.piece(1, 0), packing.piece(1, 1)
    (8, ((4, 8),), (0, 1), (1, 4))
    """

    slots: tuple[Slot, ...]
    size: int

    @property
    def shard_numel(self) -> int:
        """The number of elements of every rank's shard."""
        return -(-_end(self.slots) // self.size)

    @property
    def numel(self) -> int:
        """The number of elements of the unsharded buffer, with padding."""
        return self.shard_numel * self.size

    def spans(self, rank: int) -> tuple[Span, ...]:
        return ((rank * self.shard_numel, (rank + 1) * self.shard_numel),)

    def piece(self, index: int, rank: int) -> Span:
        """Returns the elements `[lo, hi)` of parameter `index`, in row-major order, of a rank."""
        slot, lo = self.slots[index], rank * self.shard_numel
        first = min(max(lo - slot.at, 0), slot.numel)
        return first, min(max(lo + self.shard_numel - slot.at, first), slot.numel)


def slabs(slots: Sequence[Slot], numel: int, limit: int) -> tuple[Span, ...]:
    """Returns ranges of whole slots that tile a buffer; longer than `limit` only for a longer slot.

    >>> slabs(pack([(3,), (2,), (9,), (1,)], [0, 0, 0, 0]), 16, 5)
    ((0, 5), (5, 14), (14, 16))
    """
    begins = [0]
    for slot, after in zip(slots, [*(s.at for s in slots[1:]), numel], strict=True):
        if after - begins[-1] > limit and slot.at > begins[-1]:
            begins.append(slot.at)
    return tuple(zip(begins, [*begins[1:], numel], strict=True))


def pack(
    shapes: Sequence[tuple[int, ...]], dims: Sequence[int], align: int = 1
) -> tuple[Slot, ...]:
    """Returns slots for parameters of these shapes, in order, each at a multiple of `align`.

    >>> [slot.at for slot in pack([(3, 3), (4,)], [0, 0], align=8)]
    [0, 16]
    """
    slots, at = [], 0
    for shape, dim in zip(shapes, dims, strict=True):
        slots.append(Slot(shape, dim, at))
        at += -(-prod(shape) // align) * align
    return tuple(slots)


def _end(slots: Sequence[Slot]) -> int:
    return slots[-1].at + slots[-1].numel if slots else 0
