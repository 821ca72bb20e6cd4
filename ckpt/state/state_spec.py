"""States without their bytes: one rank's description, or the merged descriptions of all ranks.

Rules:

1. Each different description is merged once, however many ranks have it.
2. The merge is pure, and equal on all ranks. Its work grows with the number of different
   descriptions, not with the number of ranks.

[Note: nests]
The nests of several ranks become one:

1. A *node* is a dict, a tensor, or a list or tuple that contains a node. Anything else is a plain
   value: a number, or a list of numbers.
2. Dicts are merged by key, parameter groups by their parameters, and lists and tuples by position
   if one of them contains a node.
3. If plain values differ, the value of the lowest rank is stored. `conflicting_values` names the
   values of the others.
4. A node replaces None: one rank alone may keep an average of the weights. Any other pair of a node
   and a plain value is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeGuard

from ckpt.errors import StateError
from ckpt.state.saved import by_name, holds_tensor, kind_of, leaves
from formats.catalog import (
    Key,
    TensorRef,
    Tree,
    TypedValue,
    join,
    map_tree,
)
from formats.dtypes import DType
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
    return StoredTensor(tensor.shape, tensor.dtype, layout)


def merge_specs(summaries: Sequence[tuple[Sequence[int], StateSpec]], world: Mesh) -> StateSpec:
    """Returns the whole state of ranks that hold different parts of it, like pipeline stages.

    `summaries` has each different description with the ranks that gave it, ordered by the lowest of
    these ranks. A plain tensor is a replica on every rank that has its name. DTensors of one name
    on different meshes, as tensor parallelism under data parallelism makes them, are replicas of
    one another. A rank without elements of a tensor may lack the tensor: optimizers keep no state
    for an empty shard. `ckpt.state.state_spec` merges the values. Raises StateError with the ranks
    whose descriptions contradict each other.
    """
    stored: dict[str, list[tuple[Sequence[int], StoredTensor]]] = {}
    aliases: dict[str, str] = {}
    for ranks, described in summaries:
        for name, tensor in described.tensors.items():
            stored.setdefault(name, []).append((ranks, tensor))
        for name, target in described.aliases.items():
            if aliases.setdefault(name, target) != target:
                raise StateError(
                    f"{name}: tied to {aliases[name]} on one rank, to {target} on rank {ranks[0]}; "
                    "tie it alike on all ranks"
                )
    for name in aliases:
        if name in stored:
            raise StateError(
                f"{name}: tied to {aliases[name]} on some ranks only; tie it on all ranks, or on "
                "none"
            )
    tree = _merge_tree([(min(ranks, default=0), described.tree) for ranks, described in summaries])
    uniting = _Uniting(world)
    tensors = {name: uniting.unite(name, entries) for name, entries in stored.items()}
    strides = {name: steps for _, d in reversed(summaries) for name, steps in d.strides.items()}
    versions: dict[str, Mapping[str, int]] = {}
    for _, described in reversed(summaries):
        for path, found in described.versions.items():
            versions[path] = {**versions.get(path, {}), **found}
    return StateSpec(tensors, aliases, tree, strides, _merge_optimizers(summaries), versions)


def _merge_optimizers(
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


def _merge_tree(trees: Sequence[tuple[int, Tree]]) -> Tree:
    """Returns one nest made of the nests of the ranks with these numbers."""
    lowest, whole = trees[0]
    for at, (rank, tree) in enumerate(trees[1:], 1):
        try:
            whole = merge_trees(whole, tree, (lowest, rank))
        except StateError:
            for other, earlier in trees[:at]:  # the error names the first rank that contradicts it
                merge_trees(earlier, tree, (other, rank))
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

    def unite(
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
                    f"{name}: rank {first_ranks[0]} has {_format_tensor(first)}, rank "
                    f"{ranks[0]} has "
                    f"{_format_tensor(tensor)}; give tensors that differ between ranks "
                    "different names"
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
                    f"{_format_ranks(layout)}, of which {sorted(absent)[:8]} do not have it in "
                    "their state; put it into the state on each of its ranks"
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
                f"{name}: sharded over the ranks {_format_ranks(layouts[0])} and over "
                f"{_format_ranks(layouts[1])}, which overlap; give it one mesh or two names"
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
                    f"{name}: sharded over the ranks {_format_ranks(tensor.layout)}, of which "
                    f"{absent[:8]} are not in the process group that saves; pass group= with all "
                    "of them"
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


def _format_ranks(layout: Layout) -> str:
    ranks = list(layout.mesh.ranks())
    return f"{ranks[:8]}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _format_tensor(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} ({tensor.layout})"


def is_node(tree: Tree) -> bool:
    """Whether a tree is a node (rule 1)."""
    if isinstance(tree, list | tuple):
        return any(is_node(item) for item in tree)
    return isinstance(tree, dict | TensorRef)


def outline(tree: Tree, values: list[object]) -> object:
    """Returns the nodes of a tree, and appends its plain values to `values` in order.

    Two trees have equal outlines if they have the same nodes, with the same keys in the same order.
    The names of parameters count as keys of their group: they are merged, not compared.

    >>> found = []
    >>> outline({"w": TensorRef("w"), "step": 3, "ids": [1, 2]}, found), found
    ({'w': Ellipsis, 'step': None, 'ids': None}, [3, [1, 2]])
    """
    if isinstance(tree, dict):
        return {
            key: ... if type(item) is TensorRef else outline(item, values)
            for key, item in tree.items()
        }
    if isinstance(tree, TensorRef):
        return ...
    if isinstance(tree, list | tuple) and is_node(tree):
        items = [outline(item, values) for item in tree]
        if _are_groups(tree):
            items += map(_members, tree)
        return items if isinstance(tree, list) else tuple(items)
    # marshal accepts plain values; dtypes and typed values become text.
    is_text = (DType, TypedValue)
    values.append(map_tree(tree, lambda v: (..., str(v)) if isinstance(v, is_text) else v))
    return None


def without_tensors(tree: Tree) -> Tree:
    """Returns the tree with None in the place of each tensor."""
    without: Tree = map_tree(tree, lambda leaf: None if isinstance(leaf, TensorRef) else leaf)
    return without


def merge_trees(first: Tree, second: Tree, ranks: tuple[int, int], path: str = "") -> Tree:
    """Merges two nests (rules 2 to 4). The first is of the lower rank.

    Raises:
        StateError: a node cannot be merged; the message has the key path and the `ranks`.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        united = dict(first)
        _check_keys(first, second, ranks, path)
        for key, item in second.items():
            if key in united:
                item = merge_trees(united[key], item, ranks, join(path, key))
            united[key] = item
        return united
    if _are_groups(first) and _are_groups(second):
        return _merge_groups(first, second, ranks, path)
    are_tensors = isinstance(first, TensorRef) and isinstance(second, TensorRef)
    if are_tensors or second is None or not (is_node(first) or is_node(second)):
        return first
    if first is None:
        return second
    if type(first) is type(second) and isinstance(first, list | tuple):
        assert isinstance(second, list | tuple)
        items = [
            merge_trees(a, b, ranks, join(path, index))
            for index, (a, b) in enumerate(zip(first, second, strict=False))
        ]
        items += [*first[len(items) :], *second[len(items) :]]
        return items if isinstance(first, list) else tuple(items)
    kinds = [kind_of(tree) if path else type(tree).__name__ for tree in (first, second)]
    raise StateError(
        f"{path or 'the state'}: {kinds[0]} on rank {ranks[0]}, {kinds[1]} on rank {ranks[1]}; "
        "give values that differ between ranks names of their own"
    )


