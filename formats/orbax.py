"""Reads folders of Orbax: the tree of names, and arrays that lie in plain zarr files.

    _METADATA                          JSON: the key path and kind of each value
    params.embed/.zarray, 0.0, ...     zarr version 2: shape and dtype, a file for each chunk
    manifest.ocdbt, d/, ocdbt.process_0/    or such files as values of a database (formats/ocdbt.py)

Rules:

1. Names are key paths, with keys of dicts and positions in sequences.
2. Arrays of zarr version 2 in C order, without filters, uncompressed or by zstd, are tensors. A
   chunk is a file, or a value of the database OCDBT. Chunks at an edge are stored whole.
3. Other arrays are opaque values: `inspect` shows them, and no load or conversion takes them.

The layout is that of orbax/checkpoint/_src/metadata/tree.py and of zarr's specification, version 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

from formats import ocdbt
from formats.catalog import (
    Catalog,
    Chunk,
    Extent,
    FileRecord,
    OpaqueValue,
    PieceTable,
    StoredPiece,
    TensorRecord,
    TensorRef,
    Tree,
)
from formats.dcp.nest import unflatten
from formats.dtypes import DType
from formats.errors import CorruptError, FormatError, HostileError
from formats.joined import Part, below, join_catalogs
from formats.limits import DEPTH, ELEMENTS, check, decode_object
from formats.ocdbt import Value
from formats.pickles.records import is_shape
from formats.pickles.tree import KeyPath
from formats.pickles.values import NumpyDType
from formats.storage import Reader
from sharding.layout import Box, Piece, row_major

METADATA = "_METADATA"
STEP = "_CHECKPOINT_METADATA"
ZARRAY = ".zarray"
SMALL_BYTES = 1 << 20
CHUNKS = 1 << 20
"""The most chunks of one array."""
_EMPTY: Mapping[str, Tree] = {"Dict": {}, "List": [], "Tuple": (), "None": None}
"""Values without content by their kind."""
_ARRAYS = frozenset({"jax.Array", "np.ndarray", "scalar"})
"""The kinds of values that are arrays."""
_NOTE = (
    "arrays of zarr version 3 or with other compressors cannot be read: load the checkpoint with "
    "Orbax, and save it with PyTreeCheckpointHandler() or as safetensors"
)


def read(reader: Reader) -> Catalog:
    """Reads the catalog of an item's folder, or of a step's folder with its items.

    Raises:
        CorruptError: an array, or a chunk of one, is missing or too short.
        FormatError: the description is invalid.
    """
    entries = reader.entries()
    if METADATA in entries:
        return _item(reader)
    items = [
        entry[:-1]
        for entry in entries
        if entry.endswith("/") and METADATA in reader.entries(entry[:-1])
    ]
    if not items:
        raise FormatError(f"{reader.url}: no folder in it has a {METADATA} of Orbax; copy all")
    parts = [Part((item,), below(reader, item, _item)) for item in items]
    notes = dict.fromkeys(note for part in parts for note in part.catalog.notes)
    found = join_catalogs("orbax", parts, [FileRecord(STEP, reader.size(STEP))])
    return replace(found, notes=tuple(notes))


def _item(reader: Reader) -> Catalog:
    size = reader.size(METADATA)
    check("manifest_bytes", size, METADATA)
    told = decode_object(reader.read(METADATA, 0, size), METADATA)
    values = told.get("tree_metadata")
    if not isinstance(values, dict):
        raise FormatError(f"{METADATA}: it has no table `tree_metadata`")
    is_known = not told.get("use_zarr3")
    has_files = told.get("use_ocdbt") is False or not is_known
    arrays = _Arrays(reader, None if has_files else ocdbt.values_in(reader))
    leaves: dict[KeyPath, Tree] = {}
    for text, entry in values.items():
        path, kind, written = _parse_entry(text, entry)
        if kind in _EMPTY:
            leaves[path] = _EMPTY[kind]
        elif is_known:
            leaves[path] = arrays.leaf(".".join(map(str, path)), kind)
        else:
            shape = f", written in parts of shape {list(written)}" if is_shape(written) else ""
            leaves[path] = OpaqueValue(f"{kind}{shape}", int(kind in _ARRAYS))
    has_opaque = any(isinstance(leaf, OpaqueValue) for leaf in leaves.values())
    return Catalog(
        "orbax",
        arrays.tensors,
        unflatten(leaves) if leaves else {},
        (FileRecord(METADATA, size), *arrays.files),
        notes=(_NOTE,) if has_opaque else (),
    )


def _parse_entry(text: str, entry: object) -> tuple[KeyPath, str, object]:
    """Returns the key path of a value, its kind and the shape of its parts."""
    keys = entry.get("key_metadata") if isinstance(entry, dict) else None
    value = entry.get("value_metadata") if isinstance(entry, dict) else None
    if not isinstance(keys, list) or not isinstance(value, dict) or not 0 < len(keys) <= DEPTH:
        raise FormatError(f"{METADATA}: {text!r:.200} has no keys and value")
    path: list[object] = []
    for key in keys:
        name = key.get("key") if isinstance(key, dict) else None
        if not isinstance(name, str):
            raise FormatError(f"{METADATA}: {text!r:.200} has a key without a name")
        # Orbax counts kinds of keys: 1 is a position in a sequence.
        is_position = key.get("key_type") == 1 and path and name.isdecimal() and len(name) < 10
        path.append(int(name) if is_position else name)
    kind = value.get("value_type")
    written = value.get("write_shape")
    shape = tuple(written) if isinstance(written, list) else None
    return tuple(path), kind if isinstance(kind, str) and kind.isprintable() else "value", shape


class _Arrays:
    """The arrays found so far, with their files."""

    def __init__(self, reader: Reader, values: Mapping[str, Value] | None) -> None:
        """`values` are those of a database; without one, each value is a file."""
        self.tensors: dict[str, TensorRecord] = {}
        self._sizes: dict[str, int] = {}
        self._reader, self._values = reader, values

    @property
    def files(self) -> list[FileRecord]:
        """The files of all arrays."""
        return [FileRecord(name, size) for name, size in self._sizes.items()]

    def leaf(self, name: str, kind: str) -> Tree:
        """Returns the array in the folder `name` as a tensor, or as an opaque value (rule 3)."""
        if "/" in name or "\\" in name or name in ("", ".", "..") or not name.isprintable():
            raise HostileError(f"{METADATA}: {name!r:.200} is no name of a folder")
        described = f"{name}/{ZARRAY}"
        value = self._find(described)
        if value is None:
            if kind in _ARRAYS:
                raise CorruptError(f"{described}: it is missing; restore it from a copy")
            return OpaqueValue(kind)
        if value.nbytes > SMALL_BYTES:
            raise HostileError(f"{described}: a description of {value.nbytes} bytes")
        content = value.data or self._reader.read(value.file, value.offset, value.nbytes)
        told = decode_object(content, described)
        dtype = NumpyDType(str(told.get("dtype"))).dtype
        compressor = told.get("compressor")
        by = compressor.get("id") if isinstance(compressor, dict) else compressor
        is_known = told.get("zarr_format") == 2 and told.get("order") == "C"
        if dtype is None or not is_known or told.get("filters") or by not in (None, "zstd"):
            described = f"{told.get('dtype')!r:.40} {told.get('shape')!r:.80}"
            return OpaqueValue(f"{kind} {described}", 1)
        shape, chunk = _shapes(described, told)
        separator = "/" if told.get("dimension_separator") == "/" else "."
        pieces = list(self._pieces(name, shape, chunk, dtype, separator, by is not None))
        self.tensors[name] = TensorRecord(name, shape, dtype, PieceTable(pieces))
        return TensorRef(name)

    def _pieces(
        self,
        name: str,
        shape: tuple[int, ...],
        chunk: tuple[int, ...],
        dtype: DType,
        separator: str,
        compressed: bool,
    ) -> Iterator[StoredPiece]:
        """Yields a piece for each chunk, whose file has all elements of the chunk's shape."""
        counts = [-(-size // part) for size, part in zip(shape, chunk, strict=True)]
        if prod(counts) > CHUNKS:
            raise HostileError(f"{name}/{ZARRAY}: the array has {prod(counts)} chunks")
        nbytes = prod(chunk) * dtype.itemsize
        if compressed:
            check("chunk_bytes", nbytes, f"{name}/{ZARRAY}: a chunk")
        for place in product(*map(range, counts)):
            lo = tuple(at * part for at, part in zip(place, chunk, strict=True))
            hi = tuple(min(a + part, n) for a, part, n in zip(lo, chunk, shape, strict=True))
            file = f"{name}/{separator.join(map(str, place)) or '0'}"
            value = self._find(file)
            if value is None:
                raise CorruptError(f"{file}: the chunk is missing; restore it from a copy")
            if value.nbytes == 0 or (not compressed and value.nbytes != nbytes):
                raise CorruptError(
                    f"{file}: the chunk has {value.nbytes} bytes and decodes to {nbytes}; restore "
                    "it from another copy"
                )
            is_as_stored = not compressed and value.data is None
            chunks = None if is_as_stored else ZstdChunk(file, value, nbytes, compressed)
            extent = Extent(value.file, value.offset, nbytes, chunks)
            yield StoredPiece(Piece(Box(lo, hi), 0, row_major(chunk)), extent)

    def _find(self, name: str) -> Value | None:
        """Returns the place of a value; None if it is missing."""
        found = None if self._values is None else self._values.get(name)
        try:
            if self._values is None:
                found = Value(name, 0, self._reader.size(name))
                self._sizes[name] = found.nbytes
            elif found is not None and found.file not in self._sizes:
                self._sizes[found.file] = self._reader.size(found.file)
        except FileNotFoundError:
            return None
        if found is not None and found.offset + found.nbytes > self._sizes[found.file]:
            raise CorruptError(f"{found.file}: it ends before {name}; restore it from a copy")
        return found


def _shapes(where: str, told: Mapping[str, object]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of an array and of its chunks."""
    given = (told.get("shape"), told.get("chunks"))
    shape, chunk = (tuple(each) if isinstance(each, list) else None for each in given)
    if not is_shape(shape) or not is_shape(chunk) or len(shape) != len(chunk) or 0 in chunk:
        raise FormatError(f"{where}: the array has no shape and chunks")
    if prod(size or 1 for size in shape) >= ELEMENTS or prod(chunk) >= ELEMENTS:
        raise HostileError(f"{where}: the array has more elements than torch can count")
    return shape, chunk


_HEAD_BYTES = 12
"""The least bytes of a node of a database, of which a chunk in it reads no more."""


class ZstdChunk:
    """A chunk that is one frame of zstd, or lies in a node of a database; without a checksum."""

    compressed = True

    def __init__(self, name: str, value: Value, raw_bytes: int, is_frame: bool) -> None:
        self.chunk_bytes = raw_bytes
        self._name, self._value, self._is_frame = name, value, is_frame

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Chunk:
        value = self._value
        stored = value.nbytes if value.data is None else _HEAD_BYTES
        return Chunk(value.offset, stored, self.chunk_bytes, b"", True)

    def wrong(self, first: int, stored: memoryview) -> int | None:
        """Returns None: there is no checksum."""
        return None

    def decode(self, index: int, stored: memoryview, width: int, target: memoryview) -> None:
        """Decodes the frame into `target`. Raises CorruptError for other bytes."""
        from formats.native.codec import decompress  # numpy

        frame = memoryview(self._value.data) if self._value.data is not None else stored
        if self._is_frame:
            decompress(frame, 1, target, self._name)
        else:
            target[:] = frame
