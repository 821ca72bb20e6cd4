"""Turns the content of a checkpoint's pickle into named tensors and a tree of values.

Rules:

1. A tensor's name is its key path joined by dots, through dicts, lists and tuples. A tensor without
   a nest has the name `tensor`. Two key paths with one name are an error.
2. Two equal views of one storage are one tensor with two names. Different views of one storage are
   separate tensors that share its bytes.
3. A value without a type in the tree becomes the nearest one: a set becomes a sorted list. A numpy
   array is a tensor, and so is a storage.
4. An object of an unknown class is an opaque value, or its parts (`formats.pickles.values`). Also
   opaque are a numpy array that is no tensor, and a dict with a key that is no key of a tree. An
   opaque value has the number of tensors in it that the tree does not show, so that a conversion
   can say that it leaves out weights.
5. A pickle may contain itself, or one part a million times. The depth and size of the walk, and the
   length of the names, are therefore bounded.
6. numpy arrays in a pickle of torch.save are text in an encoding of their bytes, so no range of the
   file has the bytes themselves. The reader of the pickle has decoded them, and `InlineChunks` give
   them to the code that reads tensors, as the chunks of a compressed tensor do. Each chunk reads
   one byte of the file for nothing: ranges of no bytes are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from reprlib import Repr
from typing import Protocol

from formats.catalog import (
    DecodedChunks,
    Extent,
    Key,
    OpaqueValue,
    Pieces,
    PieceTable,
    StoredPiece,
    TensorRecord,
    TensorRef,
    Tree,
    map_tree,
    versions_in,
)
from formats.dtypes import DType
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.limits import DEPTH, FREE_VALUES, Names
from formats.pickles.records import Name, Opaque, Storage, StoredTensor
from formats.pickles.values import TENSOR, Entries, NumpyArray, NumpyDType, parts_of
from sharding.layout import Box, Piece, is_dense

KeyPath = tuple[object, ...]
"""The keys and indices from the root to a value."""

BARE_TENSOR = "tensor"
"""The name of a tensor without a nest."""


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 200


def format_path(path: KeyPath) -> str:
    """Returns a key path for messages: `['model'][0]`."""
    return "".join(f"[{_SHORT.repr(key)}]" for key in path) or "the whole file"


def chars_of(key: object) -> int:
    """Returns the approximate length of a key as text, without making the text of its parts."""
    if isinstance(key, tuple | frozenset):
        return sum(map(chars_of, key)) + 2 * len(key)
    return len(key) if isinstance(key, str) else len(str(key))


class Storages(Protocol):
    """The storages of one pickle, by their keys."""

    where: str
    """The place of the pickle, for messages."""
    file: str
    """The file of the pickle."""

    def nbytes_of(self, key: str) -> int:
        """Returns the bytes of a storage. Raises CorruptError if it is missing."""

    def extent_of(self, key: str) -> Extent:
        """Returns the extent of a storage. May read a header of the file."""


class StoragePieces:
    """The pieces of a tensor in storages, whose places are looked up on demand."""

    def __init__(self, *parts: tuple[Piece, Storages, str]) -> None:
        """Each part is a piece, the storages with its storage, and the key of the storage."""
        self._parts = parts

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        for piece, storages, key in self._parts:
            if piece.box & box:
                yield StoredPiece(piece, storages.extent_of(key))

    def __iter__(self) -> Iterator[StoredPiece]:
        for piece, storages, key in self._parts:
            if piece.box:
                yield StoredPiece(piece, storages.extent_of(key))


class Nest:
    """The tensors found so far, and the bounds of the walk, for all pickles of a checkpoint."""

    def __init__(self, where: str, pickle_bytes: int) -> None:
        self.tensors: dict[str, TensorRecord] = {}
        self.aliases: dict[str, str] = {}
        self.attributes: Mapping[int, object] = {}
        """The attributes of the dicts in the pickle, by their `id`."""
        self.versions: dict[str, Mapping[str, int]] = {}
        """The versions of modules' states, as in `Catalog`."""
        self._where = where
        self._paths: dict[str, KeyPath] = {}
        self._views: dict[object, str] = {}
        self._placed: set[object] = set()
        self._opaque: list[tuple[OpaqueValue, object]] = []
        self._values_left = FREE_VALUES + pickle_bytes
        self._names = Names(where, pickle_bytes)

    def count_name(self, chars: int) -> None:
        """Counts a name of so many characters."""
        self._names.values(chars)

    def grow(self, pickle_bytes: int) -> None:
        """Adds the bytes of another pickle to the bounds."""
        self._values_left += pickle_bytes
        self._names.grow(pickle_bytes)

    def claim(self, path: KeyPath) -> str:
        """Returns the name of the tensor at a key path. Raises UnsupportedError if it is used."""
        self._names.tensor(sum(map(chars_of, path)) + max(0, len(path) - 1))
        name = ".".join(map(str, path)) if path else BARE_TENSOR
        if name in self._paths:
            raise UnsupportedError(
                f"{self._where}: the tensors at {format_path(self._paths[name])} and "
                f"{format_path(path)} would "
                f"both be named {name!r}; rename a key and save again"
            )
        self._paths[name] = path
        return name

    def place(self, view: object, record: TensorRecord, data: object = None) -> TensorRef:
        """Adds a tensor whose name was claimed. Tensors of an equal `view` become one.

        `data` is the identity of its storage or array, of which no opaque value hides a tensor.
        """
        self._placed.add(data)
        stored = self._views.setdefault(view, record.name)
        if stored == record.name:
            self.tensors[record.name] = record
        else:
            self.aliases[record.name] = stored
        return TensorRef(stored)

    def tree(self, value: object, path: KeyPath, storages: Storages) -> Tree:
        """Returns the tree of a pickle, and adds its tensors.

        Raises:
            UnsupportedError: two tensors get one name.
            CorruptError: a tensor's storage is missing or has another size.
            HostileError: the nest is too deep or too large.
        """
        walk = _Walk(self, storages)
        tree = walk.tree(value, path, sum(map(chars_of, path)) + len(path))
        opaque, self._opaque = self._opaque, []
        hidden = {
            id(leaf): self._hidden_in(opaque_value, storages.where) for leaf, opaque_value in opaque
        }
        if not any(hidden.values()):
            return tree

        def with_count(leaf: Tree) -> Tree:
            found = hidden.get(id(leaf), 0)
            return replace(leaf, tensors=found) if isinstance(leaf, OpaqueValue) else leaf

        counted_tree: Tree = map_tree(tree, with_count)
        return counted_tree

    def opaque(self, kind: str, value: object) -> OpaqueValue:
        """Returns the opaque value of an object, whose hidden tensors are counted at the end."""
        found = OpaqueValue(kind)
        self._opaque.append((found, value))
        return found

    def _hidden_in(self, value: object, where: str) -> int:
        """Returns the number of tensors in an object that the tree does not show."""
        seen: set[int] = set()
        hidden: set[object] = set()
        left = [value]
        while left:
            each = left.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            self.count(1)
            if isinstance(each, StoredTensor | Storage):
                hidden.add(_storage_key(where, each))
            elif isinstance(each, NumpyArray):
                hidden |= {id(each)} if each.is_numeric else set()
            elif isinstance(each, Opaque):
                is_tensor = each.type.startswith(TENSOR) and each.state is None
                hidden |= {id(each)} if is_tensor else set()
                left += [each.arguments, each.state, each.items]
            elif isinstance(each, dict):
                left += [*each, *each.values()]
            elif isinstance(each, list | tuple | set | frozenset):
                left += each
        return len(hidden - self._placed)

    def count(self, values: int) -> None:
        """Counts values that are looked at. Raises HostileError if they are too many."""
        self._values_left -= values
        if self._values_left < 0:
            raise HostileError(
                f"{self._where}: it has more values than its pickle has bytes: parts of it repeat"
            )

    def enter(self, path: KeyPath, chars: int) -> None:
        """Counts the value at a key path, whose name has so many characters."""
        if len(path) > DEPTH:
            raise HostileError(
                f"{self._where}: {format_path(path[:4])} is nested deeper than {DEPTH}"
            )
        self.count(1)
        self._names.values(chars)