def _check_keys(
    first: Mapping[Key, Tree], second: Mapping[Key, Tree], ranks: tuple[int, int], path: str
) -> None:
    """Raises StateError for keys of different types that are equal in Python, like 1 and True."""
    others = [key for key in second if type(key) is not str]
    own = {key: key for key in first if type(key) is not str} if others else {}
    for key in others:
        if type(own.get(key, key)) is not type(key):
            raise StateError(
                f"{path or 'the state'}: the keys {own[key]!r} on rank {ranks[0]} and {key!r} on "
                f"rank {ranks[1]} are equal in Python; rename one"
            )


_Groups: TypeAlias = list[dict[Key, Tree]]
"""An optimizer's parameter groups, each of which names its parameters under `params`."""


def _are_groups(tree: Tree) -> TypeGuard[_Groups]:
    """Whether a tree is a list of parameter groups without tensors."""
    if not isinstance(tree, list) or not all(isinstance(group, dict) for group in tree):
        return False
    members = [group.get("params") for group in tree if isinstance(group, dict)]
    are_names = (
        isinstance(member, list) and all(type(name) is str for name in member) for member in members
    )
    return bool(members) and all(are_names) and not holds_tensor(tree)


def _merge_groups(first: _Groups, second: _Groups, ranks: tuple[int, int], path: str) -> Tree:
    """Merges parameter groups: equal options make one group, and a parameter keeps its first group.

    A group has all options that a rank has for one of its parameters. A group without parameters
    stays, too.
    """
    united = [_options(group) for group in first]
    members = [[*_members(group)] for group in first]
    place = {name: at for at, names in enumerate(members) for name in names}
    group_options = [_options(group) for group in first]
    for position, group in enumerate(second):
        options, names = _options(group), _members(group)
        new = [name for name in names if name not in place]
        for at in {place[name] for name in names if name in place}:
            union = merge_trees(united[at], options, ranks, join(path, at))
            assert isinstance(union, dict)
            united[at] = union
        if new or not names:
            if options not in group_options:
                group_options.append(options)
                united.append(options)
                members.append([])
            # Groups with equal options stay apart if the ranks have them at the same positions.
            is_there = position < len(first) and group_options[position] == options
            at = position if is_there else group_options.index(options)
            members[at] += new
            place.update(dict.fromkeys(new, at))
    return [{**options, "params": [*names]} for options, names in zip(united, members, strict=True)]


