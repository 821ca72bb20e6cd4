"""Targets that share memory: which of them cannot each hold what was saved.

Rules:

1. Elements of one tensor that lie in one place, as after `expand`, cannot differ.
2. Two tensors that share some of their memory cannot both be filled: the later one would change the
   other. Two that begin and end at the same bytes are taken for one tensor under two names, which
   was saved as such.
3. What is uncertain passes: tensors with steps between their elements, over more memory than
   `MOST_UNITS`, are compared with nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ckpt.errors import Difference
from ckpt.matching.ledger import Want
from sharding.describe.describing import Spread
from sharding.describe.local_part import LocalPart
from sharding.describe.sharded_tensor import is_sharded

MOST_UNITS = 16 << 20
"""How many places of memory are compared one by one, at most."""


class Extent(NamedTuple):
    """Where a target's elements lie: bytes `[lo, hi)` of a device's memory, if not all of them."""

    device: str
    lo: int
    hi: int
    name: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes. Empty, as the shape is, where every byte is the target's."""

    @property
    def is_dense(self) -> bool:
        """Whether every byte in it is the target's."""
        return not self.strides


def shared_memory(wants: Iterable[Want]) -> Iterator[Difference]:
    """What cannot be filled because of the memory that it shares."""
    extents: dict[tuple[str, int, int], Extent] = {}
    for want in wants:
        local = _local(want.tensor)
        if local is None:
            continue
        extent = _extent(want.name, local)
        if overlaps_itself(extent):
            yield Difference(
                want.name,
                "structure",
                f"several elements of the target share one place in memory (shape "
                f"{tuple(local.shape)}, strides {local.stride()}, as after expand()): they cannot "
                "hold what was saved; make it a tensor of its own with clone()",
            )
        elif extent.lo:
            extents.setdefault((extent.device, extent.lo, extent.hi), extent)
    for one, other in overlapping(extents.values()):
        yield Difference(
            other,
            "structure",
            f"shares a part of its memory with {one} in the target: the two cannot each hold what "
            "was saved; make one of them a tensor of its own with clone(), or leave it out with "
            "exclude=",
        )


def overlaps_itself(extent: Extent) -> bool:
    """Whether there is less memory than there are elements, or a step of nothing between some.

    >>> overlaps_itself(Extent("cpu", 0, 32, "w", 4, (6, 8), (0, 4)))
    True
    """
    if extent.is_dense:
        return False
    elements = int(np.prod(extent.shape, dtype=object))
    stands = any(n > 1 and not step for n, step in zip(extent.shape, extent.strides, strict=True))
    return stands or elements * extent.itemsize > extent.hi - extent.lo


def overlapping(extents: Iterable[Extent]) -> Iterator[tuple[str, str]]:
    """Names of two that have some memory in common, for each that has any with one before it.

    >>> def dense(lo, hi, name): return Extent("cpu", lo, hi, name, 4, (), ())
    >>> list(overlapping([dense(0, 24, "a"), dense(16, 40, "b"), dense(40, 44, "c")]))
    [('a', 'b')]
    """
    together: list[Extent] = []
    end = ("", 0)
    for extent in sorted(extents, key=lambda one: one[:3]):
        if (extent.device, extent.lo) >= end:
            yield from _in_cluster(together)
            together = []
        together.append(extent)
        end = max(end, (extent.device, extent.hi))
    yield from _in_cluster(together)


def _in_cluster(extents: list[Extent]) -> Iterator[tuple[str, str]]:
    """The same for extents that lie in one run of memory, in ascending order."""
    if len(extents) < 2:
        return
    last: Extent | None = None
    for extent in extents:
        if not extent.is_dense:
            continue
        if last is not None and extent.lo < last.hi:
            yield last.name, extent.name
        if last is None or extent.hi > last.hi:
            last = extent
    if all(extent.is_dense for extent in extents):
        return
    lo, hi = extents[0].lo, max(extent.hi for extent in extents)
    numbers = [number for extent in extents for number in (extent.lo - lo, *extent.strides)]
    unit = gcd(*numbers, *(extent.itemsize for extent in extents))
    if (hi - lo) // unit > MOST_UNITS:
        return
    owner = np.zeros((hi - lo) // unit, np.int32)
    for number, extent in enumerate(extents, 1):
        nbytes = extent.hi - extent.lo if extent.is_dense else extent.itemsize
        view = np.ndarray(
            (*extent.shape, nbytes // unit),
            np.int32,
            buffer=owner.data,
            offset=(extent.lo - lo) // unit * 4,
            strides=(*(step // unit * 4 for step in extent.strides), 4),
        )
        taken = int(view.max())
        if taken and not (extent.is_dense and extents[taken - 1].is_dense):
            yield extents[taken - 1].name, extent.name
        view[...] = number


def _local(tensor: Spread) -> torch.Tensor | None:
    """What this rank has of a target, if that has memory."""
    local: object = tensor
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        if isinstance(tensor, LocalPart):
            local = tensor.local
        elif is_sharded(tensor):
            shards = tensor.local_shards()
            local = shards[0].tensor if shards else None
        else:
            local = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(local, torch.Tensor) or local.numel() == 0 or local.is_meta:
        return None
    return local if type(local) in (torch.Tensor, nn.Parameter) else None


def _extent(name: str, tensor: torch.Tensor) -> Extent:
    lo, itemsize = tensor.data_ptr(), tensor.itemsize
    device = str(tensor.device)
    if tensor.is_contiguous():
        return Extent(device, lo, lo + tensor.numel() * itemsize, name, itemsize, (), ())
    shape = tuple(tensor.shape)
    strides = tuple(stride * itemsize for stride in tensor.stride())
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return Extent(device, lo, lo + last + itemsize, name, itemsize, shape, strides)
