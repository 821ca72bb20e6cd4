"""Whether the ranks that have one tensor have the same bytes of it.

Rules:

1. Replicas are what a layout says: a plain tensor's on all ranks that have it, a DTensor's along
   the axes of its mesh that replicate. Each shard has replicas of its own.
2. As long as all agree, it costs one number in an exchange that is made anyway. Of each group of
   replicas a rank adds up `h(position, bytes) - h(next position, bytes)`, where the first position
   comes after the last. Where the bytes are the same on all ranks of a group, the numbers of these
   ranks add up to zero, modulo 2**64; so do those of all ranks, whatever groups there are.
3. Only where they do not, hashes of each tensor are exchanged, once, to find which differ.
4. Bits are compared: a NaN is equal to the same NaN, and 0.0 is not to -0.0.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import xxhash

from ckpt.state.flatten import FlatState, Leaf
from ckpt.state.samples import Bytes, sampled
from ckpt.transfer.write import WriteItem
from formats.native.manifest import StoredTensor
from sharding.agreement.ranks import Ranks
from sharding.layout import Layout

Replicas = Literal["sample", "check"]
"""How replicas are compared: by a few bytes of each tensor, or by all of them."""
WAYS: tuple[Replicas, ...] = ("sample", "check")
SHOWN = 8
"""How many tensors, and ranks of each, a message names."""


@dataclass(frozen=True, slots=True)
class Differing:
    """A tensor whose replicas differ."""

    name: str
    first: int
    """The lowest rank of its mesh: its replica is the one that others are compared with."""
    others: tuple[int, ...]
    """The first ranks with other bytes than that replica has."""
    more: int
    """How many ranks there are besides."""

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.others) + self.more > 1)} " + ", ".join(
            map(str, self.others)
        )
        more = f" and {self.more} more" if self.more else ""
        return f"{self.name} ({ranks}{more})"


def named(found: Sequence[Differing]) -> str:
    """The tensors, as many of them as a message can hold."""
    more = len(found) - SHOWN
    return "; ".join(map(str, found[:SHOWN])) + (f" and {more} more tensors" if more > 0 else "")


class _Place(NamedTuple):
    """Where this rank stands among those that have the same elements of a tensor."""

    group: str
    """The same text on all ranks of a group, and on no other."""
    position: int
    size: int


@dataclass(slots=True)
class ReplicaHashes:
    """What one rank says of its replicas in one save."""

    way: Replicas
    rank: int
    """In the default process group, as layouts have it."""
    _names: list[str] = field(default_factory=list)
    """The tensors of which this rank has a replica."""
    _rows: Bytes = field(default_factory=lambda: sampled([]))
    """For each of them its sample, or the hash of all its bytes."""
    _hashes: dict[str, bytes] = field(default_factory=dict)
    """Those of all bytes, by name: nothing is read twice."""

    def weigh(self, flat: FlatState, tensors: Mapping[str, StoredTensor]) -> int:
        """This rank's number for the bytes of its replicas (rule 2).

        `tensors` are all ranks' in their layouts, in the same order on all of them.
        """
        found: dict[int, list[str] | None] = {}
        """By the id of a layout: the names in its group; None where nothing is to be compared."""
        groups: dict[_Place, list[str]] = {}
        leaves = flat.leaves
        for name, tensor in tensors.items():
            key = id(tensor.layout)
            if key not in found:
                place = _place(tensor.layout, self.rank)
                found[key] = None if place is None else groups.setdefault(place, [])
            names = found[key]
            if names is not None and name in leaves:
                names.append(name)
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
        """The tensors whose replicas differ, the same on every rank (rule 3).

        Called by all ranks, after `weigh` on the same tensors.
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
        answer = ranks.joined("comparing replicas", record, join)
        return [
            Differing(names[at], layouts[at].mesh.lowest, tuple(others), more)
            for at, others, more in json.loads(zlib.decompress(answer))
        ]

    def _read(self, leaves: Sequence[Leaf]) -> Bytes:
        """A row for each of these tensors, equal where their bytes are."""
        if self.way == "sample":
            return sampled([leaf.local for leaf in leaves])
        for leaf in leaves:
            if leaf.name not in self._hashes:
                self._hashes[leaf.name] = _hash_of(leaf)
        data = b"".join(self._hashes[leaf.name] for leaf in leaves)
        return np.frombuffer(data, np.uint8).reshape(len(leaves), 8)


def _hash_of(leaf: Leaf) -> bytes:
    """A hash of all bytes of a tensor."""
    numel = leaf.local.numel()
    hasher = xxhash.xxh3_64()
    for block in WriteItem(leaf, 0, numel, (numel,)).outgoing().blocks():
        hasher.update(block)
    return hasher.digest()


def _place(layout: Layout, rank: int) -> _Place | None:
    """A rank's place among the replicas of what it holds.

    None where it is the only one, or holds nothing: such a tensor may be in no state of its.
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
    """Of each column whose replicas differ: its index, the first ranks that do, how many more.

    `rows` has each rank's hashes; `members` are these ranks' numbers in the layouts.
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
    """The rank that holds what `rank` does, in the replica that the mesh's lowest rank is in."""
    mesh = layout.mesh
    lowest, coordinate = mesh.coordinate(mesh.lowest), mesh.coordinate(rank)
    assert lowest is not None
    assert coordinate is not None
    axes = layout.replica_axes
    return mesh.rank([lowest[a] if a in axes else i for a, i in enumerate(coordinate)])
