"""One rank's tensors as streams of bytes for a format's writer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ckpt.plan.save_plan import WriteItem
from ckpt.state.memory import is_conj_or_neg, is_plain, memory_of
from formats.catalog import OutgoingTensor
from formats.dtypes import DType

STAGE_BYTES = 16 << 20
"""Bytes that are copied at once of a tensor whose memory cannot be written as it lies."""


def outgoing(item: WriteItem, local: torch.Tensor) -> OutgoingTensor:
    """Returns an item for a format's writer, without a copy if the tensor's memory allows it.

    `local` is the rank's part of the tensor, detached.
    """
    name, _, dtype, lo, hi, shape, _ = item
    if is_plain(local):
        data = memory_of(local)
        if hi - lo < local.numel():
            data = data[lo * dtype.itemsize : hi * dtype.itemsize]
        return OutgoingTensor(name, shape, dtype, lambda: iter((data,)), stable=True)
    return OutgoingTensor(name, shape, dtype, lambda: _stage(local, lo, hi, dtype))


def outgoing_whole(name: str, dtype: DType, local: torch.Tensor) -> OutgoingTensor:
    """Returns all elements of a tensor for a format's writer."""
    numel, shape = local.numel(), tuple(local.shape)
    return outgoing(WriteItem(name, 0, dtype, 0, numel, shape, 0), local)


def blocks(local: torch.Tensor, lo: int, hi: int, dtype: DType) -> Iterator[memoryview]:
    """Returns elements `[lo, hi)` of a tensor in row-major order, as blocks of host memory.

    The blocks are the tensor's own memory if possible; else copies, made one at a time.
    """
    if is_plain(local):
        return iter((memory_of(local)[lo * dtype.itemsize : hi * dtype.itemsize],))
    return _stage(local, lo, hi, dtype)


def _stage(local: torch.Tensor, lo: int, hi: int, dtype: DType) -> Iterator[memoryview]:
    """Yields elements `[lo, hi)` of a tensor in row-major order, copied to the CPU in blocks."""
    if local.is_contiguous() and not is_conj_or_neg(local):
        flat = local.reshape(-1)
        step = max(1, STAGE_BYTES // dtype.itemsize)
        for start in range(lo, hi, step):
            yield memory_of(flat[start : min(start + step, hi)].cpu())
        return
    from sharding.torch_versions import movable  # imports torch's DTensor

    # A block is whole rows: a strided view cannot be flattened without a copy of all of it.
    rows = local.shape[0] if local.ndim else 1
    inner = local.numel() // rows
    step = max(1, STAGE_BYTES // max(1, inner * dtype.itemsize))
    for first in range(lo // inner, -(-hi // inner), step):
        last = min(first + step, rows)
        block = local[first:last] if local.ndim else local
        whole = movable(block).resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        start, stop = max(lo - first * inner, 0), min(hi - first * inner, whole.numel())
        yield memory_of(whole[start:stop])
