"""Finds targets that share memory, and checks that they receive equal values.

Rules:

1. A tensor with several elements at one address, as after `expand`, is refused: its elements cannot
   differ.
2. Tensors that share memory, in part or whole, are a group. A load fills the group if the values
   for each shared byte are equal. It refuses the group, with names, if they differ. Tied parameters
   are such a group, even if their shards on this rank are empty.
3. The values are compared before the load changes the target: from files by
   `ckpt.transfer.run`, from memory by `ckpt.state_dict`.
4. Strided tensors over more memory than `MOST_UNITS` pass without a search for shared elements.
5. An array that torch cannot share, as one with a negative stride, gets its values by a copy at the
   end of the load. It is refused if it shares memory with another target.

Makes one error of the differences between a target and a checkpoint on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import gcd
from operator import le
from typing import NamedTuple
from warnings import warn

import numpy as np
import torch
import xxhash

from ckpt.errors import NOT_STRICT, Difference, MismatchError, make_skipped_warning
from ckpt.match.match_builder import Match, Target
from ckpt.plan.load_plan import LoadItem
from ckpt.state.memory import memory_of
from ckpt.state.patterns import Claim
from sharding.agreement.ranks import HASH_BITS, Ranks

MOST_UNITS = 16 << 20
"""The search compares at most so many units of memory one by one."""


class Extent(NamedTuple):
    """The memory of a target: bytes in the range `[lo, hi)` of a device's memory."""

    device: str
    lo: int
    hi: int
    name: str
    itemsize: int
    """Bytes of an element. Elements that lie end to end count as one."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """The strides in bytes. Shape and strides are empty if the target has every byte."""

    @property
    def is_dense(self) -> bool:
        """Whether the target has every byte of the range."""
        return not self.strides


class Shared(NamedTuple):
    """The result of the search."""

    refused: list[Difference]
    """Targets with several elements at one address, and arrays of rule 5 that share memory."""
    groups: list[tuple[LoadItem, ...]]
    """Items that share memory and are filled from several records, or in several shapes."""


def find_shared_memory(
    items: Iterable[LoadItem],
    ties: Iterable[tuple[LoadItem, LoadItem]],
    targets: Sequence[Target],
    copied: Mapping[int, np.ndarray],
) -> Shared:
    """Returns the items that share memory; `ties` are items for one tensor under two names.

    `copied` has the array (rule 5) into which the target of a number is copied.
    """
    shared = Shared([], [])
    first_of: dict[tuple[str, int, int], tuple[Extent, LoadItem, torch.Tensor]] = {}
    extents: list[Extent] = []
    named: dict[str, LoadItem] = {}
    pairs = [pair for pair in ties if pair[0].source != pair[1].source]
    overlaps: list[tuple[LoadItem, LoadItem]] = []
    items = [*items]
    if not copied and _lie_apart(targets[item.target].local for item in items):
        items = ()
    for item in items:
        local, array = targets[item.target].local, copied.get(item.target)
        if type(local) is not torch.Tensor or local.numel() == 0 or local.is_meta:
            continue
        extent = _extent(item.name, local) if array is None else _extent_of_array(item.name, array)
        if overlaps_itself(extent):
            strides = local.stride() if array is None else array.strides
            shared.refused.append(_of_one_place(item.name, local.shape, strides))
        elif extent.lo:
            first_extent, first, first_local = first_of.setdefault(
                extent[:3], (extent, item, local)
            )
            is_copied = array is not None or first.target in copied
            if first is not item and (
                is_copied
                or first.source != item.source  # not filled from one record, in equal views
                or not is_same_view(first_local, local)
            ):
                overlaps.append((first, item))  # both have the first byte
            if (
                first is item
                or first_extent.strides != extent.strides
                or first_extent.shape != extent.shape
            ):
                extents.append(extent)
                named[item.name] = item
    overlaps += [(named[one], named[other]) for one, other in overlapping(extents)]
    for pair in overlaps:
        mine = next((item for item in reversed(pair) if item.target in copied), None)
        if mine is None:
            pairs.append(pair)
        else:
            shared.refused.append(_of_a_copy(mine.name, pair[pair[0] is mine].name))
    shared.groups.extend(_groups(pairs))
    return shared


def _lie_apart(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors are contiguous and have no byte in common, as those of nearly all targets.

    If not, they may be of two devices that use the same addresses.
    """
    begins: list[int] = []
    ends: list[int] = []
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or not tensor.is_contiguous():
            return False
        begins.append(begin := tensor.data_ptr())
        ends.append(begin + tensor.nbytes)
    begins.sort()
    ends.sort()
    return all(map(le, ends, begins[1:]))


