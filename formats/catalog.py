"""The catalog: the one description of a checkpoint that all formats read, and of one to write.

A `Catalog` has the tensors of a checkpoint, the bytes of each of their pieces, and the plain values
around them. The transfer engine sees only catalogs, so a load, a reshard, a lazy slice, convert,
verify and diff work with every format. Rules:

1. Reading a catalog reads no tensor data and runs no code from the checkpoint.
2. The pieces of a tensor cover it without overlaps. A reader raises an error otherwise. (`locate`
   may still find a hole later: the planner counts elements.)
3. The decoded bytes of an extent are an array of elements of the tensor's dtype. The piece has the
   places of the box in this array. Other formats may have strides of any kind, also 0.
4. A format with explicit tables of boxes checks that they tile their tensor before it trusts them:
   each lies inside, no two overlap, no element is left out. Straight cuts separate the boxes that
   sharding makes, so overlaps are found in O(n log n).

A format's writer takes `Outgoing`: names, shapes and a stream of bytes for each tensor, in blocks,
so no whole tensor is in memory. It gives a `FilePlan`: the bytes of a file as a value, literal
bytes, tensors, and bytes that checksums decide. Rules:

5. Sizes are known before the first byte, so headers can go first, and whoever writes the files
   (`ckpt.transfer.copy_files`) may begin at any byte, with several threads or ranks.
6. A format has one kind of checksum, whose records of a tensor stand end to end: the CRC-32 of the
   tensor as 4 bytes, or, for a file with `chunk_bytes`, the record of each of its chunks
   (`formats.native.shard`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import Any, NamedTuple, Protocol

from formats.dtypes import DType
from formats.errors import CorruptError, FormatError, HostileError
from formats.limits import CUTS, TANGLED
from sharding.layout import Box, Layout, Piece


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of stored bytes with its own checksum, decoded as a whole."""

    offset: int
    """The first stored byte in the file."""
    stored_bytes: int
    raw_bytes: int
    """Bytes after decoding; equal to `stored_bytes` if the chunk is not compressed."""
    digest: bytes
    """xxh3_128 of the stored bytes, big-endian, 16 bytes."""
    compressed: bool


class Chunks(Protocol):
    """The chunks of one extent, in order. All but the last decode to `chunk_bytes`."""

    chunk_bytes: int
    compressed: bool
    """Whether any chunk may be compressed."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Chunk: ...

    def wrong(self, first: int, stored: memoryview) -> int | None:
        """Compares stored bytes of the chunks from `first` on with their digests.

        Returns the index of the first chunk with another digest; None if all digests are equal.
        """

    def decode(self, index: int, stored: memoryview, width: int, target: memoryview) -> None:
        """Decodes the stored bytes of a chunk into `target`, which has the decoded length.

        `width` is the extent's `itemsize`. Raises CorruptError for bytes that cannot be decoded.
        """


@dataclass(slots=True, eq=False)
class DecodedChunks:
    """Chunks without checksums, whose bytes a function makes, perhaps of the stored ones."""

    offset: int
    stored_bytes: int
    """The stored bytes of each chunk, end to end from the offset on."""
    nbytes: int
    """The decoded bytes of all chunks."""
    chunk_bytes: int
    fill: Callable[[int, memoryview, memoryview], None]
    """Fills memory with the decoded bytes from a place on, of the chunk with these stored bytes."""
    compressed: bool = True

    def __len__(self) -> int:
        return -(-self.nbytes // self.chunk_bytes)

    def __getitem__(self, index: int) -> Chunk:
        offset, done = self.offset + index * self.stored_bytes, index * self.chunk_bytes
        raw_bytes = min(self.chunk_bytes, self.nbytes - done)
        return Chunk(offset, self.stored_bytes, raw_bytes, b"", compressed=True)

    def wrong(self, first: int, stored: memoryview) -> None:
        """Returns None: there is no checksum."""

    def decode(self, index: int, stored: memoryview, width: int, target: memoryview) -> None:
        """Fills `target` with the decoded bytes of a chunk. Raises as `fill` does."""
        self.fill(index * self.chunk_bytes, stored, target)


class Extent(NamedTuple):
    """A range of one file that decodes to an array of elements.

    Uncompressed chunks lie end to end from its offset on.
    """

    file: str
    offset: int
    """The first stored byte in the file."""
    nbytes: int
    """Decoded bytes."""
    chunks: Chunks | None = None
    """Chunks with checksums; None if the format has none. The bytes are then stored unchanged."""
    itemsize: int = 1
    """The element size for the byte shuffle of compressed chunks."""
    crc32: int | None = None
    """The CRC-32 of all stored bytes; None if the format has none."""


class StoredPiece(NamedTuple):
    """A box of a tensor with the places of its elements: `piece` counts elements of `extent`."""

    piece: Piece
    extent: Extent


class Pieces(Protocol):
    """The stored pieces of one tensor."""

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """Yields the stored pieces that overlap `box`, each whole. May read file headers."""

    def __iter__(self) -> Iterator[StoredPiece]:
        """Yields all stored pieces."""


class PieceTable:
    """An explicit list of pieces, for formats without symbolic layouts."""

    def __init__(self, pieces: Sequence[StoredPiece]) -> None:
        # Sorted by the first dimension: nearly every checkpoint is cut along it, so that bisection
        # finds the pieces of a box.
        self._pieces = sorted(pieces, key=lambda stored: stored.piece.box.lo)
        self._starts = [stored.piece.box.lo[0] for stored in self._pieces if stored.piece.box.lo]
        self._reach = 0
        for stored in self._pieces:
            if stored.piece.box.lo:
                self._reach = max(self._reach, stored.piece.box.hi[0] - stored.piece.box.lo[0])

    def locate(self, box: Box) -> Iterator[StoredPiece]:
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


class TensorRecord(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    pieces: Pieces
    layout: Layout | None = None
    """The layout with which the tensor was stored, if the format has layouts."""
    strides: tuple[int, ...] | None = None
    """The strides that the tensor had in memory, without gaps; None if they are unknown."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, packed."""
        return self.dtype.itemsize * prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The reference to a tensor in the tree of values."""

    name: str
    """The tensor's name in the catalog; for tied names, the stored one."""


