"""Looks up the leaves of a saved state by the names of a target."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard, TypeVar

from ckpt.errors import StateError
from ckpt.state.patterns import Rename, is_plain, matches, renamer
from formats.catalog import Catalog, Key, TensorRef, Tree, join
from formats.native.tree import ROOT

_T = TypeVar("_T")


class Missing:
    """Stands for an entry that a checkpoint lacks."""


MISSING = Missing()


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields each leaf with its name. Empty containers and lists without tensors are leaves."""
    if isinstance(tree, dict) and tree:
        before = f"{path}." if path else ""
        for key, item in tree.items():
            if type(item) is TensorRef:
                yield f"{before}{key}", item  # without a generator of its own
            else:
                yield from leaves(item, f"{before}{key}")
    elif isinstance(tree, list | tuple) and holds_tensor(tree):
        for index, item in enumerate(tree):
            yield from leaves(item, join(path, index))
    else:
        yield path or (ROOT if isinstance(tree, TensorRef) else ""), tree


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


_NESTS = (dict, list, tuple, Mapping)  # the test of an abstract class takes longest


def nodes_in(
    nest: object, is_wanted: Callable[[object], TypeGuard[_T]], path: str = ""
) -> Iterator[tuple[str, _T]]:
    """Yields the outermost wanted nodes of a nest of dicts, lists and tuples, with their names.

    >>> list(nodes_in({"a": [1, {"b": 2}], "c": "d"}, lambda node: isinstance(node, int)))
    [('a.0', 1), ('a.1.b', 2)]
    """
    if is_wanted(nest):
        yield path, nest
    elif isinstance(nest, Mapping):
        for key, item in nest.items():
            if is_wanted(item) or isinstance(item, _NESTS):
                yield from nodes_in(item, is_wanted, join(path, key))
    elif isinstance(nest, list | tuple):
        for index, item in enumerate(nest):
            if is_wanted(item) or isinstance(item, _NESTS):
                yield from nodes_in(item, is_wanted, join(path, index))


def node_at(tree: Tree, path: str) -> Tree | Missing:
    """Returns the node of a nest of dicts with this name.

    >>> node_at({"a.b": {"c": 1}}, "a.b.c")
    1
    """
    if not path:
        return tree
    for key, item in tree.items() if isinstance(tree, dict) else ():
        if path == str(key) or path.startswith(f"{key}."):
            found = node_at(item, path[len(str(key)) + 1 :])
            if not isinstance(found, Missing):
                return found
    return MISSING


def by_name(entries: Iterable[tuple[str, _T]], where: str = "the checkpoint") -> dict[str, _T]:
    """Returns the entries by name. Raises StateError if two entries have one name.

    A file of torch.save may have both an entry `"a.b"` and an entry `"b"` of `"a"`.
    """
    named: dict[str, _T] = {}
    for name, entry in entries:
        if name in named:
            raise StateError(
                f"two entries of {where} get the name {name!r}; give rename= other new names, or "
                "leave one out (exclude=)"
            )
        named[name] = entry
    return named


def holds_tensor(tree: Tree) -> bool:
    if isinstance(tree, dict):
        return any(holds_tensor(item) for item in tree.values())
    if isinstance(tree, list | tuple):
        return any(holds_tensor(item) for item in tree)
    return isinstance(tree, TensorRef)


def kind_of(tree: Tree) -> str:
    """Returns the kind of a tree's top node as text."""
    if isinstance(tree, TensorRef):
        return "a tensor"
    if isinstance(tree, dict):
        return f"a dict of {len(tree)}" + (" with tensors" if holds_tensor(tree) else "")
    if isinstance(tree, list | tuple):
        return f"a {type(tree).__name__} of {len(tree)}"
    return repr(tree)[:80]


def _parameters(tree: Tree, path: str = "") -> Iterator[str]:
    """Yields the names of the state of all parameters of optimizers, even without any state."""
    if not isinstance(tree, dict):
        return
    groups = tree.get("param_groups")
    for group in groups if isinstance(groups, list) else ():
        names = group.get("params") if isinstance(group, dict) else None
        for name in names if isinstance(names, list | tuple) else ():
            yield join(join(path, "state"), name)
    for key, item in tree.items():
        yield from _parameters(item, join(path, key))


