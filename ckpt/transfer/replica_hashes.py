"""Compares the bytes of replicas: the ranks that hold the same elements of a tensor.

Rules:

1. The layout defines the replicas: all ranks that have a plain tensor, and the ranks along the
   replicated mesh axes of a DTensor. Each shard has its own replicas.
2. If all replicas are equal, the comparison costs one number in an exchange that happens anyway.
   For each group of replicas a rank adds up `h(position, bytes) - h(next position, bytes)`. The
   first position follows the last. If the bytes are equal on all ranks of a group, the sums of
   these ranks add up to zero modulo 2**64, and so do the sums of all ranks over all groups.
3. If they do not, the ranks exchange hashes of each tensor once, and find the tensors that differ.
4. The comparison is of bits: a NaN equals the same NaN, and 0.0 differs from -0.0.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import xxhash

from ckpt.plan.save_plan import keeps_last
from ckpt.state.flatten import FlatState, Leaf
from ckpt.state.memory import Bytes, blocks, take_samples
from formats.native.manifest import StoredTensor
from sharding.agreement.ranks import Ranks
from sharding.layout import Layout

Replicas = Literal["sample", "check"]
"""The bytes that are compared: a few of each tensor, or all."""
WAYS: tuple[Replicas, ...] = ("sample", "check")
SHOWN = 8
"""A message names at most so many tensors, and ranks of each."""


@dataclass(frozen=True, slots=True)
class Differing:
    """A tensor whose replicas differ."""

    name: str
    first: int
    """The lowest rank of the tensor's mesh. Its replica is the reference of the comparison."""
    others: tuple[int, ...]
    """The first ranks whose bytes differ from the reference."""
    more: int
    """The number of further ranks."""

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.others) + self.more > 1)} " + ", ".join(
            map(str, self.others)
        )
        more = f" and {self.more} more" if self.more else ""
        return f"{self.name} ({ranks}{more})"


def format_names(found: Sequence[Differing]) -> str:
    """Returns the first `SHOWN` tensors as text, and how many more there are."""
    more = len(found) - SHOWN
    return "; ".join(map(str, found[:SHOWN])) + (f" and {more} more tensors" if more > 0 else "")


class _Place(NamedTuple):
    """The position of this rank among the replicas of a tensor's elements."""

    group: str
    """A text that the ranks of one group share, and no other rank has."""
    position: int
    size: int


@dataclass(slots=True)
class ReplicaHashes:
    """The hashes of one rank's replicas in one save."""

    way: Replicas
    rank: int
    """The rank in the default process group, as in layouts."""
    _names: list[str] = field(default_factory=list)
    """The names of the tensors of which this rank has a replica."""
    _rows: Bytes = field(init=False)
    """For each of these tensors its sample, or the hash of all its bytes."""
    _hashes: dict[str, bytes] = field(default_factory=dict)
    """The hashes of all bytes, by name. Each tensor is hashed once."""

    def weigh(self, flat: FlatState, tensors: Mapping[str, StoredTensor]) -> int:
        """Returns this rank's sum for the bytes of its replicas (rule 2).

        `tensors` has the tensors of all ranks with their layouts, in one order on all ranks.
        """
        leaves = flat.leaves
        groups = {
            place: [name for name in names if name in leaves]
            for place, names in _last_groups(tensors, self.rank).items()
        }
        self._names = [name for names in groups.values() for name in names]
        self._rows = self._read([leaves[name] for name in self._names])
        total = at = 0
        for (group, position, size), names in groups.items():
            digest = xxhash.xxh3_64_hexdigest(self._rows[at : at + len(names)].tobytes())
            at += len(names)
            for sign, where in ((1, position), (-1, (position + 1) % size)):
                total += sign * xxhash.xxh3_64_intdigest(f"{group} {where} {digest}".encode())
        return total % (1 << 64)

    def differing(self, ranks: Ranks, tensors: Mapping[str, StoredTensor]) -> list[Differing]:
        """Returns the tensors whose replicas differ, the same on all ranks (rule 3).

        Tensors of no model come first, then weights, then the statistics of normalizations, which
        differ in every run of DDP. All ranks call this, after `weigh` on the same tensors.
        Communicates.
        """
        mine = {
            name: xxhash.xxh3_64_intdigest(row.tobytes())
            for name, row in zip(self._names, self._rows, strict=True)
        }
        names = [name for name, tensor in tensors.items() if tensor.layout.replica_axes]
        layouts = [tensors[name].layout for name in names]
        members = [ranks.mesh.rank((rank,)) for rank in range(ranks.world_size)]

        def join(records: Sequence[bytes]) -> bytes:
            rows = np.array([np.frombuffer(record, "<u8") for record in records])
            return zlib.compress(json.dumps(_unlike(rows, layouts, members)).encode(), 1)

        record = np.array([mine.get(name, 0) for name in names], "<u8").tobytes()
        answer = ranks.merge_records("comparing replicas", record, join)
        found = [
            Differing(names[at], layouts[at].mesh.lowest, tuple(others), more)
            for at, others, more in json.loads(zlib.decompress(answer))
        ]
        of_models = (
            name for name in tensors if name.endswith((".weight", ".bias")) or ".state." in name
        )
        nests = {_top(name) for name in of_models}
        return sorted(found, key=lambda replica: _interest(replica.name, nests))

    def _read(self, leaves: Sequence[Leaf]) -> Bytes:
        """Returns a row for each of these tensors: equal bytes have equal rows."""
        if self.way == "sample":
            return take_samples([leaf.local for leaf in leaves])
        for leaf in leaves:
            if leaf.name not in self._hashes:
                self._hashes[leaf.name] = _hash_of(leaf)
        data = b"".join(self._hashes[leaf.name] for leaf in leaves)
        return np.frombuffer(data, np.uint8).reshape(len(leaves), 8)