def _members(group: Mapping[Key, Tree]) -> list[str]:
    members = group["params"]
    assert isinstance(members, list)
    return [str(name) for name in members]


def _options(group: Mapping[Key, Tree]) -> dict[Key, Tree]:
    return {key: value for key, value in group.items() if key != "params"}


def conflicting_values(mine: Tree, whole: Tree, path: str = "") -> Iterator[str]:
    """Yields the names of a rank's plain values that differ in the whole nest (rule 3).

    Also yields the names of lists that are longer there, unless they contain tensors.
    """
    if _are_groups(mine) and _are_groups(whole):
        yield from _conflicting_options(mine, whole, path)
    elif isinstance(mine, dict) and isinstance(whole, dict):
        for key, item in mine.items():
            if type(item) is not TensorRef:
                yield from conflicting_values(item, whole[key], join(path, key))
    elif isinstance(mine, list | tuple) and isinstance(whole, list | tuple) and is_node(whole):
        for index, (item, other) in enumerate(zip(mine, whole, strict=False)):
            yield from conflicting_values(item, other, join(path, index))
        if len(mine) < len(whole) and not holds_tensor(whole):
            yield path
    elif is_node(whole):
        if mine is not None and not is_node(mine):
            yield path
    elif not _is_same(mine, whole):
        yield path


def _conflicting_options(mine: _Groups, whole: _Groups, path: str) -> Iterator[str]:
    place = {name: at for at, group in enumerate(whole) for name in _members(group)}
    for index, group in enumerate(mine):
        options = _options(group)
        for at in dict.fromkeys(place[name] for name in _members(group)):
            yield from conflicting_values(options, _options(whole[at]), join(path, index))


def _is_same(one: Tree, other: Tree) -> bool:
    """Whether two plain values are equal, with equal types and equal signs of zeros."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, complex) and isinstance(other, complex):
        return _is_same(one.real, other.real) and _is_same(one.imag, other.imag)
    if isinstance(one, float) and isinstance(other, float):
        signs = math.copysign(1, one) == math.copysign(1, other)
        return (one == other and signs) or (math.isnan(one) and math.isnan(other))
    return str(one) == str(other) if isinstance(one, TypedValue) else one == other
