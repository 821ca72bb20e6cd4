"""DCP's rules for nested states: flattening into items, and rebuilding of the nest.

DCP flattens dicts always, lists only if they contain a tensor or a dict, and tuples never
(torch/distributed/checkpoint/_traverse.py). The name of an item is its key path joined by dots.
`planner_data` has the key paths: text is a dict key, an integer is a list index. DCP rebuilds the
nest from these paths alone (_nested_dict.py), so keys become text, and an empty dict is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from formats.catalog import Key, TensorRef, Tree
from formats.errors import FormatError, UnsupportedError
from formats.limits import DEPTH, LIST_HOLES
from formats.pickles.tree import KeyPath, chars_of, format_path

METADATA = ".metadata"
"""The file that makes a folder a DCP checkpoint."""


def flatten(tree: Tree) -> Iterator[tuple[KeyPath, Tree]]:
    """Yields the items of a state with their key paths, by torch's rules.

    Raises UnsupportedError if the state is not a dict, or two keys of a dict have one text.

    >>> list(flatten({"a": {1: None}, "b": [1, 2], "c": [{"d": 3}]}))
    [(('a', '1'), None), (('b',), [1, 2]), (('c', 0, 'd'), 3)]
    """
    if not isinstance(tree, dict):
        raise UnsupportedError(f"a checkpoint of DCP is a dict, not a {type(tree).__name__}")
    yield from _below((), tree)


def lost(tree: Tree, path: str = "") -> Iterator[tuple[str, bool]]:
    """Yields the names of dicts that DCP changes, each with whether the dict is empty.

    DCP loses an empty dict. In any other of these dicts, keys that are numbers become text.

    >>> list(lost({"state": {}, "a": {1: 2}, "b": [{"c": {}}, ({},)]}))
    [('state', True), ('a', False), ('b.0.c', True)]
    """
    if isinstance(tree, dict):
        if path and not tree:
            yield path, True
        elif not all(type(key) is str for key in tree):
            yield path, False
        for key, item in tree.items():
            yield from lost(item, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list) and _is_taken_apart(tree):
        for index, item in enumerate(tree):
            yield from lost(item, f"{path}.{index}")


def _below(path: KeyPath, node: Tree) -> Iterator[tuple[KeyPath, Tree]]:
    if isinstance(node, dict):
        texts: dict[str, Key] = {}
        for key, value in node.items():
            other = texts.setdefault(str(key), key)
            if other is not key:
                raise UnsupportedError(
                    f"{format_path((*path, other))} and {format_path((*path, key))} have "
                    "keys with one text, "
                    "and keys in DCP are text; rename one"
                )
            yield from _below((*path, str(key)), value)
    elif isinstance(node, list) and _is_taken_apart(node):
        for index, value in enumerate(node):
            yield from _below((*path, index), value)
    else:
        yield path, node


def _is_taken_apart(node: Tree) -> bool:
    if isinstance(node, list):
        return any(isinstance(each, TensorRef) or _is_taken_apart(each) for each in node)
    return isinstance(node, dict)  # also an empty one


def key_path(name: str, paths: Mapping[str, object]) -> KeyPath:
    """Returns the key path of an item by `planner_data`; its name alone if that has none."""
    if name not in paths:
        return (name,)
    path = paths[name]
    if not isinstance(path, tuple | list) or not 0 < len(path) <= DEPTH:
        raise FormatError(f"{METADATA}: planner_data has no key path for {name}")
    for key in path:
        if type(key) is not str and (type(key) is not int or key < 0):
            raise FormatError(
                f"{METADATA}: the key path of {name} has a {type(key).__name__} in it"
            )
    if sum(map(chars_of, path)) + len(path) - 1 != len(name) or ".".join(map(str, path)) != name:
        raise FormatError(f"{METADATA}: the key path of {name} is {format_path(tuple(path))}")
    return tuple(path)


def unflatten(leaves: Mapping[KeyPath, Tree]) -> Tree:
    """Returns the nest with these leaves. In key paths, text is a dict key, an integer an index.

    >>> unflatten({("a", "x"): 1, ("a", "y", 0): 2, ("a", "y", 1): 3})
    {'a': {'x': 1, 'y': [2, 3]}}
    """
    root: dict[object, object] = {}
    for path, leaf in leaves.items():
        branch = root
        for key in path[:-1]:
            inner = branch.setdefault(key, _Branch())
            if not isinstance(inner, _Branch):
                raise FormatError(f"{METADATA}: {format_path(path)} lies inside of a value")
            branch = inner
        if path[-1] in branch:
            raise FormatError(
                f"{METADATA}: two values lie at {format_path(path)}, or one in the other"
            )
        branch[path[-1]] = leaf
    if any(type(key) is not str for key in root):
        raise FormatError(f"{METADATA}: the outermost keys are not text")
    holes = 0

    def finish(branch: dict[object, object]) -> dict[object, object] | list[object]:
        nonlocal holes
        items = {
            key: finish(each) if isinstance(each, _Branch) else each for key, each in branch.items()
        }
        indices = [key for key in items if isinstance(key, int)]
        if not indices:
            return items
        holes += max(indices) + 1 - len(items)
        if len(indices) != len(items) or holes > LIST_HOLES:
            raise FormatError(f"{METADATA}: the items {list(items)[:5]} do not form a list")
        return [items.get(index) for index in range(max(indices) + 1)]

    return finish(root)  # type: ignore[return-value]  # leaves are trees, and so is their nest


class _Branch(dict[object, object]):
    """A dict of the nest, as opposed to a leaf that is a dict."""