def _interest(name: str, nests: Collection[str]) -> int:
    """Returns a smaller number for a tensor of more interest.

    `nests` has the top entries of the state that are a model or an optimizer.
    """
    last = name.rpartition(".")[2]
    if last.startswith("running_") or last == "num_batches_tracked":
        return 2
    return int(_top(name) in nests)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _groups(tensors: Mapping[str, StoredTensor], rank: int) -> dict[_Place, list[str]]:
    """The tensors of which a rank has a replica that others have too, by its place among them."""
    found: dict[int, list[str] | None] = {}
    """By the id of a layout: the names in its group; None if the layout has no replicas here."""
    groups: dict[_Place, list[str]] = {}
    for name, tensor in tensors.items():
        key = id(tensor.layout)
        if key not in found:
            place = _place(tensor.layout, rank)
            found[key] = None if place is None else groups.setdefault(place, [])
        names = found[key]
        if names is not None:
            names.append(name)
    return groups


_last_groups = keeps_last(_groups)


def _hash_of(leaf: Leaf) -> bytes:
    hasher = xxhash.xxh3_64()
    for block in blocks(leaf.local, 0, leaf.local.numel(), leaf.dtype):
        hasher.update(block)
    return hasher.digest()


def _place(layout: Layout, rank: int) -> _Place | None:
    """Returns a rank's place among the replicas of its part of a tensor.

    None if no other rank has this part, or if the rank has none: its state may lack such a tensor.
    """
    mesh, axes = layout.mesh, layout.replica_axes
    coordinate = mesh.coordinate(rank) if axes else None
    lo, hi = layout.span(rank) if axes else (0, 0)
    if coordinate is None or lo >= hi:
        return None
    position = 0
    for axis in axes:
        position = position * mesh.sizes[axis] + coordinate[axis]
    shard = [None if axis in axes else index for axis, index in enumerate(coordinate)]
    group = f"{mesh.sizes} {mesh.strides} {mesh.offset} {mesh.table} {shard}"
    return _Place(group, position, prod(mesh.sizes[axis] for axis in axes))


def _unlike(
    rows: np.ndarray, layouts: Sequence[Layout], members: Sequence[int]
) -> list[tuple[int, list[int], int]]:
    """Returns for each column whose replicas differ its index, the first ranks, and how many more.

    `rows` has each rank's hashes. `members` has the ranks of the rows as layouts number them.
    """
    columns: dict[tuple[object, ...], list[int]] = {}
    for at, layout in enumerate(layouts):
        columns.setdefault((layout.mesh, layout.replica_axes), []).append(at)
    row_of = {rank: row for row, rank in enumerate(members)}
    unlike: dict[int, list[int]] = {}
    for indexes in columns.values():
        layout = layouts[indexes[0]]
        for rank in sorted(layout.mesh.ranks()):
            first = _first_replica(layout, rank)
            is_other = rows[row_of[rank], indexes] != rows[row_of[first], indexes]
            for column in np.flatnonzero(is_other):
                unlike.setdefault(indexes[column], []).append(rank)
    return [(at, ranks[:SHOWN], max(0, len(ranks) - SHOWN)) for at, ranks in sorted(unlike.items())]


def _first_replica(layout: Layout, rank: int) -> int:
    """Returns the rank with the same part as `rank` in the replica of the mesh's lowest rank."""
    mesh = layout.mesh
    lowest, coordinate = mesh.coordinate(mesh.lowest), mesh.coordinate(rank)
    assert lowest is not None
    assert coordinate is not None
    axes = layout.replica_axes
    return mesh.rank([lowest[a] if a in axes else i for a, i in enumerate(coordinate)])