@dataclass(frozen=True, slots=True)
class TypedValue:
    """A value of a type that JSON lacks, such as a set or a path, as its kind and its parts."""

    kind: str
    """One of `formats.native.tree.TYPED`."""
    parts: tuple[Tree, ...]
    """The parts of the value, without tensors. Equal values have equal parts."""

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str_of, self.parts))})"


@dataclass(frozen=True, slots=True)
class OpaqueValue:
    """An object that a reader shows and never makes, such as an `argparse.Namespace`.

    A conversion leaves it out by its name, and a load that asks for it is refused.
    """

    type: str
    """The name of its class with the module, or another description."""
    tensors: int = field(default=0, compare=False)
    """The number of tensors of the file that it holds and no other value of the tree shows."""

    def __repr__(self) -> str:
        return f"<{self.type}>"


def module_metadata(
    keys: Iterable[object], versions: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Returns the `_metadata` that torch's `state_dict()` has for these keys and versions.

    >>> module_metadata(["0.weight"], {"0": 2})
    {'': {'version': 1}, '0': {'version': 2}}
    """
    paths = {""}
    for key in keys:
        path = str(key).rpartition(".")[0]
        while path not in paths:
            paths.add(path)
            path = path.rpartition(".")[0]
    return {path: {"version": versions.get(path, 1)} for path in sorted(paths)}


def versions_in(metadata: object) -> dict[str, int] | None:
    """Returns the versions in the `_metadata` of a state dict, except 1; None if it is not valid.

    >>> versions_in({"": {"version": 1}, "0": {"version": 2}})
    {'0': 2}
    """
    if not isinstance(metadata, Mapping):
        return None
    return {
        path: version
        for path, own in metadata.items()
        if isinstance(path, str)
        and isinstance(own, Mapping)
        and type(version := own.get("version", 1)) is int
        and version != 1
    }


def change_dicts(
    nest: Any,
    paths: Collection[str],
    change: Callable[[dict[Any, Any], str], object],
    path: str = "",
) -> Any:
    """Returns a nest with the dicts at these key paths changed.

    >>> change_dicts({"m": {"w": 1}, "n": {"w": 1}}, {"m"}, lambda entries, path: [*entries])
    {'m': ['w'], 'n': {'w': 1}}
    """
    if isinstance(nest, dict):
        if any(each.startswith(f"{path}." if path else "") for each in paths):
            nest = {k: change_dicts(v, paths, change, join(path, k)) for k, v in nest.items()}
        return change(nest, path) if path in paths else nest
    if isinstance(nest, list | tuple):
        return type(nest)(
            change_dicts(v, paths, change, join(path, at)) for at, v in enumerate(nest)
        )
    return nest


def map_tree(tree: object, leaf: Callable[[Any], object]) -> Any:
    """Returns the nest of dicts, lists and tuples with `leaf(node)` in the place of other nodes.

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


def without_opaque(tree: Tree, path: str = "") -> tuple[Tree, tuple[str, ...]]:
    """Returns the tree without its opaque values, and their key paths. A list has None for them.

    >>> without_opaque({"args": OpaqueValue("argparse.Namespace"), "steps": [1, OpaqueValue("C")]})
    ({'steps': [1, None]}, ('args', 'steps.1'))
    """
    if isinstance(tree, dict):
        pairs = {key: without_opaque(item, join(path, key)) for key, item in tree.items()}
        kept = {k: part for k, (part, _) in pairs.items() if not isinstance(tree[k], OpaqueValue)}
        return kept, tuple(name for _, names in pairs.values() for name in names)
    if isinstance(tree, list | tuple):
        items = [without_opaque(item, join(path, at)) for at, item in enumerate(tree)]
        parts = [part for part, _ in items]
        names = tuple(name for _, names in items for name in names)
        return (parts if isinstance(tree, list) else tuple(parts)), names
    return (None, (path,)) if isinstance(tree, OpaqueValue) else (tree, ())


def iter_leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields the leaves of a tree with their names. Empty containers are leaves.

    >>> list(iter_leaves({"step": 3, "lr": [0.1, ()]}))
    [('step', 3), ('lr.0', 0.1), ('lr.1', ())]
    """
    if isinstance(tree, dict | list | tuple) and tree:
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from iter_leaves(item, join(path, key))
    else:
        yield path, tree


_NESTS = (dict, list, tuple, TensorRef)


def plain_names(tree: Tree) -> tuple[str, ...]:
    """Returns the names of the plain values in a tree, which a flat format cannot store.

    >>> plain_names({"model": {"w": TensorRef("w")}, "groups": [{"betas": (0.9, 0.99)}], "step": 3})
    ('groups.0.betas', 'step')
    """
    return tuple(name or "the whole state" for name, _ in plain_values(tree))


def plain_values(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields the plain values of a tree with their names, as they are shown to people and counted.

    A list without tensors and containers in it is one value, and so is an empty container.

    >>> list(plain_values({"w": TensorRef("w"), "groups": [{"betas": (0.9, 0.99)}], "none": {}}))
    [('groups.0.betas', (0.9, 0.99)), ('none', {})]
    """
    if isinstance(tree, dict) and tree:
        for key, item in tree.items():
            yield from plain_values(item, join(path, key))
    elif isinstance(tree, list | tuple) and any(isinstance(item, _NESTS) for item in tree):
        for index, item in enumerate(tree):
            yield from plain_values(item, join(path, index))
    elif not isinstance(tree, TensorRef) and (path or tree not in ({}, [], ())):
        yield path, tree


def str_of(value: Tree) -> str:
    """Returns a plain value of a tree as text."""
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
    | OpaqueValue
    | list["Tree"]
    | tuple["Tree", ...]
    | dict[Key, "Tree"]
)
"""The nested state as it was saved, with a `TensorRef` in the place of each tensor."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint, with its size and, if the format has one, its digest."""

    name: str
    size: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Catalog:
    """The content of one checkpoint. See the rules at the top of this file."""

    format: str
    """The name of the format, such as `ckpt`, `safetensors`, `huggingface`, `torch`, `dcp`."""
    tensors: Mapping[str, TensorRecord]
    """By name, in stored order."""
    tree: Tree
    """The nest of values and tensors; for flat formats a dict from name to tensor."""
    files: tuple[FileRecord, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied names: another name of a tensor -> the name in `tensors`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The metadata of the writer and the user."""
    bases: tuple[str, ...] = ()
    """The folders beside this checkpoint that hold chunks of it."""
    parts: tuple[tuple[str, Catalog], ...] = ()
    """The checkpoints of a folder with several: the sub-folder of each ("" for a file of the
    folder), and its catalog with names relative to that sub-folder (`formats.joined`)."""
    notes: tuple[str, ...] = ()
    """Facts that a user should know: files that were not read, an index that is missing."""
    unread: tuple[str, ...] = ()
    """Files of weights beside those that were read, which no conversion may lose in silence."""
    optimizers: Mapping[str, str | None] = field(default_factory=dict)
    """The key path of an optimizer -> the module whose names its parameters have; "" if they have
    key paths, None if they have positions. An optimizer of unknown origin is missing."""
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The key path of a module's state dict -> the version of the state of each module inside, by
    its name, where it is not 1. A state dict of unknown versions is missing."""
    weights: str = ""
    """The place of a model's weights, if a folder holds more than weights (docs/formats.md)."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each once."""
        return sum(record.nbytes for record in self.tensors.values())


def check_inside(name: str, extent: Extent, size: int) -> None:
    """Raises CorruptError unless an uncompressed extent lies inside its file of `size` bytes."""
    if extent.offset < 0 or extent.nbytes < 0 or extent.offset + extent.nbytes > size:
        raise CorruptError(
            f"{extent.file}: {name} lies at bytes {extent.offset}:{extent.offset + extent.nbytes}, "
            f"the file has {size}: it was truncated; restore it from another copy"
        )


def check_tiling(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raises FormatError, with the tensor and the boxes, unless the (non-empty) boxes tile it.

    >>> check_tiling("w", (4, 2), [Box((0, 0), (3, 2)), Box((3, 0), (4, 2))])
    """
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.lo) != len(shape) or box not in whole:
            raise FormatError(f"{name}: the piece {box} is not inside the tensor {whole}")
    try:
        pair = overlapping(boxes)
    except HostileError as error:
        raise HostileError(f"{name}: {error}") from None
    if pair is not None:
        raise FormatError(f"{name}: the pieces {pair[0]} and {pair[1]} overlap")
    numel = sum(box.numel for box in boxes)
    if numel != prod(shape):
        raise FormatError(
            f"{name}: the pieces hold {numel} of the {prod(shape)} elements of {whole}: the "
            "checkpoint is incomplete; copy the files of all ranks"
        )


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Returns two of the boxes that share an element, or None.

    >>> overlapping([Box((0,), (2,)), Box((4,), (6,)), Box((5,), (7,))])
    (Box(lo=(4,), hi=(6,)), Box(lo=(5,), hi=(7,)))
    """
    groups = [(0, list(boxes))]
    while groups:
        cuts, group = groups.pop()
        if cuts > CUTS and len(group) > CUTS:
            raise tangle_error(len(group))
        for dim in range(len(group[0].lo) if group else 0):
            parts = _split(group, dim)
            if len(parts) > 1:
                groups += [(cuts + 1, part) for part in parts if len(part) > 1]
                break
        else:
            if len(group) > TANGLED:
                raise tangle_error(len(group))
            for one, other in combinations(group, 2):
                if one & other:
                    return one, other
    return None


def tangle_error(pieces: int) -> HostileError:
    """Returns the error for pieces that take too long to separate."""
    return HostileError(f"{pieces} pieces of a tensor are entangled, which no sharding makes")


def _split(group: list[Box], dim: int) -> list[list[Box]]:
    """Returns the group in parts that are separate along a dimension."""
    parts: list[list[Box]] = []
    reach = 0
    for box in sorted(group, key=lambda box: box.lo[dim]):
        if not parts or box.lo[dim] >= reach:
            parts.append([])
        parts[-1].append(box)
        reach = max(reach, box.hi[dim])
    return parts


class OutgoingTensor(NamedTuple):
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    blocks: Callable[[], Iterator[memoryview]] = lambda: iter(())
    """Starts the stream: the packed row-major bytes in order, in blocks of any size.

    A block is valid until the next one. A stream is started once. A tensor that is copied from a
    stored one (`ckpt.transfer.copy_files`) has none.
    """
    stable: bool = False
    """Whether the blocks stay valid until the file is complete: they are the tensor's own memory,
    so that one call can write many of them."""
    first: int = 0
    """The number of its first element, if it is a run of a larger tensor's row-major elements."""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A whole checkpoint to write."""

    tensors: Mapping[str, OutgoingTensor]
    tree: Tree
    """The nested state; a `TensorRef` names an entry of `tensors`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied names: another name -> the name in `tensors`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The versions of modules' states, as in `Catalog`."""


def encode_name(name: str) -> bytes:
    """Returns the name of a tensor in UTF-8. Raises FormatError for half a surrogate pair."""
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise FormatError(f"{name!r:.200} is not Unicode text; rename the tensor") from None


@dataclass(frozen=True, slots=True)
class Late:
    """Bytes that depend on the checksums of tensors that stand before them in the file."""

    nbytes: int
    make: Callable[[bytes], bytes]
    """Returns the bytes, by the records of all tensors of the file that stand before them."""


Part = bytes | OutgoingTensor | Late


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to write: its name, and its parts end to end."""

    name: str
    parts: Sequence[Part]
    chunk_bytes: int = 0
    """The size of the chunks whose checksums the file has; 0 if its checksums are CRC-32s."""

    @property
    def needs_sums(self) -> bool:
        """Whether bytes of the file depend on the checksums of its tensors."""
        return any(isinstance(part, Late) for part in self.parts)


def length_of(part: Part) -> int:
    """Returns the bytes of a part.

    >>> length_of(b"abc"), length_of(Late(16, lambda records: bytes(16)))
    (3, 16)
    """
    return len(part) if isinstance(part, bytes) else part.nbytes