def _of_one_place(name: str, shape: Sequence[int], strides: Sequence[int]) -> Difference:
    return Difference(
        name,
        "structure",
        f"several elements of the target have one address (shape {tuple(shape)}, strides "
        f"{tuple(strides)}, as after expand()), so they cannot hold different values; make it a "
        "tensor with memory of its own by clone()",
    )


def _of_a_copy(name: str, other: str) -> Difference:
    return Difference(
        name,
        "structure",
        f"shares memory with {other} in the target, and is an array that torch cannot share, as "
        "one with a negative stride; give it memory of its own by copy(), or leave one of the two "
        "out with exclude=",
    )


def is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors at one address have the same elements at the same addresses."""
    return (one.dtype, one.shape, one.stride(), one.is_conj(), one.is_neg()) == (
        *(other.dtype, other.shape, other.stride()),
        *(other.is_conj(), other.is_neg()),
    )


def _groups(pairs: Iterable[tuple[LoadItem, LoadItem]]) -> Iterator[tuple[LoadItem, ...]]:
    """Yields the items that pairs connect, in the order of the pairs."""
    group_of: dict[str, list[LoadItem]] = {}
    for pair in pairs:
        one, other = (group_of.setdefault(item.name, [item]) for item in pair)
        if one is not other:
            one += other
            group_of |= dict.fromkeys((item.name for item in other), one)
    distinct = {id(group): tuple(group) for group in group_of.values()}
    yield from distinct.values()


class Placed(NamedTuple):
    """The values for a target, in its dtype and shape, in host memory of their own."""

    name: str
    local: torch.Tensor
    """The target on this rank. Only its address and strides count."""
    values: torch.Tensor


def conflict(group: Sequence[Placed]) -> Difference | None:
    """Returns a difference if two targets of a group get different bytes at one address."""
    group = [item for item in group if item.local.numel()]
    if len(group) < 2:
        return None
    extents = [_extent(item.name, item.local) for item in group]
    lo, hi = min(extent.lo for extent in extents), max(item.hi for item in extents)
    memory, owner = np.zeros(hi - lo, np.uint8), np.zeros(hi - lo, np.int32)
    for number, (name, local, values) in enumerate(group, 1):
        shape = (*local.shape, local.itemsize)
        steps = (*(step * local.itemsize for step in local.stride()), 1)
        at = local.data_ptr() - lo
        view = np.ndarray(shape, np.uint8, memory.data, at, steps)
        owned = np.ndarray(shape, np.int32, owner.data, at * 4, tuple(step * 4 for step in steps))
        bits = np.frombuffer(memory_of(_as_stored(values, local)), np.uint8).reshape(shape)
        differs = (owned > 0) & (view != bits)
        if differs.any():
            return differing(group[int(owned[differs][0]) - 1].name, name, int((owned > 0).sum()))
        view[...] = bits
        owned[...] = number
    return None


def differing(one: str, other: str, nbytes: int) -> Difference:
    """Returns the difference for two targets that share memory and were saved with other values."""
    return Difference(
        other,
        "structure",
        f"shares {nbytes} bytes of memory with {one} in the target, and the checkpoint has "
        "different values for the two; give one of them memory of its own by clone() (untie tied "
        "parameters), or leave one out with exclude=",
    )


def group_bytes(group: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of host memory that the comparison of a group's values takes."""
    extents = [(_extent("", local), local.numel() * local.itemsize) for local in group]
    span = max(extent.hi for extent, _ in extents) - min(extent.lo for extent, _ in extents)
    return 5 * span + sum(7 * nbytes for _, nbytes in extents)


