"""Who writes what: pure functions from layouts to stored layouts, the same on every rank.

Rules:

1. Each element is stored once. A tensor's stored layout is its layout with `Split` or `Only` in the
   place of every `Replicate`.
2. A replicated tensor of at least `SPLIT_BYTES` a replica is divided evenly among its replicas. The
   smaller ones go to one replica each: those of one kind of layout are laid end to end in the
   state's order, and that line is cut into as many equal parts as there are replicas. So every rank
   writes about as much, and neighbours (a norm's mean and variance) come from one rank.
3. Nothing here communicates or depends on the rank that asks; the work does not grow with the
   number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckpt.errors import StateError
from formats.catalog import Tree
from formats.native.manifest import StoredTensor
from sharding.layout import Layout, Mesh, Only, Placement, Replicate, Split

SPLIT_BYTES = 256 << 10
"""A replicated tensor of this many bytes or more is written by all of its replicas together."""


@dataclass(frozen=True, slots=True)
class Described:
    """A state without its bytes: what one rank, or all ranks together, hold."""

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    tree: Tree


def stored_layouts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Every tensor with the layout it is stored in (rules 1 and 2)."""
    small: dict[tuple[Mesh, tuple[int, ...]], list[str]] = {}
    stored: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        layout = tensor.layout
        axes = tuple(
            axis
            for axis, placement in enumerate(layout.placements)
            if isinstance(placement, Replicate) and layout.mesh.sizes[axis] > 1
        )
        if not axes:
            stored[name] = tensor
        elif _bytes_per_replica(tensor) >= SPLIT_BYTES:
            stored[name] = _placed(tensor, dict.fromkeys(axes, Split()))
        else:
            stored[name] = tensor  # keeps the state's order; replaced below
            small.setdefault((layout.mesh, axes), []).append(name)
    for (mesh, axes), names in small.items():
        sizes = [mesh.sizes[axis] for axis in axes]
        total = sum(_bytes_per_replica(tensors[name]) for name in names)
        before = 0
        for name in names:
            owner = before * prod(sizes) // total if total else 0
            before += _bytes_per_replica(tensors[name])
            chosen: dict[int, Placement] = {}
            for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
                chosen[axis] = Only(owner % size)
                owner //= size
            stored[name] = _placed(tensors[name], chosen)
    return stored


def _bytes_per_replica(tensor: StoredTensor) -> int:
    """Bytes that one replica of a tensor is spread over: all ranks see the same number."""
    return tensor.dtype.nbytes(tensor.shape) * tensor.layout.replicas // tensor.layout.mesh.size


def _placed(tensor: StoredTensor, chosen: Mapping[int, Placement]) -> StoredTensor:
    layout = tensor.layout
    placements = tuple(chosen.get(axis, p) for axis, p in enumerate(layout.placements))
    return _with_layout(tensor, Layout(layout.shape, layout.mesh, placements))


def merged(summaries: Sequence[tuple[Sequence[int], Described]], world: Mesh) -> Described:
    """The whole state of ranks that hold different parts of it, as pipeline stages do.

    `summaries` has, for each different description, the ranks that gave it. A plain tensor is a
    replica on every rank that has its name. DTensors of one name on meshes of their own, which is
    what tensor parallelism under data parallelism makes, are replicas of one another. A rank that
    would hold nothing of a tensor may lack it: optimizers keep no state for an empty shard. Plain
    values are those of the lowest rank that has them. Raises StateError naming the ranks whose
    descriptions contradict each other.
    """
    held: dict[str, list[tuple[Sequence[int], StoredTensor]]] = {}
    aliases: dict[str, str] = {}
    for ranks, described in summaries:
        for name, tensor in described.tensors.items():
            held.setdefault(name, []).append((ranks, tensor))
        for name, target in described.aliases.items():
            if aliases.setdefault(name, target) != target:
                raise StateError(
                    f"{name}: tied to {aliases[name]} on one rank, to {target} on rank {ranks[0]}"
                )
    for name in aliases:
        if name in held:
            raise StateError(f"{name}: tied to {aliases[name]} on some ranks only")
    tree: Tree = summaries[0][1].tree
    for _, described in summaries[1:]:
        tree = merged_trees(tree, described.tree)
    tensors = {name: _united(name, entries, world) for name, entries in held.items()}
    return Described(tensors, aliases, tree)


