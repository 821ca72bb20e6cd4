"""What one rank writes: of each tensor a span of its local array, and the way to its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch

from ckpt.state.flatten import FlatState, Leaf
from ckpt.state.memory import is_lazy
from formats.dtypes import DType
from formats.native.manifest import StoredTensor
from formats.outgoing import OutgoingTensor
from sharding.layout import Layout

STAGE_BYTES = 16 << 20
"""Bytes of a tensor that are copied at once where its memory cannot be written as it lies."""
NUMPY_TYPES = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8)
)
"""Types whose memory Python sees as bytes without a view by torch."""


class WriteItem(NamedTuple):
    """What this rank writes of one tensor: elements `[lo, hi)` of its local array, row-major."""

    leaf: Leaf
    lo: int
    hi: int
    shape: tuple[int, ...]
    """Of the entry in the file: the local array's, or one dimension for a part of it."""

    @property
    def name(self) -> str:
        """The tensor's."""
        return self.leaf.name

    @property
    def dtype(self) -> DType:
        """The tensor's."""
        return self.leaf.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return (self.hi - self.lo) * self.leaf.dtype.itemsize

    @property
    def is_in_memory(self) -> bool:
        """Whether its bytes lie end to end in host memory."""
        local = self.leaf.local
        return local.is_cpu and local.is_contiguous() and not is_lazy(local)

    def outgoing(self) -> OutgoingTensor:
        """The part as a writer takes it, straight from the tensor's memory where that can be."""
        local, lo, hi, dtype = self.leaf.local, self.lo, self.hi, self.leaf.dtype
        if self.is_in_memory:
            data = _bytes_of(local)[lo * dtype.itemsize : hi * dtype.itemsize]
            return OutgoingTensor(self.name, self.shape, dtype, lambda: iter((data,)), stable=True)
        return OutgoingTensor(self.name, self.shape, dtype, self.blocks)

    def blocks(self) -> Iterator[memoryview]:
        """The part's bytes, copied to host memory block by block."""
        return _staged(self.leaf.local, self.lo, self.hi, self.leaf.dtype)


def write_items(flat: FlatState, tensors: Mapping[str, StoredTensor], rank: int) -> list[WriteItem]:
    """What `rank`, which has `flat`, writes of the tensors in their stored layouts."""
    spans: dict[tuple[int, int], tuple[int, int, tuple[int, ...]] | None] = {}
    """By the ids of both layouts, of which most tensors of a model share few."""
    parts: list[WriteItem] = []
    for name, leaf in flat.leaves.items():
        have, stored = leaf.layout, tensors[name].layout
        key = (id(have), id(stored))
        if key not in spans:
            spans[key] = _span(have, stored, rank)
        span = spans[key]
        if span is not None:
            parts.append(WriteItem(leaf, *span))
    return parts


def _span(have: Layout, stored: Layout, rank: int) -> tuple[int, int, tuple[int, ...]] | None:
    """Which elements of what it has a rank stores, and the shape of the entry; None if none."""
    lo, hi = stored.span(rank)
    if lo >= hi:
        return None
    shape = stored.local_shape(rank)
    if hi - lo != prod(shape):
        first, _ = have.span(rank)  # what the rank has may be a range too
        lo, hi, shape = lo - first, hi - first, (hi - lo,)
    return lo, hi, shape


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if tensor.dtype in NUMPY_TYPES and tensor.numel():
        return tensor.numpy().data.cast("B")
    flat = (
        tensor.reshape(-1).view(torch.uint8)
        if tensor.numel()
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return memoryview(flat.numpy().data)


def _staged(local: torch.Tensor, lo: int, hi: int, dtype: DType) -> Iterator[memoryview]:
    """Elements `[lo, hi)` of a tensor in row-major order, copied to the CPU block by block."""
    if local.is_contiguous() and not is_lazy(local):
        flat = local.reshape(-1)
        step = max(1, STAGE_BYTES // dtype.itemsize)
        for start in range(lo, hi, step):
            yield _bytes_of(flat[start : min(start + step, hi)].cpu())
        return
    from sharding.torch_versions import movable  # imports torch's DTensor

    # Rows are the unit here: a strided view cannot be flattened without copying all of it.
    rows = local.shape[0] if local.ndim else 1
    inner = local.numel() // rows
    step = max(1, STAGE_BYTES // max(1, inner * dtype.itemsize))
    for first in range(lo // inner, -(-hi // inner), step):
        last = min(first + step, rows)
        block = local[first:last] if local.ndim else local
        whole = movable(block).resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        start, stop = max(lo - first * inner, 0), min(hi - first * inner, whole.numel())
        yield _bytes_of(whole[start:stop])
