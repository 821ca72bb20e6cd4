"""Merges the nests of several ranks into one.

Rules:

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
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, TypeGuard

from ckpt.errors import StateError
from ckpt.state.saved import holds_tensor, kind_of
from formats.catalog import (
    Key,
    TensorRef,
    Tree,
    TypedValue,
    change_dicts,
    join,
    map_tree,
    module_metadata,
)
from formats.dtypes import DType


def is_node(tree: Tree) -> bool:
    """Whether a tree is a node (rule 1)."""
    if isinstance(tree, list | tuple):
        return any(is_node(item) for item in tree)
    return isinstance(tree, dict | TensorRef)


def versioned(nest: object, versions: Mapping[str, Mapping[str, int]]) -> object:
    """Returns a nest whose state dicts of modules tell torch's `load_state_dict` their versions.

    >>> versioned({"m": {"0.weight": 1}}, {"m": {"0": 2}})["m"]._metadata
    {'': {'version': 1}, '0': {'version': 2}}
    """

    def told(entries: dict[Any, Any], path: str) -> object:
        state = OrderedDict(entries)
        state._metadata = module_metadata(entries, versions[path])  # type: ignore[attr-defined]
        return state

    return change_dicts(nest, versions.keys(), told) if versions else nest


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
    values.append(_marshalled(tree))
    return None


def _marshalled(value: Tree) -> object:
    """Returns a plain value in a form that marshal accepts: dtypes and typed values become text."""
    return map_tree(value, lambda v: (..., str(v)) if isinstance(v, DType | TypedValue) else v)


def without_tensors(tree: Tree) -> Tree:
    """Returns the tree with None in the place of each tensor."""
    without: Tree = map_tree(tree, lambda leaf: None if isinstance(leaf, TensorRef) else leaf)
    return without


def merged_trees(first: Tree, second: Tree, ranks: tuple[int, int], path: str = "") -> Tree:
    """Merges two nests (rules 2 to 4). The first is of the lower rank.

    Raises:
        StateError: a node cannot be merged; the message has the key path and the `ranks`.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        united = dict(first)
        _check_keys(first, second, ranks, path)
        for key, item in second.items():
            if key in united:
                item = merged_trees(united[key], item, ranks, join(path, key))
            united[key] = item
        return united
    if _are_groups(first) and _are_groups(second):
        return _merged_groups(first, second, ranks, path)
    are_tensors = isinstance(first, TensorRef) and isinstance(second, TensorRef)
    if are_tensors or second is None or not (is_node(first) or is_node(second)):
        return first
    if first is None:
        return second
    if type(first) is type(second) and isinstance(first, list | tuple):
        assert isinstance(second, list | tuple)
        items = [
            merged_trees(a, b, ranks, join(path, index))
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
        isinstance(each, list) and all(type(name) is str for name in each) for each in members
    )
    return bool(members) and all(are_names) and not holds_tensor(tree)


def _merged_groups(first: _Groups, second: _Groups, ranks: tuple[int, int], path: str) -> Tree:
    """Merges parameter groups: equal options make one group, and a parameter keeps its first group.

    A group has all options that a rank has for one of its parameters. A group without parameters
    stays, too.
    """
    united = [_options(group) for group in first]
    members = [[*_members(group)] for group in first]
    place = {name: at for at, names in enumerate(members) for name in names}
    given = [_options(group) for group in first]
    for position, group in enumerate(second):
        options, names = _options(group), _members(group)
        new = [name for name in names if name not in place]
        for at in {place[name] for name in names if name in place}:
            union = merged_trees(united[at], options, ranks, join(path, at))
            assert isinstance(union, dict)
            united[at] = union
        if new or not names:
            if options not in given:
                given.append(options)
                united.append(options)
                members.append([])
            # Groups with equal options stay apart if the ranks have them at the same positions.
            is_there = position < len(first) and given[position] == options
            at = position if is_there else given.index(options)
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