def _as_stored(values: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns the values as the target's memory has them, also behind conjugated views."""
    values = values.conj_physical() if local.is_conj() else values
    return (-values if local.is_neg() else values).contiguous()


def overlaps_itself(extent: Extent) -> bool:
    """Whether elements must share memory: a stride is 0, or the range has too few bytes.

    >>> overlaps_itself(Extent("cpu", 0, 32, "w", 4, (6, 8), (0, 4)))
    True
    """
    if extent.is_dense:
        return False
    elements = int(np.prod(extent.shape, dtype=object))
    stands = any(n > 1 and not step for n, step in zip(extent.shape, extent.strides, strict=True))
    return stands or elements * extent.itemsize > extent.hi - extent.lo


def overlapping(extents: Iterable[Extent]) -> Iterator[tuple[str, str]]:
    """Yields pairs of names that share memory: for each extent, a pair with one before it.

    >>> def dense(lo, hi, name): return Extent("cpu", lo, hi, name, 4, (), ())
    >>> list(overlapping([dense(0, 24, "a"), dense(16, 40, "b"), dense(40, 44, "c")]))
    [('a', 'b')]
    """
    together: list[Extent] = []
    end = ("", 0)
    for extent in sorted(extents, key=lambda bounds: bounds[:3]):
        if (extent.device, extent.lo) >= end:
            yield from _in_cluster(together)
            together = []
        together.append(extent)
        end = max(end, (extent.device, extent.hi))
    yield from _in_cluster(together)


def _in_cluster(extents: list[Extent]) -> Iterator[tuple[str, str]]:
    """Yields the pairs of extents that lie in one range of memory, in ascending order."""
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
    lo, itemsize, device = tensor.data_ptr(), tensor.itemsize, str(tensor.device)
    if tensor.is_contiguous():
        run = itemsize * tensor.numel()
        return Extent(device, lo, lo + run, name, run, (), ())
    steps = [step * itemsize for step in tensor.stride()]
    return _make_extent(name, device, lo, itemsize, zip(steps, tensor.shape, strict=True))


def _extent_of_array(name: str, array: np.ndarray) -> Extent:
    """Returns the extent of an array with elements. Backwards strides have the same addresses."""
    lo = array.ctypes.data
    dims = list(zip(array.strides, array.shape, strict=True))
    lo += sum((n - 1) * step for step, n in dims if step < 0)
    return _make_extent(name, "cpu", lo, array.itemsize, ((abs(step), n) for step, n in dims))


def _make_extent(
    name: str, device: str, lo: int, run: int, steps_and_sizes: Iterable[tuple[int, int]]
) -> Extent:
    """Returns an extent. Elements that lie end to end, in any order, become one."""
    dims = sorted((step, n) for step, n in steps_and_sizes if n > 1)
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    last = sum((n - 1) * step for step, n in dims)
    shape, strides = tuple(n for _, n in dims), tuple(step for step, _ in dims)
    return Extent(device, lo, lo + last + run, name, run, shape, strides)


class Fingerprints(NamedTuple):
    """Hashes of one rank's match. Ranks with equal hashes exchange no names."""

    unexpected: int
    """The hash of the checkpoint's names that this rank's target lacks."""
    idle: int
    """The hash of the patterns that choose no name on this rank."""
    differing: int
    """The hash of the names of all other differences on this rank."""


def fingerprints(matched: Match) -> Fingerprints:
    """Returns the hashes of this rank's match."""
    names = "\n".join(difference.name for difference in matched.differences)
    return Fingerprints(
        _hash("\n".join(matched.unexpected).encode()),
        _hash(_dump(matched.idle)),
        _hash(names.encode(errors="surrogatepass")),
    )


def differences(
    ranks: Ranks, matched: Match, same_unexpected: bool, same_idle: bool
) -> list[Difference]:
    """Returns this rank's differences, the names that no rank's target has, and idle patterns.

    All ranks call this. A flag is true if the ranks have the same hash in `Fingerprints`.
    """
    names = matched.unexpected
    if not same_unexpected:
        here = set(names)
        common = ranks.common(bytes(name in here for name in matched.saved_names))
        names = [name for name, flag in zip(matched.saved_names, common, strict=True) if flag]
    known = [*dict.fromkeys((*matched.saved_names, *matched.own_names))]
    idle = matched.idle if same_idle else _idle_everywhere(ranks, matched.idle, known)
    return [
        *(Difference(claim.role, "pattern", claim.advice(known)) for claim in idle),
        *matched.differences,
        *(
            Difference(name, "unexpected", "is in the checkpoint and not in the target")
            for name in names
        ),
    ]


def _idle_everywhere(ranks: Ranks, idle: Sequence[Claim], known: Sequence[str]) -> list[Claim]:
    """Returns the patterns that choose no name of any rank.

    All ranks call this. A pattern that is idle on one rank may name a part of the model that only
    another rank has.
    """

    def join(records: Sequence[bytes]) -> bytes:
        return _dump([*dict.fromkeys(claim for record in records for claim in _load(record))])

    every = _load(ranks.merge_records("comparing selections", _dump(idle), join))
    flags = ranks.common(bytes(claim.is_idle(known) for claim in every))
    return [claim for claim, flag in zip(every, flags, strict=True) if flag]


def _dump(idle: Sequence[Claim]) -> bytes:
    return json.dumps([(claim.include, claim.exclude) for claim in idle]).encode()


def _load(data: bytes) -> list[Claim]:
    return [Claim(tuple(include), tuple(exclude)) for include, exclude in json.loads(data)]


def _hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) >> (64 - HASH_BITS)


