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
from dataclasses import dataclass, replace

from ckpt.state.saved import holds_tensor
from formats.catalog import Key, TensorRef, Tree, join
from formats.native.tree import ROOT
from sharding.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Named:
    """A leaf or nest with its new name."""

    name: str
    tree: Tree
    key: Key = None
    """The key in the container that the entry stays in, if it does not move."""
    stays: bool = False


def renamed_tree(tree: Tree, leaf: Callable[[str, Tree], Iterable[tuple[str, Tree]]]) -> Tree:
    """Returns a tree with `leaf(name, node)` in the place of each leaf: names with new leaves.

    The leaves are those of `ckpt.state.saved.leaves`. No two new leaves have one name.

    >>> renamed_tree({"m": {"a": 1}, "s": 2}, lambda name, node: [(name.replace("m", "net"), node)])
    {'s': 2, 'net': {'a': 1}}
    >>> renamed_tree({"m": {"a": 1, "b": 2}}, lambda name, node: [(name.replace("a", "c.d"), node)])
    {'m': {'b': 2, 'c.d': 1}}
    """
    entries = _walk(tree, "", leaf)
    if len(entries) == 1 and entries[0].name == "":
        return entries[0].tree
    found: dict[Key, Tree] = {}
    for entry in sorted(entries, key=lambda entry: not entry.stays):
        if entry.stays:
            found[entry.key] = entry.tree
        else:
            _insert(found, entry)
    return found


def _walk(
    node: Tree, path: str, leaf: Callable[[str, Tree], Iterable[tuple[str, Tree]]]
) -> list[Named]:
    items = _items(node)
    if items is None:
        name = path or (ROOT if isinstance(node, TensorRef) else "")
        return [Named(new, tree) for new, tree in leaf(name, node)]
    below = [(key, item, _walk(item, join(path, key), leaf)) for key, item in items]
    prefix = _common_prefix([(key, entries) for key, _, entries in below])
    is_flat = all(_items(item) is None for _, item, _ in below) and not path
    if prefix is not None and (prefix == path or (prefix and not is_flat)):
        children = [(key, entries[0].tree) for key, _, entries in below]
        return [Named(prefix, _like(node, children))]
    return _apart(node, path, [(key, entry) for key, _, entries in below for entry in entries])


def _apart(node: Tree, path: str, entries: list[tuple[Key, Named]]) -> list[Named]:
    """Returns the entries of a container that has changed: its rest, and the loose ones."""
    kept: dict[Key, Tree] = {}
    loose: list[Named] = []
    for key, entry in entries:
        if isinstance(node, dict) and entry.name == join(path, key):
            kept[key] = entry.tree
        else:
            loose.append(entry)
    if path and isinstance(node, dict):
        inside = [entry for entry in loose if entry.name.startswith(f"{path}.")]
        loose = [entry for entry in loose if not entry.name.startswith(f"{path}.")]
        for entry in inside:
            _insert(kept, replace(entry, name=entry.name[len(path) + 1 :]))
    if not path:
        return [*(Named(str(key), tree, key, stays=True) for key, tree in kept.items()), *loose]
    return [*([Named(path, kept)] if kept else []), *loose]


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
        raise ArgumentError(f"{entry.name} would be a leaf and a nest; give it another name")
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
