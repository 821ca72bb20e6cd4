"""Turns the content of a checkpoint's pickle into named tensors and a tree of values.

Rules:

1. A tensor's name is its key path joined by dots, through dicts, lists and tuples. A tensor without
   a nest has the name `tensor`. Two key paths with one name are an error.
2. Two equal views of one storage are one tensor with two names. Different views of one storage are
   separate tensors that share its bytes.
3. A value without a type in the tree becomes the nearest one: a set becomes a sorted list.
4. A pickle may contain itself, or one part a million times. The depth and size of the walk, and the
   length of the names, are therefore bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from reprlib import Repr

from formats.catalog import StoredPiece, TensorRecord, TensorRef, Tree
from formats.dtypes import DType
from formats.errors import CorruptError, HostileError, UnsupportedError
from formats.limits import DEPTH, FREE_VALUES, Names
from formats.pickle_records import StoredTensor
from formats.zip_records import Archive
from sharding.layout import Box, Piece

KeyPath = tuple[object, ...]
"""The keys and indices from the root to a value."""

BARE_TENSOR = "tensor"
"""The name of a tensor without a nest."""


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 200


def shown(path: KeyPath) -> str:
    """Returns a key path for messages: `['model'][0]`."""
    return "".join(f"[{_SHORT.repr(key)}]" for key in path) or "the whole file"


def chars_of(key: object) -> int:
    """Returns the approximate length of a key as text, without making the text of a tuple."""
    if isinstance(key, tuple):
        return sum(map(chars_of, key)) + 2 * len(key)
    return len(key) if isinstance(key, str) else len(str(key))


class RecordPieces:
    """The one piece of a tensor in a zip. The place of its record is looked up on demand."""

    def __init__(self, archive: Archive, record: str, piece: Piece) -> None:
        self._archive, self._record, self._piece = archive, record, piece

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """Yields the piece if it overlaps `box`."""
        if self._piece.box & box:
            yield from self

    def __iter__(self) -> Iterator[StoredPiece]:
        if self._piece.box:
            yield StoredPiece(self._piece, self._archive.extent(self._record))


class Nest:
    """The tensors found so far, and the bounds of the walk, for all pickles of a checkpoint."""

    def __init__(self, where: str, pickle_bytes: int) -> None:
        self.tensors: dict[str, TensorRecord] = {}
        self.aliases: dict[str, str] = {}
        self._where = where
        self._paths: dict[str, KeyPath] = {}
        self._views: dict[object, str] = {}
        self._values_left = FREE_VALUES + pickle_bytes
        self._names = Names(where, pickle_bytes)

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
                f"{self._where}: the tensors at {shown(self._paths[name])} and {shown(path)} would "
                f"both be named {name!r}; rename a key and save again"
            )
        self._paths[name] = path
        return name

    def place(self, view: object, record: TensorRecord) -> TensorRef:
        """Adds a tensor whose name was claimed. Tensors of an equal `view` become one."""
        stored = self._views.setdefault(view, record.name)
        if stored == record.name:
            self.tensors[record.name] = record
        else:
            self.aliases[record.name] = stored
        return TensorRef(stored)

    def tree(self, value: object, path: KeyPath, archive: Archive) -> Tree:
        """Returns the tree of a pickle of `archive`, and adds its tensors.

        Raises:
            UnsupportedError: a tree cannot hold a value or key, or a name occurs twice.
            CorruptError: a tensor's storage is missing from the zip or has another size.
            HostileError: the nest is too deep or too large.
        """
        return self._tree(value, path, archive, sum(map(chars_of, path)) + len(path))

    def _tree(self, value: object, path: KeyPath, archive: Archive, chars: int) -> Tree:
        self._values_left -= 1
        if len(path) > DEPTH or self._values_left < 0:
            raise HostileError(
                f"{self._where}: {shown(path[:4])} is nested deeper than {DEPTH} or has more "
                "values than its pickle has bytes"
            )
        self._names.values(chars)
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | DType):
            return value
        if isinstance(value, StoredTensor):
            return self._tensor(value, path, archive)
        if isinstance(value, dict):
            return {
                self._key(key, path): self._tree(
                    each, (*path, key), archive, chars + chars_of(key) + 1
                )
                for key, each in value.items()
            }
        if isinstance(value, set):
            for each in value:
                self._names.values(chars_of(each))
            value = sorted(value, key=lambda each: (type(each).__name__, repr(each)))
        if isinstance(value, list | tuple):
            items = [
                self._tree(each, (*path, i), archive, chars + 8) for i, each in enumerate(value)
            ]
            return tuple(items) if isinstance(value, tuple) else items
        raise UnsupportedError(
            f"{self._where}: {shown(path)} is a {type(value).__name__}, which is neither a tensor "
            "nor a plain value; leave it out and save again"
        )

    def _tensor(self, tensor: StoredTensor, path: KeyPath, archive: Archive) -> TensorRef:
        name, record = self.claim(path), f"data/{tensor.storage.key}"
        piece = Piece(Box.whole(tensor.shape), tensor.at, tensor.strides)
        if piece.box and archive.record(record).nbytes != tensor.storage.nbytes:
            raise CorruptError(
                f"{archive.where}: the storage of {name} has {tensor.storage.nbytes} bytes by the "
                f"pickle, {archive.record(record).nbytes} by the zip"
            )
        pieces = RecordPieces(archive, record, piece)
        # The key is text: an attacker can choose the hashes of numbers.
        view = f"{archive.where}\0{tensor}"
        return self.place(view, TensorRecord(name, tensor.shape, tensor.dtype, pieces))

    def _key(
        self, key: object, path: KeyPath
    ) -> str | int | float | bool | tuple[object, ...] | None:
        if key is None or isinstance(key, str | int | float | bool):
            return key
        if isinstance(key, tuple):
            return tuple(self._key(each, path) for each in key)
        raise UnsupportedError(
            f"{self._where}: {shown(path)} has a key of type {type(key).__name__}; use text or "
            "numbers as keys and save again"
        )
