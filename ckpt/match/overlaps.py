"""Targets that share memory: which of them have to receive the same, and whether they do.

Rules:

1. Elements of one tensor that lie in one place, as after `expand`, cannot differ: it is refused.
2. Tensors that share some of their memory, or all of it, are a group. It is filled where the values
   for each byte that several of them have are the same, and refused by name where they are not.
   Tied parameters are such a group, also where their shards here are empty.
3. The values are compared before anything is touched: by `ckpt.transfer.shared_targets` from files,
   by `ckpt.state_dict` from memory.
4. Tensors with steps between their elements, over more memory than `MOST_UNITS`, pass: whether they
   share an element is not looked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import torch

from ckpt.errors import Difference
from ckpt.match.match_builder import Target
from ckpt.plan.load_plan import LoadItem
from ckpt.state.memory import memory_of

MOST_UNITS = 16 << 20
"""How many places of memory are compared one by one, at most."""


class Extent(NamedTuple):
    """Where a target's elements lie: bytes `[lo, hi)` of a device's memory, if not all of them."""

    device: str
    lo: int
    hi: int
    name: str
    itemsize: int
    """Bytes of an element: of a run of them, where they lie end to end."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes. Empty, as the shape is, where every byte is the target's."""

    @property
    def is_dense(self) -> bool:
        """Whether every byte in it is the target's."""
        return not self.strides


class Shared(NamedTuple):
    """What the memory of a target asks for."""

    refused: list[Difference]
    """Targets that no values fit into, but for equal ones."""
    groups: list[tuple[LoadItem, ...]]
    """Wants that share memory and are filled from several records, or in several shapes."""


def shared_memory(
    items: Iterable[LoadItem],
    ties: Iterable[tuple[LoadItem, LoadItem]],
    targets: Sequence[Target],
) -> Shared:
    """Which items have to receive the same; `ties` are items for one tensor under two names."""
    found = Shared([], [])
    first_of: dict[tuple[str, int, int], tuple[Extent, LoadItem, torch.Tensor]] = {}
    extents: list[Extent] = []
    named: dict[str, LoadItem] = {}
    pairs = [pair for pair in ties if pair[0].source != pair[1].source]
    for want in items:
        local = targets[want.target].local
        if type(local) is not torch.Tensor or local.numel() == 0 or local.is_meta:
            continue
        extent = _extent(want.name, local)
        if overlaps_itself(extent):
            found.refused.append(_of_one_place(want.name, local))
        elif extent.lo:
            known, one, other = first_of.setdefault(extent[:3], (extent, want, local))
            if one is not want and not _takes_the_same(one, other, want, local):
                pairs.append((one, want))  # both have the first byte
            if one is want or known.strides != extent.strides or known.shape != extent.shape:
                extents.append(extent)
                named[want.name] = want
    pairs += [(named[one], named[other]) for one, other in overlapping(extents)]
    found.groups.extend(_groups(pairs))
    return found


def _of_one_place(name: str, local: torch.Tensor) -> Difference:
    return Difference(
        name,
        "structure",
        f"several elements of the target share one place in memory (shape {tuple(local.shape)}, "
        f"strides {local.stride()}, as after expand()): they cannot hold what was saved; make it a "
        "tensor of its own with clone()",
    )


def _takes_the_same(
    one: LoadItem, here: torch.Tensor, other: LoadItem, there: torch.Tensor
) -> bool:
    """Whether two tensors over one run of memory are one, filled from one record."""
    return one.source == other.source and is_same_view(here, there)


def is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that begin in one place have the same elements in the same places."""
    return (one.dtype, one.shape, one.stride(), one.is_conj(), one.is_neg()) == (
        *(other.dtype, other.shape, other.stride()),
        *(other.is_conj(), other.is_neg()),
    )


def _groups(pairs: Iterable[tuple[LoadItem, LoadItem]]) -> Iterator[tuple[LoadItem, ...]]:
    """The wants that pairs connect, in the order in which they came."""
    group_of: dict[str, list[LoadItem]] = {}
    for pair in pairs:
        one, other = (group_of.setdefault(want.name, [want]) for want in pair)
        if one is not other:
            one += other
            group_of |= dict.fromkeys((want.name for want in other), one)
    distinct = {id(group): tuple(group) for group in group_of.values()}
    yield from distinct.values()


class Placed(NamedTuple):
    """What a target would receive: values of its dtype and shape, in host memory of their own."""

    name: str
    local: torch.Tensor
    """The target on this rank; its memory is not read."""
    values: torch.Tensor


def conflict(group: Sequence[Placed]) -> Difference | None:
    """How the values for the memory of a group contradict each other; None where they do not."""
    group = [one for one in group if one.local.numel()]
    if len(group) < 2:
        return None
    extents = [_extent(one.name, one.local) for one in group]
    lo, hi = min(one.lo for one in extents), max(one.hi for one in extents)
    memory, owner = np.zeros(hi - lo, np.uint8), np.zeros(hi - lo, np.int32)
    for number, (name, local, values) in enumerate(group, 1):
        shape = (*local.shape, local.itemsize)
        steps = (*(step * local.itemsize for step in local.stride()), 1)
        at = local.data_ptr() - lo
        held = np.ndarray(shape, np.uint8, memory.data, at, steps)
        owned = np.ndarray(shape, np.int32, owner.data, at * 4, tuple(step * 4 for step in steps))
        bits = np.frombuffer(memory_of(_as_stored(values, local)), np.uint8).reshape(shape)
        differs = (owned > 0) & (held != bits)
        if differs.any():
            return differing(group[int(owned[differs][0]) - 1].name, name, int((owned > 0).sum()))
        held[...] = bits
        owned[...] = number
    return None


def differing(one: str, other: str, nbytes: int) -> Difference:
    """Two targets over the same memory, of which other values were saved."""
    return Difference(
        other,
        "structure",
        f"shares {nbytes} bytes of memory with {one} in the target, and the two were saved with "
        "different values: the memory cannot hold both; make one of them a tensor of its own with "
        "clone() (of tied parameters: untie them), or leave one out with exclude=",
    )


def group_bytes(group: Iterable[torch.Tensor]) -> int:
    """The host memory that comparing the values of a group takes."""
    extents = [(_extent("", local), local.numel() * local.itemsize) for local in group]
    span = max(extent.hi for extent, _ in extents) - min(extent.lo for extent, _ in extents)
    return 5 * span + sum(7 * nbytes for _, nbytes in extents)


def _as_stored(values: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The values as a target keeps them: a conjugated or negated view keeps other bits."""
    values = values.conj_physical() if local.is_conj() else values
    return (-values if local.is_neg() else values).contiguous()


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
        for taken in np.unique(view) if view.max() else ():
            if taken and not (extent.is_dense and extents[taken - 1].is_dense):
                yield extents[taken - 1].name, extent.name
        view[...] = number


def _extent(name: str, tensor: torch.Tensor) -> Extent:
    """Where the elements lie, with what lies end to end as one element, in whatever order."""
    lo, run = tensor.data_ptr(), tensor.itemsize
    device = str(tensor.device)
    if tensor.is_contiguous():
        run *= tensor.numel()
        return Extent(device, lo, lo + run, name, run, (), ())
    steps = [step * tensor.itemsize for step in tensor.stride()]
    dims = sorted((step, n) for step, n in zip(steps, tensor.shape, strict=True) if n > 1)
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    last = sum((n - 1) * step for step, n in dims)
    shape, strides = tuple(n for _, n in dims), tuple(step for step, _ in dims)
    return Extent(device, lo, lo + last + run, name, run, shape, strides)
