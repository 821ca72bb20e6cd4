"""Puts renamed leaves into a state's nest.

Rules:

1. A nest whose leaves all change in the same prefix moves as a whole, with its containers.
2. Other leaves leave their containers. A leaf lies in the deepest dict whose name is a dotted
   prefix of its new name, under the rest of the name as one key.
3. A dict of tensors alone stays one: its entries get new keys, also if all get one prefix.
4. Items of a list or tuple that move apart become entries of a dict. Empty containers vanish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckpt.state.patterns import prefix_in
from ckpt.state.saved import holds_tensor
from formats.catalog import Key, TensorRef, Tree, join
from formats.native.tree import ROOT
from sharding.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Named:
    """A leaf or nest with its new name, and its key in a dict that it lies in."""

    name: str
    tree: Tree
    key: Key


def renamed_tree(tree: Tree, leaf: Callable[[str, Tree], Iterable[tuple[str, Tree]]]) -> Tree:
    """Returns a tree with `leaf(name, node)` in the place of each leaf: names with new leaves.

    The leaves are those of `ckpt.state.saved.leaves`. No two new leaves have one name.

    >>> renamed_tree({"m": {"a": 1}, "s": 2}, lambda name, node: [(name.replace("m", "net"), node)])
    {'net': {'a': 1}, 's': 2}
    >>> renamed_tree({"m": {"a": 1, "b": 2}}, lambda name, node: [(name.replace("a", "c.d"), node)])
    {'m': {'c.d': 1, 'b': 2}}
    """
    entries = _walk(tree, "", leaf)
    whole = len(entries) == 1 and entries[0].name == ""
    return entries[0].tree if whole else _dict_of(entries)


def _walk(
    node: Tree, path: str, leaf: Callable[[str, Tree], Iterable[tuple[str, Tree]]]
) -> list[Named]:
    items = _items(node)
    if items is None:
        name = path or (ROOT if isinstance(node, TensorRef) else "")
        return [Named(new, tree, new) for new, tree in leaf(name, node)]
    below = [(key, item, _walk(item, join(path, key), leaf)) for key, item in items]
    prefix = _common_prefix([(key, entries) for key, _, entries in below])
    is_flat = all(_items(item) is None for _, item, _ in below) and not path
    if prefix is not None and (prefix == path or (prefix and not is_flat)):
        children = [(key, entries[0].tree) for key, _, entries in below]
        return [Named(prefix, _like(node, children), prefix)]
    return _apart(node, path, [(key, entry) for key, _, entries in below for entry in entries])


def _apart(node: Tree, path: str, entries: list[tuple[Key, Named]]) -> list[Named]:
    """Returns the entries of a container that has changed: its rest, and those that leave it."""
    if not isinstance(node, dict):
        return [entry for _, entry in entries]
    start = len(path) + 1 if path else 0
    inside: list[Named] = []
    outside: list[Named] = []
    for key, entry in entries:
        if path and not entry.name.startswith(f"{path}."):
            outside.append(entry)
            continue
        name = entry.name[start:]
        inside.append(Named(name, entry.tree, key if name == str(key) else name))
    return [*([Named(path, _dict_of(inside), path)] if inside or not path else []), *outside]


def _dict_of(entries: list[Named]) -> dict[Key, Tree]:
    """Returns the entries as a dict, in their order; those below another one are put into it."""
    nests = {entry.name for entry in entries if isinstance(entry.tree, dict) and entry.tree}
    found: dict[Key, Tree] = {}
    below: list[Named] = []
    for entry in entries:
        if prefix_in(nests, entry.name.rpartition(".")[0]):
            below.append(entry)
        elif entry.key in found:
            raise _is_nest(entry.name)
        else:
            found[entry.key] = entry.tree
    for entry in below:
        _insert(found, entry)
    return found


def _is_nest(name: str) -> ArgumentError:
    return ArgumentError(f"{name} would be a leaf and a nest; give it another name")


def _common_prefix(below: list[tuple[Key, list[Named]]]) -> str | None:
    """Returns the name of a container whose entries keep their keys; None if they move apart."""
    found: set[str | None] = set()
    for key, entries in below:
        name = f".{entries[0].name}" if len(entries) == 1 else ""
        found.add(name.removesuffix(f".{key}")[1:] if name.endswith(f".{key}") else None)
    return found.pop() if len(found) == 1 else None


def _insert(tree: dict[Key, Tree], entry: Named) -> None:
    """Puts an entry into the deepest dict whose name is a prefix of its own (rule 2)."""
    rest = entry.name
    while (cut := _dict_above(tree, rest)) is not None:
        below = tree[rest[:cut]]
        assert isinstance(below, dict)
        tree, rest = below, rest[cut + 1 :]
    if rest in tree:
        raise _is_nest(entry.name)
    tree[rest] = entry.tree


def _dict_above(tree: dict[Key, Tree], name: str) -> int | None:
    """Returns the end of the longest prefix of a name that is a dict in the tree."""
    cut = name.rfind(".")
    while cut >= 0:
        below = tree.get(name[:cut])
        if isinstance(below, dict) and below:
            return cut
        cut = name.rfind(".", 0, cut)
    return None


def _items(node: Tree) -> list[tuple[Key, Tree]] | None:
    """Returns the entries of a container; None for a leaf."""
    if isinstance(node, dict) and node:
        return list(node.items())
    if isinstance(node, list | tuple) and holds_tensor(node):
        return list(enumerate(node))
    return None


def _like(node: Tree, items: list[tuple[Key, Tree]]) -> Tree:
    """Returns a container of the kind of a node."""
    if isinstance(node, dict):
        return dict(items)
    values = [tree for _, tree in items]
    return values if isinstance(node, list) else tuple(values)
