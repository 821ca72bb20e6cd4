"""The division of a save's writes: from layouts to stored layouts and to a rank's shard file.

`choose_layouts` is the same on every rank; `plan_save` plans the writes of one rank. A `SavePlan`
is printable and holds no memory: a tensor is a number, and the caller has the tensors.

Rules:

1. Each element is stored once. A tensor's stored layout is its layout with `Split` or `Only` in the
   place of every `Replicate`.
2. A replicated tensor of at least `SPLIT_BYTES` a replica is divided evenly among its replicas. A
   smaller one goes to one replica: the small tensors of one kind of layout form a line in the
   state's order, and the line is cut into as many equal parts as there are replicas. All ranks
   thus write about as much, and neighbours (a norm's mean and variance) come from one rank.
3. A tensor whose replicas differ is stored by one replica alone: that of the lowest rank of its
   mesh. The other tensors of its module come from the same replica: no tensor or module is a mix.
4. The functions do not communicate. `choose_layouts` does not depend on the rank, and its work
   does not grow with the number of ranks.

[Note: folders of hosts]
If each host has a folder of its own, other rules hold:

1. A tensor that all ranks hold whole is stored on each host; the host's ranks share the work.
2. A rank's part of a sharded tensor is stored on the rank's host: once, if several ranks of the
   host hold this part.
3. The ranks of a host thus read no other host's file, as long as no rank moves to another host.

[Note: reuse]
A plan has several objects for each tensor, so `keeps_last` keeps one for the next save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import product
from math import prod
from typing import NamedTuple, ParamSpec, TypeVar

from formats.dtypes import DType
from formats.native.manifest import StoredTensor
from sharding.errors import ArgumentError
from sharding.layout import Layout, Mesh, Only, Placement, Replicate, Split

P = ParamSpec("P")
R = TypeVar("R")


def keeps_last(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function with a cache of its last result, for calls with the same arguments.

    Arguments are the same if they are the same objects, or equal integers. Arguments and result are
    kept until the next call: they may hold no tensors, and must not be changed.

    >>> shout = keeps_last(lambda words: [word.upper() for word in words])
    >>> words = ["a", "b"]
    >>> shout(words) is shout(words), shout(words) is shout(["a", "b"])
    (True, False)
    """
    last: list[tuple[tuple[object, ...], R]] = []

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        assert not options
        for arguments, result in last:
            if len(arguments) == len(args) and all(map(_is_same, arguments, args)):
                return result
        fresh = function(*args, **options)
        last[:] = [(args, fresh)]
        return fresh

    return call


def _is_same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) is int and one == other)


SPLIT_BYTES = 256 << 10
"""A replicated tensor of this many bytes or more is written by all of its replicas together."""


class WriteItem(NamedTuple):
    """One rank's write of one tensor: elements `[lo, hi)` of its local array, row-major."""

    name: str
    source: int
    """The number of the tensor among the rank's tensors, in the state's order."""
    dtype: DType
    lo: int
    hi: int
    shape: tuple[int, ...]
    """The shape of the entry in the file: that of the local array, or one dimension for a part."""
    offset: int
    """The first of its bytes among the bytes of all items."""

    @property
    def nbytes(self) -> int:
        return (self.hi - self.lo) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SavePlan:
    """One rank's part in a save: its shard file."""

    items: tuple[WriteItem, ...]
    """The items in the order of the file: by falling element size, so that each is aligned."""

    @property
    def nbytes(self) -> int:
        """Bytes that the rank writes."""
        return self.items[-1].offset + self.items[-1].nbytes if self.items else 0


