"""One catalog out of several: the parts of a folder, each with its place in the tree.

    joined("trainer", [Part(("model",), weights), Part(("optimizer",), optimizer)])

A part is a file of the folder, or a sub-folder that `below` reads. Rules:

1. The name of a tensor is that of its place and its name in the part, joined by a dot.
2. The names of files stay relative to the outer folder.
3. Parts with one place, or one inside another, are merged. Two values at one key are an error.
4. `Catalog.parts` keeps each part as its reader returned it, for `ckpt verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from formats.catalog import (
    Catalog,
    FileRecord,
    Pieces,
    StoredPiece,
    TensorRecord,
    TensorRef,
    Tree,
    iter_leaves,
    join,
    map_tree,
)
from formats.detect import folder_format
from formats.errors import FormatError
from formats.storage import Reader
from sharding.layout import Box


class Part(NamedTuple):
    """A catalog and the keys of its place in the tree; no keys put it at the top."""

    place: tuple[str, ...]
    catalog: Catalog


def join_catalogs(
    format_name: str,
    parts: Iterable[Part],
    files: Iterable[FileRecord] = (),
    metadata: Mapping[str, str] | None = None,
) -> Catalog:
    """Returns the catalog of all parts. `files` are further files of the folder.

    Raises FormatError if two parts have a value at one place.
    """
    tensors: dict[str, TensorRecord] = {}
    aliases: dict[str, str] = {}
    tree: dict[object, object] = {}
    read: dict[str, FileRecord] = {file.name: file for file in files}
    origins: list[tuple[str, Catalog]] = []
    source_of: dict[str, str] = {}
    for place, catalog in parts:
        part = _place(catalog, place)
        # Equal names of different nests ("a.b" and "a", "b") are refused like equal places.
        names = (*part.tensors, *part.aliases)
        if twice := [name for name in names if name in tensors or name in aliases]:
            raise _at_one_place(catalog, twice[0])
        _merge(tree, part.tree, catalog, "")
        tensors.update(part.tensors)
        aliases.update(part.aliases)
        read.update((file.name, file) for file in catalog.files)
        origins += catalog.parts or [("", catalog)]
        source_of.update(catalog.metadata)
    return Catalog(
        format=format_name,
        tensors=tensors,
        tree=tree,  # type: ignore[arg-type]  # of trees
        files=tuple(read.values()),
        aliases=aliases,
        metadata=source_of if metadata is None else metadata,
        parts=tuple(origins),
    )


def below(reader: Reader, folder: str, read: Callable[[Reader], Catalog]) -> Catalog:
    """Returns the catalog that `read` makes of a sub-folder, with names of the outer folder.

    The result reads through a reader of the outer folder. Messages name the sub-folder.
    """
    with within(reader, folder):
        inner = read(Subfolder(reader, folder))
    origins = inner.parts or (("", inner),)
    return replace(
        inner,
        tensors={
            name: record._replace(pieces=_PiecesBelow(reader, folder, record.pieces))
            for name, record in inner.tensors.items()
        },
        files=tuple(replace(file, name=f"{folder}/{file.name}") for file in inner.files),
        parts=tuple((join_folder(folder, deeper), catalog) for deeper, catalog in origins),
    )


def join_folders(
    name: str, reader: Reader, folders: Sequence[str], files: Sequence[FileRecord] = ()
) -> Catalog:
    """Returns the catalog of sub-folders, each at its name. A note names those without weights."""
    kinds = {folder: folder_format(reader.entries(folder)) for folder in folders}
    parts = [
        Part((folder,), below(reader, folder, kind.read))
        for folder, kind in kinds.items()
        if kind is not None
    ]
    rest = [folder for folder, kind in kinds.items() if kind is None]
    notes = [note for part in parts for note in part.catalog.notes]
    notes += [f"without weights, and not part of the checkpoint: {', '.join(rest)}"] if rest else []
    return replace(join_catalogs(name, parts, files, {}), notes=tuple(dict.fromkeys(notes)))


def under(catalog: Catalog, place: str) -> Catalog:
    """Returns the part of a catalog below a place, keys joined by dots, which the names lose.

    A catalog without this place, or with a single value there, is returned unchanged.
    """
    tree: Tree = catalog.tree
    for key in place.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(tree, dict):
        return catalog
    first: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for path, leaf in iter_leaves(tree):
        if isinstance(leaf, TensorRef) and first.setdefault(leaf.name, path) != path:
            aliases[path] = first[leaf.name]

    def rename(leaf: Tree) -> Tree:
        return TensorRef(first[leaf.name]) if isinstance(leaf, TensorRef) else leaf

    tensors = {name: catalog.tensors[stored]._replace(name=name) for stored, name in first.items()}
    return replace(catalog, tensors=tensors, tree=map_tree(tree, rename), aliases=aliases)


def join_folder(folder: str, deeper: str) -> str:
    """Returns the path of a folder in a folder; either may be ""."""
    return "/".join(filter(None, (folder, deeper)))


@contextmanager
def within(reader: Reader, folder: str) -> Iterator[None]:
    """Puts a sub-folder in front of messages that begin with the name of one of its files."""
    try:
        yield
    except FormatError as error:
        text = str(error)
        if not text.startswith((f"{reader.url}/", f"{folder}/")):
            error.args = (f"{folder}/{text}",)
        raise


class Subfolder:
    """A reader of a sub-folder, through the reader of the folder."""

    def __init__(self, reader: Reader, folder: str) -> None:
        self.url = f"{reader.url}/{folder}"
        self.read_bytes = reader.read_bytes
        self._reader = reader
        self._folder = folder
        self.count_reread = getattr(reader, "count_reread", None)

    def names(self) -> list[str]:
        """Returns the files directly in the sub-folder, sorted."""
        return [name for name in self.entries() if not name.endswith("/")]

    def entries(self, folder: str = "") -> list[str]:
        """Returns the files and, with a slash, the folders in the sub-folder or one below it."""
        return self._reader.entries(join_folder(self._folder, folder))

    def size(self, name: str) -> int:
        return self._reader.size(f"{self._folder}/{name}")

    def read_whole(self, name: str, limit: int) -> bytes:
        return self._reader.read_whole(f"{self._folder}/{name}", limit)

    def read_end(self, name: str, size: int, length: int) -> bytes:
        return self._reader.read_end(f"{self._folder}/{name}", size, length)

    def read(self, name: str, offset: int, length: int) -> bytes:
        return self._reader.read(f"{self._folder}/{name}", offset, length)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        self._reader.read_into(f"{self._folder}/{name}", offset, *targets)


class _PiecesBelow:
    """The pieces of a tensor in a sub-folder, with names of files of the outer folder."""

    def __init__(self, reader: Reader, folder: str, pieces: Pieces) -> None:
        self._reader, self._folder, self._pieces = reader, folder, pieces

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        with within(self._reader, self._folder):
            yield from map(self._move, self._pieces.locate(box))

    def __iter__(self) -> Iterator[StoredPiece]:
        with within(self._reader, self._folder):
            yield from map(self._move, self._pieces)

    def _move(self, stored: StoredPiece) -> StoredPiece:
        extent = stored.extent
        return stored._replace(extent=extent._replace(file=f"{self._folder}/{extent.file}"))


def _place(catalog: Catalog, place: tuple[str, ...]) -> Catalog:
    """Returns a catalog with its tree at a place, and the names that follow from it."""
    if not place:
        return catalog
    above = ".".join(place)
    is_bare = isinstance(catalog.tree, TensorRef)

    def rename(name: str) -> str:
        return above if is_bare else join(above, name)

    def move(leaf: Tree) -> Tree:
        return TensorRef(rename(leaf.name)) if isinstance(leaf, TensorRef) else leaf

    tree: Tree = map_tree(catalog.tree, move)
    for key in reversed(place):
        tree = {key: tree}
    return replace(
        catalog,
        tensors={
            rename(name): record._replace(name=rename(name))
            for name, record in catalog.tensors.items()
        },
        tree=tree,
        aliases={rename(alias): rename(name) for alias, name in catalog.aliases.items()},
    )


def _merge(into: dict[object, object], tree: object, catalog: Catalog, path: str) -> None:
    """Adds a tree to a dict. Raises FormatError for a key that both have, unless both are dicts."""
    if not isinstance(tree, dict):
        raise _at_one_place(catalog, path)
    for key, item in tree.items():
        there = into.get(key)
        if key not in into:
            # A dict of the result is never one of a part, because later parts are merged into it.
            into[key] = _copy_tree(item)
        elif isinstance(there, dict):
            _merge(there, item, catalog, join(path, key))
        else:
            raise _at_one_place(catalog, join(path, key))


def _copy_tree(tree: object) -> object:
    return {key: _copy_tree(item) for key, item in tree.items()} if isinstance(tree, dict) else tree


def _at_one_place(catalog: Catalog, name: str) -> FormatError:
    file = catalog.files[0].name if catalog.files else catalog.format
    shown = name or "the top of the checkpoint"
    return FormatError(
        f"{file}: {shown} is in another file of the folder too; open one of the files by its name"
    )