class Saved:
    """The state of a checkpoint by the names of a target."""

    def __init__(self, catalog: Catalog, rename: Rename | None = None) -> None:
        self.catalog = catalog
        self.rename = renamer(rename)
        self._keys = list(rename) if isinstance(rename, Mapping) else []
        self._nodes: dict[str, Tree] = {}
        self._shared_names: set[str] = set()
        """The names of several nodes, as of an entry `"a.b"` and an entry `"b"` of `"a"`."""
        self._names: list[str] | None = None
        self._lists: set[str] = set()
        """The leaves that are lists whose items `name_items` has named."""
        self.leaves: dict[str, Tree] = {}
        self.before: dict[str, str] = {}
        """The checkpoint's own names of renamed leaves, by their new names."""
        if rename is None:
            found: list[tuple[str, Tree]] = []
            self._index(catalog.tree, "", found)
            self.leaves = by_name(found)
        else:
            renamed = {name: self.rename(name) for name, _ in leaves(catalog.tree)}
            self.leaves = by_name((self.rename(n), leaf) for n, leaf in leaves(catalog.tree))
            self.before = {new: name for name, new in renamed.items()}
            self._index_renamed(catalog.tree, "", renamed)

    def with_names(self, table: Mapping[str, str]) -> Saved:
        """Returns the same state with further new names, as by `rename=` of a mapping."""
        first, then = self.rename, renamer(table)
        found = Saved(self.catalog, lambda name: then(first(name)))
        found._keys = self._keys
        return found

    @property
    def _sorted(self) -> list[str]:
        """The names of the leaves, sorted on first use: most targets need none."""
        if self._names is None:
            self._names = sorted(self.leaves)
        return self._names

    def _index(self, tree: Tree, path: str, found: list[tuple[str, Tree]] | None) -> None:
        """Notes the nodes of a nest by name, and adds its leaves, as `leaves` names them."""
        if self._nodes.setdefault(path, tree) is not tree:
            self._shared_names.add(path)
        if isinstance(tree, dict) and tree:
            before = f"{path}." if path else ""
            for key, item in tree.items():
                self._index(item, f"{before}{key}", found)
            return
        if isinstance(tree, list | tuple):
            below = found if found is not None and holds_tensor(tree) else None
            if below is not None or any(isinstance(item, dict | list | tuple) for item in tree):
                for index, item in enumerate(tree):  # a target in DCP's form names items of lists
                    self._index(item, join(path, index), below)
            if below is not None:
                return
        if found is not None:
            found.append((path or (ROOT if isinstance(tree, TensorRef) else ""), tree))

    def name_items(self, path: str, items: Sequence[Tree]) -> None:
        """Lets `node` find the items of a list that is a leaf, and `under` the list of an item."""
        self._lists.add(path)
        for index, item in enumerate(items):
            self._index(item, join(path, index), None)

    def _index_renamed(
        self, tree: Tree, path: str, renamed: Mapping[str, str]
    ) -> tuple[str | None, int]:
        """Returns the new name of a nest, None if its leaves were renamed apart, and their number.

        A nest is found by its new name, unless another leaf was renamed to a name below it.
        """
        is_list = isinstance(tree, list | tuple) and holds_tensor(tree)
        items = tree.items() if isinstance(tree, dict) else enumerate(tree) if is_list else ()  # type: ignore[arg-type]
        prefixes: set[str | None] = set()
        count = 0
        for key, item in items:
            name, below = self._index_renamed(item, join(path, key), renamed)
            count += below
            stem = None if name is None else f".{name}".removesuffix(f".{key}")
            prefixes.add(None if stem is None or stem == f".{name}" else stem.removeprefix("."))
        if not count:
            return renamed[path or (ROOT if isinstance(tree, TensorRef) else "")], 1
        [prefix] = prefixes if len(prefixes) == 1 else [None]
        if prefix is not None and len(self.under(prefix)) == count:
            self._nodes.setdefault(prefix, tree)
        return prefix, count

    def idle_keys(self) -> dict[str, list[str]]:
        """Returns the keys of `rename=` that match no name or prefix, with all names they could."""
        keys = [key.rstrip(".") if is_plain(key) else key for key in self._keys]
        if not any(keys):
            return {}
        own = (name for name, _ in leaves(self.catalog.tree))
        names = sorted({*own, *_parameters(self.catalog.tree)})

        def names_some(key: str) -> bool:
            if not is_plain(key):
                return any(matches(key, name) for name in names)
            at = bisect_left(names, f"{key}.")
            below = at < len(names) and names[at].startswith(f"{key}.")
            return not key or below or key in names

        return {key: names for key in keys if not names_some(key)}

    def node(self, path: str) -> Tree | Missing:
        """Returns the saved nest at a name; a flat dict if its leaves were renamed apart.

        Raises StateError for a name of two nests, or of a nest and a value.
        """
        if path in self._shared_names:
            raise StateError(
                f"two entries of the checkpoint have the name {path!r}; give the target "
                "the entries below them, whose names differ"
            )
        if path in self._nodes:
            return self._nodes[path]
        if path in self.leaves:
            return self.leaves[path]
        below = f"{path}." if path else ""
        under: dict[Key, Tree] = {
            name.removeprefix(below): self.leaves[name]
            for name in self.under(path)
            if name.startswith(below)  # no list around the path
        }
        return under if under else MISSING

    def under(self, path: str) -> list[str]:
        """Returns the sorted names of the leaves at or below a name; of an item, its list's."""
        if not path:
            return self._sorted
        below = [path] if path in self.leaves else []
        prefix = path + "."
        names = self._sorted
        at = bisect_left(names, prefix)
        while at < len(names) and names[at].startswith(prefix):
            below.append(names[at])
            at += 1
        return below or self._lists_around(path)

    def _lists_around(self, path: str) -> list[str]:
        """Returns the name of the list that has the item; empty if no list has it."""
        if not self._lists:
            return []
        ends = [at for at, letter in enumerate(path) if letter == "."]
        return [path[:at] for at in ends if path[:at] in self._lists][:1]