def plan_save(
    tensors: Mapping[str, StoredTensor], stored: Mapping[str, StoredTensor], rank: int
) -> SavePlan:
    """Returns the writes of `rank`, which holds the tensors `held`, by their stored layouts."""
    spans: dict[tuple[int, int], tuple[int, int, tuple[int, ...]] | None] = {}
    """Spans by the ids of both layouts: most tensors of a model share a few layouts."""
    spans_by_name = []
    for source, (name, tensor) in enumerate(tensors.items()):
        have, layout = tensor.layout, stored[name].layout
        key = (id(have), id(layout))
        if key not in spans:
            spans[key] = _span(have, layout, rank)
        span = spans[key]
        if span is not None:
            spans_by_name.append((name, source, tensor.dtype, *span))
    spans_by_name.sort(key=lambda item: -item[2].itemsize)
    items, at = [], 0
    for name, source, dtype, lo, hi, shape in spans_by_name:
        items.append(WriteItem(name, source, dtype, lo, hi, shape, at))
        at += items[-1].nbytes
    return SavePlan(tuple(items))


def _span(have: Layout, stored: Layout, rank: int) -> tuple[int, int, tuple[int, ...]] | None:
    """The elements of its part that a rank stores, and the entry's shape; None without elements."""
    lo, hi = stored.span(rank)
    if lo >= hi:
        return None
    shape = stored.local_shape(rank)
    if hi - lo != prod(shape):
        first, _ = have.span(rank)  # the rank's part may itself be a range
        lo, hi, shape = lo - first, hi - first, (hi - lo,)
    return lo, hi, shape


def choose_layouts(
    tensors: Mapping[str, StoredTensor], differing: Collection[str] = ()
) -> dict[str, StoredTensor]:
    """Returns every tensor with its stored layout (rules 1 to 3).

    `differing` are the names of tensors whose replicas differ. Tensors that share a description
    object share one in the result too.
    """
    small: dict[tuple[Mesh, tuple[int, ...]], _Line] = {}
    ways: dict[int, _Line | StoredTensor] = {}
    """By the id of a description: the line of its tensors, or its stored form."""
    by_one: dict[int, StoredTensor] = {}
    """By the id of a description: its form when one replica stores it."""
    modules = {_module_of(name) for name in differing}
    stored: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if modules and _module_of(name) in modules:
            if id(tensor) not in by_one:
                by_one[id(tensor)] = _with_placements(tensor, _by_one(tensor.layout))
            stored[name] = by_one[id(tensor)]
            continue
        way = ways.get(id(tensor))
        if way is None:
            way = ways[id(tensor)] = _way(tensor, small)
        if isinstance(way, _Line):
            way.names.append(name)
            way = tensor  # keeps the state's order until the line replaces it
        stored[name] = way
    for line in small.values():
        stored |= line.divide(tensors)
    return stored


def _way(
    tensor: StoredTensor, small: dict[tuple[Mesh, tuple[int, ...]], _Line]
) -> _Line | StoredTensor:
    """The stored form of a tensor, or the line of small tensors that it joins."""
    layout = tensor.layout
    axes = layout.replica_axes
    if not axes:
        return tensor
    if _bytes_per_replica(tensor) >= SPLIT_BYTES:
        return _with_placements(tensor, dict.fromkeys(axes, Split()))
    return small.setdefault((layout.mesh, axes), _Line(axes, [layout.mesh.sizes[i] for i in axes]))


def _module_of(name: str) -> str:
    """The name of the module, or of another nest, that has the tensor as an entry."""
    return name.rpartition(".")[0]


def _by_one(layout: Layout) -> dict[int, Placement]:
    """The placements by which one replica alone stores a tensor (rule 3)."""
    where = layout.mesh.coordinate(layout.mesh.lowest)
    assert where is not None
    return {axis: Only(where[axis]) for axis in layout.replica_axes}