def check_fits(
    url: str,
    found: list[Difference],
    strict: bool,
    warns: bool,
    stacklevel: int = 7,
    call: str = "ckpt.load",
    saved_names: Iterable[str] = (),
    other_names: str | None = None,
    hint: str = "",
) -> None:
    """Raises MismatchError with all differences, except those that `strict=False` skips.

    A warning names the skipped ones if `warns`. `call` is the call to repeat with other arguments.
    If the target has none of `saved_names`, the load is a mistake also without `strict`.
    `other_names` is the origin of the checkpoint's names if they are not its own, and `hint` an
    argument with which fewer would differ.
    """
    fitting = {*saved_names} - {difference.name for difference in found}
    error = partial(
        MismatchError, url, call=call, other_names=other_names, hint=hint, fitting=fitting
    )
    if not strict:
        skipped = [d for d in found if d.problem in NOT_STRICT]
        found = [d for d in found if d not in skipped]
        saved = {*saved_names}
        if saved and saved <= {d.name for d in skipped if d.problem == "unexpected"}:
            raise error(skipped, has_nothing=True)
        if skipped and warns:
            warn(make_skipped_warning(url, skipped), stacklevel=stacklevel)
    if found:
        raise error(found)


def check_preflight_scalars(
    url: str, matched: Match, placed: Iterable[Sequence[Placed]] = ()
) -> None:
    """Raises MismatchError if preflight scalars differ that must be equal. Call it after the reads.

    Each group of `placed` holds the values for memory that targets share. These must be equal too.
    """
    checked = (*(check() for check in matched.checks), *map(conflict, placed))
    found = [difference for difference in checked if difference is not None]
    if found:
        raise MismatchError(url, found)