def _united(
    name: str, entries: Sequence[tuple[Sequence[int], StoredTensor]], world: Mesh
) -> StoredTensor:
    """One tensor as all of its holders have it; `entries` are the ranks of each description."""
    first_ranks, first = entries[0]
    by_layout: dict[Layout, list[int]] = {}
    for ranks, tensor in entries:
        layout, other = tensor.layout, first.layout
        alike = (layout.mesh.names, layout.mesh.sizes, layout.placements) == (
            other.mesh.names,
            other.mesh.sizes,
            other.placements,
        )
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype) or not alike:
            raise StateError(
                f"{name}: rank {first_ranks[0]} has {_shown(first)}, rank {ranks[0]} has "
                f"{_shown(tensor)}; give what differs between ranks a name of its own"
            )
        by_layout.setdefault(layout, []).extend(ranks)
    # A DTensor's mesh may have all ranks and that name as well: then its placements tell.
    if first.layout.mesh == world and first.layout.replicas == world.size:
        mesh = Mesh.of_ranks(world.names, (len(by_layout[first.layout]),), _sorted(by_layout))
        return _with_layout(first, Layout(first.shape, mesh, first.layout.placements))
    for layout, ranks in by_layout.items():
        others = set(layout.mesh.ranks()) - set(ranks)
        absent = [rank for rank in others if _holds_some(layout, rank)]
        if absent:
            raise StateError(
                f"{name}: rank {ranks[0]} has it sharded over the ranks {_shown_ranks(layout)}, of "
                f"which {sorted(absent)[:8]} do not have it in their state"
            )
    if len(by_layout) == 1:
        return first
    layouts = sorted(by_layout, key=lambda layout: layout.mesh.rank((0,) * len(layout.mesh.sizes)))
    try:
        mesh = Mesh.of_ranks(
            ("replica", *first.layout.mesh.names),
            (len(layouts), *first.layout.mesh.sizes),
            [rank for layout in layouts for rank in layout.mesh.ranks()],
        )
    except ValueError as error:
        raise StateError(
            f"{name}: sharded over the ranks {_shown_ranks(layouts[0])} and over "
            f"{_shown_ranks(layouts[1])}, which overlap; give it one mesh or two names"
        ) from error
    return _with_layout(first, Layout(first.shape, mesh, (Replicate(), *first.layout.placements)))


def _holds_some(layout: Layout, rank: int) -> bool:
    lo, hi = layout.span(rank)
    return lo < hi


def check_members(tensors: Mapping[str, StoredTensor], world: Mesh) -> None:
    """Raise StateError for a tensor sharded over ranks that take no part in this save."""
    checked: set[Mesh] = set()
    for name, tensor in tensors.items():
        if tensor.layout.mesh not in checked:
            checked.add(tensor.layout.mesh)
            absent = [r for r in tensor.layout.mesh.ranks() if world.coordinate(r) is None]
            if absent:
                raise StateError(
                    f"{name}: sharded over the ranks {_shown_ranks(tensor.layout)}, of which "
                    f"{absent[:8]} are not in the process group that saves"
                )


def _sorted(by_layout: Mapping[Layout, Sequence[int]]) -> list[int]:
    return sorted(rank for ranks in by_layout.values() for rank in ranks)


def _with_layout(tensor: StoredTensor, layout: Layout) -> StoredTensor:
    return StoredTensor(tensor.shape, tensor.dtype, layout)


def _shown_ranks(layout: Layout) -> str:
    ranks = list(layout.mesh.ranks())
    return f"{ranks[:8]}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def merged_trees(first: Tree, second: Tree) -> Tree:
    """Two nests in one: dicts are united, lists matched by position; elsewhere the first counts."""
    if isinstance(first, dict) and isinstance(second, dict):
        united = dict(first)
        for key, item in second.items():
            united[key] = merged_trees(united[key], item) if key in united else item
        return united
    if type(first) is type(second) and isinstance(first, list | tuple):
        assert isinstance(second, list | tuple)
        items = [merged_trees(a, b) for a, b in zip(first, second, strict=False)]
        items += [*first[len(items) :], *second[len(items) :]]
        return items if isinstance(first, list) else tuple(items)
    return first


def _shown(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} ({tensor.layout})"
