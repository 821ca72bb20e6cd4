"""States without their bytes: one rank's description, or the merged descriptions of all ranks.

Rules:

1. Each different description is merged once, however many ranks have it.
2. The merge is pure, and equal on all ranks. Its work grows with the number of different
   descriptions, not with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpt.errors import StateError
from ckpt.state.nests import merged_trees
from ckpt.state.saved import by_name, leaves
from formats.catalog import Tree, join
from formats.native.manifest import StoredTensor
from sharding.layout import Layout, Mesh, Replicate


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of one rank, or of all ranks together, without its bytes."""

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    tree: Tree
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """As in `FlatState`; each rank may have others, and the lowest rank's count."""
    optimizers: Mapping[str, str | None] = field(default_factory=dict)
    """As in `FlatState`."""
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """As in `FlatState`; the lowest rank's count."""


def with_layout(tensor: StoredTensor, layout: Layout) -> StoredTensor:
    """Returns the same tensor with another layout."""
    return StoredTensor(tensor.shape, tensor.dtype, layout)


def merged(summaries: Sequence[tuple[Sequence[int], StateSpec]], world: Mesh) -> StateSpec:
    """Returns the whole state of ranks that hold different parts of it, like pipeline stages.

    `summaries` has each different description with the ranks that gave it, ordered by the lowest of
    these ranks. A plain tensor is a replica on every rank that has its name. DTensors of one name
    on different meshes, as tensor parallelism under data parallelism makes them, are replicas of
    one another. A rank without elements of a tensor may lack the tensor: optimizers keep no state
    for an empty shard. `ckpt.state.nests` merges the values. Raises StateError with the ranks
    whose descriptions contradict each other.
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
    tree = _merged_tree([(min(ranks, default=0), described.tree) for ranks, described in summaries])
    uniting = _Uniting(world)
    tensors = {name: uniting.united(name, entries) for name, entries in held.items()}
    strides = {name: steps for _, d in reversed(summaries) for name, steps in d.strides.items()}
    versions: dict[str, Mapping[str, int]] = {}
    for _, described in reversed(summaries):
        for path, found in described.versions.items():
            versions[path] = {**versions.get(path, {}), **found}
    return StateSpec(tensors, aliases, tree, strides, _merged_optimizers(summaries), versions)


def _merged_optimizers(
    summaries: Sequence[tuple[Sequence[int], StateSpec]],
) -> dict[str, str | None]:
    """Returns the module of each optimizer's names, without optimizers of different modules.

    Raises StateError if two modules' parameters have one name in such an optimizer.
    """
    modules: dict[str, dict[str | None, int]] = {}
    for ranks, described in summaries:
        for path, module in described.optimizers.items():
            modules.setdefault(path, {}).setdefault(module, min(ranks, default=0))
    for path in (path for path, found in modules.items() if len(found) > 1):
        place: dict[str, tuple[str | None, int]] = {}
        for ranks, described in summaries:
            mine = described.optimizers.get(path), min(ranks, default=0)
            for name in described.tensors if path in described.optimizers else ():
                if not name.startswith(join(path, "state.")):
                    continue
                module, rank = place.setdefault(name, mine)
                if module != mine[0]:
                    raise StateError(
                        f"{name}: of a parameter of {module!r} on rank {rank}, of {mine[0]!r} on "
                        f"rank {mine[1]}; give the optimizers of different modules different keys"
                    )
    return {path: next(iter(found)) for path, found in modules.items() if len(found) == 1}


def _merged_tree(trees: Sequence[tuple[int, Tree]]) -> Tree:
    """Returns one nest made of the nests of the ranks with these numbers."""
    lowest, whole = trees[0]
    for at, (rank, tree) in enumerate(trees[1:], 1):
        try:
            whole = merged_trees(whole, tree, (lowest, rank))
        except StateError:
            for other, earlier in trees[:at]:  # the error names the first rank that contradicts it
                merged_trees(earlier, tree, (other, rank))
            raise
    by_name(leaves(whole), "the ranks' states, seen as one,")
    return whole


class _Uniting:
    """Makes one tensor of the descriptions of its ranks.

    Many tensors have the same ranks and meshes. Results that depend on ranks and meshes alone are
    cached, so that the work for a tensor grows with its descriptions, not with its ranks.
    """

    def __init__(self, world: Mesh) -> None:
        self._world = world
        self._others: dict[tuple[Mesh, tuple[int, ...]], list[int]] = {}
        self._replicas: dict[tuple[int, ...], Mesh] = {}
        self._stacked: dict[tuple[Mesh, ...], Mesh] = {}

    def united(
        self, name: str, entries: Sequence[tuple[Sequence[int], StoredTensor]]
    ) -> StoredTensor:
        """Returns one tensor for all of its ranks; `entries` are the ranks of each description."""
        first_ranks, first = entries[0]
        by_layout: dict[Layout, list[Sequence[int]]] = {}
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
                    f"{_shown(tensor)}; give tensors that differ between ranks different names"
                )
            by_layout.setdefault(layout, []).append(ranks)
        # A DTensor's mesh may also have all ranks and this name: its placements tell them apart.
        if first.layout.mesh == self._world and first.layout.replicas == self._world.size:
            mesh = self._of_replicas([ranks for ranks, _ in entries])
            return with_layout(first, Layout(first.shape, mesh, first.layout.placements))
        for layout, groups in by_layout.items():
            others = self._others_than(layout.mesh, groups)
            absent = [rank for rank in others if _holds_some(layout, rank)]
            if absent:
                raise StateError(
                    f"{name}: rank {groups[0][0]} has it sharded over the ranks "
                    f"{_shown_ranks(layout)}, of which {sorted(absent)[:8]} do not have it in "
                    "their state"
                )
        if len(by_layout) == 1:
            return first
        layouts = sorted(
            by_layout, key=lambda layout: layout.mesh.rank((0,) * len(layout.mesh.sizes))
        )
        try:
            mesh = self._stack(tuple(layout.mesh for layout in layouts))
        except ValueError as error:
            raise StateError(
                f"{name}: sharded over the ranks {_shown_ranks(layouts[0])} and over "
                f"{_shown_ranks(layouts[1])}, which overlap; give it one mesh or two names"
            ) from error
        placements = (Replicate(), *first.layout.placements)
        return with_layout(first, Layout(first.shape, mesh, placements))

    def _of_replicas(self, groups: Sequence[Sequence[int]]) -> Mesh:
        """Returns a mesh of the ranks in these groups, each of which has the whole tensor."""
        key = tuple(map(id, groups))
        if key not in self._replicas:
            ranks = sorted(rank for group in groups for rank in group)
            self._replicas[key] = Mesh.of_ranks(self._world.names, (len(ranks),), ranks)
        return self._replicas[key]

    def _others_than(self, mesh: Mesh, groups: Sequence[Sequence[int]]) -> list[int]:
        """Returns the ranks of a mesh that are in none of these groups."""
        key = (mesh, tuple(map(id, groups)))
        if key not in self._others:
            self._others[key] = list(set(mesh.ranks()).difference(*groups))
        return self._others[key]

    def _stack(self, meshes: tuple[Mesh, ...]) -> Mesh:
        """Returns one mesh of several that are replicas of one another, with one more axis."""
        if meshes not in self._stacked:
            ranks = [rank for mesh in meshes for rank in mesh.ranks()]
            names, sizes = ("replica", *meshes[0].names), (len(meshes), *meshes[0].sizes)
            self._stacked[meshes] = Mesh.of_ranks(names, sizes, ranks)
        return self._stacked[meshes]


def _holds_some(layout: Layout, rank: int) -> bool:
    lo, hi = layout.span(rank)
    return lo < hi


def check_members(tensors: Mapping[str, StoredTensor], world: Mesh) -> None:
    """Raises StateError for a tensor sharded over ranks that take no part in this save."""
    checked: set[int] = set()
    for name, tensor in tensors.items():
        mesh = tensor.layout.mesh
        if id(mesh) not in checked:
            checked.add(id(mesh))
            if _is_within(mesh, world):
                continue
            absent = [r for r in mesh.ranks() if world.coordinate(r) is None]
            if absent:
                raise StateError(
                    f"{name}: sharded over the ranks {_shown_ranks(tensor.layout)}, of which "
                    f"{absent[:8]} are not in the process group that saves"
                )


def _is_within(mesh: Mesh, world: Mesh) -> bool:
    """Whether the corners of two meshes without tables prove that `world` contains `mesh`."""
    if mesh == world:
        return True
    if mesh.table or world.table or set(world.strides) - {0, 1}:
        return False
    steps = [(size - 1) * step for size, step in zip(mesh.sizes, mesh.strides, strict=True)]
    lowest = mesh.offset + sum(step for step in steps if step < 0)
    highest = mesh.offset + sum(step for step in steps if step > 0)
    return world.offset <= lowest and highest < world.offset + world.size


def _shown_ranks(layout: Layout) -> str:
    ranks = list(layout.mesh.ranks())
    return f"{ranks[:8]}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _shown(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} ({tensor.layout})"