@dataclass(frozen=True, slots=True)
class _Line:
    """Small tensors, replicated over the same axes of one mesh, end to end (rule 2)."""

    axes: Sequence[int]
    sizes: Sequence[int]
    names: list[str] = field(default_factory=list)

    def divide(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Returns each tensor with the one replica that stores it."""
        nbytes: dict[int, int] = {}
        for name in self.names:
            if id(tensors[name]) not in nbytes:
                nbytes[id(tensors[name])] = _bytes_per_replica(tensors[name])
        total = sum(nbytes[id(tensors[name])] for name in self.names)
        replicas, before = prod(self.sizes), 0
        made: dict[tuple[int, int], StoredTensor] = {}
        stored: dict[str, StoredTensor] = {}
        for name in self.names:
            tensor = tensors[name]
            owner = before * replicas // total if total else 0
            before += nbytes[id(tensor)]
            if (id(tensor), owner) not in made:
                made[id(tensor), owner] = _with_placements(tensor, self._only(owner))
            stored[name] = made[id(tensor), owner]
        return stored

    def _only(self, owner: int) -> dict[int, Placement]:
        """The placements by which replica number `owner` alone stores a tensor."""
        chosen: dict[int, Placement] = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            chosen[axis] = Only(owner % size)
            owner //= size
        return chosen


def _bytes_per_replica(tensor: StoredTensor) -> int:
    """The bytes that one replica of a tensor keeps on a rank: equal on all ranks."""
    return tensor.dtype.nbytes(tensor.shape) * tensor.layout.replicas // tensor.layout.mesh.size


def _with_placements(tensor: StoredTensor, chosen: Mapping[int, Placement]) -> StoredTensor:
    layout = tensor.layout
    placements = tuple(chosen.get(axis, p) for axis, p in enumerate(layout.placements))
    stored = Layout(layout.shape, layout.mesh, placements)
    return StoredTensor(tensor.shape, tensor.dtype, stored)


def host_layouts(
    tensors: Mapping[str, StoredTensor], host: Collection[int]
) -> dict[str, StoredTensor]:
    """Returns every tensor as the ranks of one host hold it; `choose_layouts` divides the result.

    Raises ArgumentError if no layout describes the part of this host alone.
    """
    ranks = frozenset(host)
    made: dict[int, StoredTensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in made:
            made[id(tensor)] = tensor
            if tensor.layout.replica_axes:
                layout = _on_host(name, tensor.layout, ranks)
                made[id(tensor)] = StoredTensor(tensor.shape, tensor.dtype, layout)
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


def _on_host(name: str, layout: Layout, host: frozenset[int]) -> Layout:
    """The layout with its replicas on this host alone; unchanged if this host has no part."""
    mesh, axes = layout.mesh, layout.replica_axes
    found = {rank: mesh.coordinate(rank) for rank in host}
    here = {rank: where for rank, where in found.items() if where is not None}
    if here and all(isinstance(placement, Replicate) for placement in layout.placements):
        alone = Mesh.of_ranks(("host",), (len(here),), sorted(here))
        return Layout(layout.shape, alone, (Replicate(),))
    lowest = {axis: min((where[axis] for where in here.values()), default=0) for axis in axes}
    chosen: dict[int, Placement] = {axis: Only(index) for axis, index in lowest.items()}
    for axis in axes:  # the replicas along an axis share the work if they are all on this host
        every = product(here.values(), range(mesh.sizes[axis]))
        if here and all(mesh.rank(_at(where, {axis: i})) in host for where, i in every):
            del chosen[axis]
    kept = {axis: lowest[axis] for axis in chosen}
    if any(mesh.rank(_at(where, kept)) not in host for where in here.values()):
        raise ArgumentError(
            f"{name}: its replicas over the ranks {sorted(mesh.ranks())[:8]} lie so that this "
            f"host's ranks {sorted(host)[:8]} cannot store their parts alone; give the mesh an "
            "axis along which whole hosts are replicas, or leave out local="
        )
    placements = tuple(chosen.get(axis, own) for axis, own in enumerate(layout.placements))
    return Layout(layout.shape, mesh, placements)


def _at(where: tuple[int, ...], index: Mapping[int, int]) -> list[int]:
    """Returns the coordinate with other indexes along these axes."""
    return [index.get(axis, at) for axis, at in enumerate(where)]