@dataclass(frozen=True, slots=True)
class _Walk:
    """The walk through one pickle."""

    nest: Nest
    storages: Storages
    open: set[int] = field(default_factory=set)
    """The identities of the objects around the present value: objects may refer to each other."""

    def tree(self, value: object, path: KeyPath, chars: int) -> Tree:
        self.nest.enter(path, chars)
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | DType):
            return value
        if isinstance(value, StoredTensor):
            return self._tensor(value, path)
        if isinstance(value, Opaque):
            return self._object(value, path, chars)
        if isinstance(value, dict):
            self._note_versions(value, path)
            if not all(map(_is_key, value)):
                return self.nest.opaque("dict with keys that are not text or numbers", value)
            return self._dict(value.items(), path, chars)
        if isinstance(value, Entries):
            return self._dict(value.items, path, chars)
        if isinstance(value, set | frozenset):
            for each in value:
                self.nest.count_name(chars_of(each))
            value = sorted(value, key=lambda each: (type(each).__name__, _text(each)))
        if isinstance(value, list | tuple):
            items = [self.tree(each, (*path, i), chars + 8) for i, each in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        return self._other(value, path)

    def _note_versions(self, state: object, path: KeyPath) -> None:
        """Notes the versions of modules in the `_metadata` of a state dict."""
        attributes = self.nest.attributes.get(id(state))
        metadata = attributes.get("_metadata") if isinstance(attributes, dict) else None
        if (versions := versions_in(metadata)) is not None:
            self.nest.versions[".".join(map(str, path))] = versions

    def _other(self, value: object, path: KeyPath) -> Tree:
        """Returns the tree of a value that is neither plain nor a container."""
        if isinstance(value, Storage):
            whole = StoredTensor(value, value.dtype, 0, (value.numel,), (1,))
            return self._tensor(whole, path)
        if isinstance(value, NumpyArray):
            return self._array(value, path)
        if isinstance(value, Name):
            return OpaqueValue(value.full)
        if isinstance(value, NumpyDType):
            return OpaqueValue(f"numpy.dtype {value!r}")
        return OpaqueValue(type(value).__name__)

    def _object(self, value: Opaque, path: KeyPath, chars: int) -> Tree:
        parts = None if id(value) in self.open else parts_of(value, self.nest.count)
        if parts is None:
            return self.nest.opaque(value.type, value)
        self.open.add(id(value))
        try:
            return self.tree(parts, path, chars)
        finally:
            self.open.discard(id(value))

    def _dict(self, items: Iterable[tuple[object, object]], path: KeyPath, chars: int) -> Tree:
        found: dict[Key, Tree] = {}
        self._fill(found, "", items, path, chars)
        return found

    def _fill(
        self,
        found: dict[Key, Tree],
        prefix: str,
        items: Iterable[tuple[object, object]],
        path: KeyPath,
        chars: int,
    ) -> None:
        """Adds the trees of all entries to a dict; keys of merged entries get a prefix."""
        for key, part in items:
            if not _is_key(key) or (prefix and type(key) is not str):
                raise FormatError(
                    f"{self.storages.where}: {format_path(path)} has a key that is no name"
                )
            if isinstance(part, Entries) and part.is_merged:
                if prefix.count(".") > DEPTH:
                    raise HostileError(f"{self.storages.where}: modules nest deeper than {DEPTH}")
                self.nest.enter(path, chars + len(prefix))
                self._fill(found, f"{prefix}{key}.", part.items, path, chars)
                continue
            name = f"{prefix}{key}" if prefix else key
            found[name] = self.tree(part, (*path, name), chars + chars_of(name) + 1)  # type: ignore[index]

    def _array(self, array: NumpyArray, path: KeyPath) -> Tree:
        dtype = array.dtype
        if dtype is None or array.data is None:
            return self.nest.opaque(repr(array), array)
        piece = Piece(Box.whole(array.shape), 0, array.strides)
        extent = inline(self.storages.file, array.data)
        pieces = PieceTable([StoredPiece(piece, extent)] if piece.box else [])
        name = self.nest.claim(path)
        return self.nest.place(array, TensorRecord(name, array.shape, dtype, pieces), id(array))

    def _tensor(self, tensor: StoredTensor, path: KeyPath) -> TensorRef:
        name, storage = self.nest.claim(path), tensor.storage
        piece = Piece(Box.whole(tensor.shape), tensor.at, tensor.strides)
        pieces: Pieces = StoragePieces((piece, self.storages, storage.key))
        # The key is text: an attacker can choose the hashes of numbers.
        view = f"{self.storages.where}\0{tensor}", storage.data
        if storage.data is not None:
            extent = inline(self.storages.file, storage.data)
            pieces = PieceTable([StoredPiece(piece, extent)] if piece.box else [])
        elif piece.box and self.storages.nbytes_of(storage.key) != storage.nbytes:
            raise CorruptError(
                f"{self.storages.where}: the storage of {name} has {storage.nbytes} bytes by the "
                f"pickle, {self.storages.nbytes_of(storage.key)} by the file; restore it from "
                "another copy"
            )
        strides = tensor.strides if is_dense(tensor.shape, tensor.strides) else None
        record = TensorRecord(name, tensor.shape, tensor.dtype, pieces, strides=strides)
        return self.nest.place(view, record, _storage_key(self.storages.where, storage))


def _storage_key(where: str, data: StoredTensor | Storage) -> object:
    """Returns the identity of a storage: of its bytes in the pickle, or of its record."""
    storage = data.storage if isinstance(data, StoredTensor) else data
    return (where, storage.key) if storage.data is None else id(storage.data)


def _text(member: object) -> str:
    """Returns the text of a member of a set, in which a frozenset has an order."""
    if not isinstance(member, tuple | frozenset):
        return repr(member)
    parts = list(map(_text, member))
    if isinstance(member, tuple):
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return f"frozenset({', '.join(sorted(parts))})"


def _is_key(key: object) -> bool:
    """Whether a tree can have a key."""
    if isinstance(key, tuple):
        return all(map(_is_key, key))
    return key is None or isinstance(key, str | int | float)


CHUNK_BYTES = 1 << 20


def inline(file: str, data: bytes) -> Extent:
    """Returns an extent of `file`, from which the bytes come, that decodes to these bytes."""

    def fill(at: int, stored: memoryview, target: memoryview) -> None:
        target[:] = data[at : at + len(target)]

    return Extent(file, 0, len(data), DecodedChunks(0, 1, len(data), CHUNK_BYTES, fill))
