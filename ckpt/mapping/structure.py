"""Finds containers and keys of different kinds in two checkpoints with equal names.

Different nests can give one name: `a.0` names the first entry of a list, the first of a tuple, and
a dict's entry under 0 or under "0". Rules:

1. Two containers are compared if they have the same name: first their kinds, then, for two dicts,
   the keys behind equal names.
2. An empty container is a plain value and is not compared here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from formats.catalog import Key, Tree, join


@dataclass(frozen=True, slots=True)
class Container:
    """A dict, list or tuple that is not empty."""

    kind: str
    keys: Mapping[str, Key] = field(default_factory=dict)
    """A dict's keys, by the names of its entries."""


@dataclass(frozen=True, slots=True)
class StructureDifference:
    """A container, or a key of one, of different kinds; `a` and `b` describe the two."""

    name: str
    a: str
    b: str


def names_of(tree: Tree, path: str = "") -> Iterator[str]:
    """Yields the names that patterns can match: of all leaves, and of lists and tuples.

    >>> list(names_of({"a": {"b": 1}, "c": [2]}))
    ['a.b', 'c', 'c.0']
    """
    if isinstance(tree, dict) and tree:
        for key, item in tree.items():
            yield from names_of(item, join(path, key))
        return
    yield path
    if isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from names_of(item, join(path, index))


def containers(
    tree: Tree, is_selected: Callable[[str], bool], prefix: str = ""
) -> dict[str, Container]:
    """Returns the containers of a tree by name, each with the keys that have a selected name below.

    Only names below a prefix count, and they lose it.

    >>> found = containers({"a": [1, 2], "b": {0: (3,)}}, lambda name: name.startswith("b"))
    >>> [(name, one.kind, dict(one.keys)) for name, one in found.items()]
    [('b.0', 'tuple', {}), ('b', 'dict', {'b.0': 0}), ('', 'dict', {'b': 'b'})]
    >>> list(containers({"a": {"b": [1]}}, lambda name: True, prefix="a."))
    ['b', '']
    """
    found: dict[str, Container] = {}

    def walk(node: Tree, path: str) -> bool:
        """Whether a name at or below a path is selected."""
        if not isinstance(node, dict | list | tuple) or not node:
            return path.startswith(prefix) and is_selected(path.removeprefix(prefix))
        items: Iterable[tuple[Key, Tree]]
        items = node.items() if isinstance(node, dict) else enumerate(node)
        below = [(join(path, key), key, item) for key, item in items]
        keys = {name.removeprefix(prefix): key for name, key, item in below if walk(item, name)}
        if keys and f"{path}.".startswith(prefix):
            is_dict = isinstance(node, dict)
            kind = "dict" if is_dict else "list" if isinstance(node, list) else "tuple"
            name = f"{path}.".removeprefix(prefix)[:-1] if prefix else path
            found[name] = Container(kind, keys if is_dict else {})
        return bool(keys)

    walk(tree, "")
    return found


def compare_structure(
    a: Mapping[str, Container], b: Mapping[str, Container], with_keys: bool
) -> tuple[StructureDifference, ...]:
    """Returns the differences by rule 1, sorted by name. Compares keys of dicts if `with_keys`.

    >>> compare_structure({"a": Container("list")}, {"a": Container("tuple")}, True)
    (StructureDifference(name='a', a='a list', b='a tuple'),)
    """
    found = []
    for name, here in a.items():
        there = b.get(name)
        if there is None:
            continue
        if here.kind != there.kind:
            found.append(StructureDifference(name, f"a {here.kind}", f"a {there.kind}"))
        elif with_keys:
            found += _compare_keys(here.keys, there.keys)
    return tuple(sorted(found, key=lambda one: one.name))


def _compare_keys(a: Mapping[str, Key], b: Mapping[str, Key]) -> list[StructureDifference]:
    """Returns names that two dicts have under different keys, one for each pair of key types."""
    found: dict[tuple[type, type], StructureDifference] = {}
    for name, key in a.items():
        other = b.get(name, key)
        kinds = type(key), type(other)
        if repr(key) != repr(other) and kinds not in found:
            found[kinds] = StructureDifference(name, f"under the key {key!r}", f"under {other!r}")
    return list(found.values())
