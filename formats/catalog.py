"""What lies where: the one description every format is read into.

A `Catalog` says which tensors a checkpoint holds, which piece of which tensor lies at which bytes
of which file, and what plain values stand around them. The transfer engine sees only catalogs, so
each format is a source for loading, resharding, lazy slices, convert, verify and diff alike.

Rules:

1. Reading a catalog reads no tensor data and runs no code from the checkpoint.
2. The pieces of one tensor do not overlap and together cover it; a reader that finds otherwise
   raises. (`locate` may still find a hole lazily: the planner counts elements.)
3. An extent's bytes, once decoded, are an array of elements of the tensor's dtype; the piece says
   at which elements of it the box lies. Foreign formats may have strides of any kind, also 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from formats.dtypes import DType
from formats.errors import CorruptError
from sharding.layout import Box, Layout, Piece


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of stored bytes with its own checksum, decoded as one."""

    offset: int
    """Where its stored bytes begin in the file."""
    stored_bytes: int
    raw_bytes: int
    """Bytes after decoding; equal to `stored_bytes` when it is stored as it is."""
    digest: bytes
    """xxh3_128 of the stored bytes, big-endian, 16 bytes."""
    compressed: bool


class Chunks(Protocol):
    """The chunks of one extent, in order. All but the last decode to `chunk_bytes`."""

    chunk_bytes: int
    compressed: bool
    """Whether any of them may be compressed."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Chunk: ...

    def wrong(self, first: int, stored: memoryview) -> int | None:
        """Which of the chunks from `first` on, whose stored bytes these are, has another digest.

        The first such, or None where all are what was written.
        """
        ...

    def decode(self, index: int, stored: memoryview, width: int, target: memoryview) -> None:
        """Fill `target`, as long as the chunk is decoded, from the stored bytes of a chunk.

        `width` is the extent's `itemsize`. Raises CorruptError where they are no such chunk.
        """
        ...


class Extent(NamedTuple):
    """A range of one file that decodes to an array of elements.

    Chunks that are stored as they are lie end to end from its offset on.
    """

    file: str
    offset: int
    """First stored byte in the file."""
    nbytes: int
    """Decoded bytes."""
    chunks: Chunks | None = None
    """Checksummed chunks; None where the format has none and the bytes lie there as they are."""
    itemsize: int = 1
    """Element size the byte shuffle of compressed chunks used."""
    crc32: int | None = None
    """The CRC-32 of all its bytes, as they lie there; None where the format has none."""


class StoredPiece(NamedTuple):
    """A box of a tensor and where its elements lie: `piece` counts elements of `extent`."""

    piece: Piece
    extent: Extent


class Pieces(Protocol):
    """Where one tensor's elements lie."""

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """The stored pieces that hold some of `box`, each whole; may read file headers."""
        ...

    def __iter__(self) -> Iterator[StoredPiece]:
        """All stored pieces."""
        ...


class PieceTable:
    """An explicit list of pieces: what formats without symbolic layouts have."""

    def __init__(self, pieces: Sequence[StoredPiece]) -> None:
        # Sorted by the first dimension, so that a box finds its pieces by bisection when the
        # tensor is cut along it, which is how nearly every checkpoint is cut.
        self._pieces = sorted(pieces, key=lambda stored: stored.piece.box.lo)
        self._starts = [stored.piece.box.lo[0] for stored in self._pieces if stored.piece.box.lo]
        self._reach = 0
        for stored in self._pieces:
            if stored.piece.box.lo:
                self._reach = max(self._reach, stored.piece.box.hi[0] - stored.piece.box.lo[0])

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """The pieces that hold some of `box`."""
        first = bisect_left(self._starts, box.lo[0] - self._reach + 1) if self._starts else 0
        for stored in self._pieces[first:]:
            if self._starts and stored.piece.box.lo[0] >= box.hi[0]:
                return
            if stored.piece.box & box:
                yield stored

    def __iter__(self) -> Iterator[StoredPiece]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    pieces: Pieces
    layout: Layout | None = None
    """The placement it was stored with, where the format knows one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, packed."""
        return self.dtype.nbytes(self.shape)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor in the tree of values."""

    name: str
    """The tensor's name in the catalog (of tied names, the one that is stored)."""


@dataclass(frozen=True, slots=True)
class TypedValue:
    """A value of a type that the tree itself lacks, as a set or a path: its kind and its parts."""

    kind: str
    """One of `formats.native.tree.TYPED`."""
    parts: tuple[Tree, ...]
    """What it is made of, without tensors; equal values have equal parts."""

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str_of, self.parts))})"


def map_tree(tree: object, leaf: Callable[[Any], object]) -> Any:
    """The same nest of dicts, lists and tuples, with `leaf` of each other node in its place.

    >>> map_tree({"w": TensorRef("w"), "lr": [1, (2,)]}, str_of)
    {'w': "TensorRef(name='w')", 'lr': ['1', ('2',)]}
    """
    if isinstance(tree, dict):
        return {key: map_tree(item, leaf) for key, item in tree.items()}
    if isinstance(tree, list):
        return [map_tree(item, leaf) for item in tree]
    if isinstance(tree, tuple):
        return tuple(map_tree(item, leaf) for item in tree)
    return leaf(tree)


def join(path: str, key: object) -> str:
    """Returns the name of the entry `key` of the nest at `path`."""
    return f"{path}.{key}" if path else str(key)


def named_leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields the leaves of a tree with their names. Empty containers are leaves.

    >>> list(named_leaves({"step": 3, "lr": [0.1, ()]}))
    [('step', 3), ('lr.0', 0.1), ('lr.1', ())]
    """
    if isinstance(tree, dict | list | tuple) and tree:
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from named_leaves(item, join(path, key))
    else:
        yield path, tree


def str_of(value: Tree) -> str:
    """A plain value of a tree, for people."""
    return str(value) if isinstance(value, DType | TypedValue) else repr(value)


Key = str | int | float | bool | None | tuple[object, ...]
"""A key of a dict in a state."""

Tree = (
    None
    | bool
    | int
    | float
    | complex
    | str
    | bytes
    | TensorRef
    | DType
    | TypedValue
    | list["Tree"]
    | tuple["Tree", ...]
    | dict[Key, "Tree"]
)
"""The nested state as it was saved, a `TensorRef` in the place of every tensor."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint, with what the format lets a reader check about it."""

    name: str
    size: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Catalog:
    """What one checkpoint holds. See the rules at the top of this file."""

    format: str
    """`ckpt`, `safetensors`, `huggingface`, `torch`, `dcp`."""
    tensors: Mapping[str, TensorRecord]
    """By name, in stored order."""
    tree: Tree
    """Values and tensors in their nest; for flat formats a dict from name to tensor."""
    files: tuple[FileRecord, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied names: another name of a tensor -> the name in `tensors`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What the writer said of itself."""
    bases: tuple[str, ...] = ()
    """The folders beside this checkpoint in whose files some of its chunks lie."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each once."""
        return sum(record.nbytes for record in self.tensors.values())


def check_inside(name: str, extent: Extent, size: int) -> None:
    """Raise CorruptError unless an extent stored as it is lies inside its file of `size` bytes."""
    if extent.offset < 0 or extent.nbytes < 0 or extent.offset + extent.nbytes > size:
        raise CorruptError(
            f"{extent.file}: {name} lies at bytes {extent.offset}:{extent.offset + extent.nbytes}, "
            f"the file has {size}: it was truncated; restore it from another copy"
        )
