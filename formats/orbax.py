"""Reads folders of Orbax: the tree of names, and arrays that lie in plain zarr files.

    _METADATA                          JSON: the key path and kind of each value
    params.embed/.zarray, 0.0, ...     zarr version 2: shape and dtype, a file for each chunk
    manifest.ocdbt, d/, ocdbt.process_0/    or all arrays in TensorStore's OCDBT database

Rules:

1. Names are key paths, with keys of dicts and positions in sequences.
2. Arrays of zarr version 2 in C order, without filters, uncompressed or by zstd, are tensors. A
   chunk is a file. Chunks at an edge are stored whole.
3. Other arrays, above all those in OCDBT, are opaque values: `inspect` shows them, and no load or
   conversion takes them.

The layout is that of orbax/checkpoint/_src/metadata/tree.py and of zarr's specification, version 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

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
    "arrays in OCDBT or another form of zarr cannot be read: load the checkpoint with Orbax, and "
    "save it with PyTreeCheckpointHandler(use_ocdbt=False) or as safetensors"
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
    is_plain = told.get("use_ocdbt") is False and not told.get("use_zarr3")
    arrays = _Arrays(reader)
    leaves: dict[KeyPath, Tree] = {}
    for text, entry in values.items():
        path, kind, written = _parse_entry(text, entry)
        if kind in _EMPTY:
            leaves[path] = _EMPTY[kind]
        elif is_plain:
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

    def __init__(self, reader: Reader) -> None:
        self.tensors: dict[str, TensorRecord] = {}
        self.files: list[FileRecord] = []
        self._reader = reader

    def leaf(self, name: str, kind: str) -> Tree:
        """Returns the array in the folder `name` as a tensor, or as an opaque value (rule 3)."""
        if "/" in name or "\\" in name or name in ("", ".", "..") or not name.isprintable():
            raise HostileError(f"{METADATA}: {name!r:.200} is no name of a folder")
        described = f"{name}/{ZARRAY}"
        try:
            size = self._reader.size(described)
        except FileNotFoundError:
            if kind in _ARRAYS:
                raise CorruptError(f"{described}: it is missing; restore it from a copy") from None
            return OpaqueValue(kind)
        told = decode_object(self._reader.read_whole(described, SMALL_BYTES), described)
        dtype = NumpyDType(str(told.get("dtype"))).dtype
        compressor = told.get("compressor")
        by = compressor.get("id") if isinstance(compressor, dict) else compressor
        is_known = told.get("zarr_format") == 2 and told.get("order") == "C"
        if dtype is None or not is_known or told.get("filters") or by not in (None, "zstd"):
            described = f"{told.get('dtype')!r:.40} {told.get('shape')!r:.80}"
            return OpaqueValue(f"{kind} {described}", 1)
        self.files.append(FileRecord(described, size))
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
            stored = self._size(file)
            if stored == 0 or (not compressed and stored != nbytes):
                raise CorruptError(
                    f"{file}: the chunk has {stored} bytes and decodes to {nbytes}; restore it "
                    "from another copy"
                )
            chunks = ZstdChunk(file, stored, nbytes) if compressed else None
            extent = Extent(file, 0, nbytes, chunks)
            yield StoredPiece(Piece(Box(lo, hi), 0, row_major(chunk)), extent)

    def _size(self, file: str) -> int:
        try:
            size = self._reader.size(file)
        except FileNotFoundError:
            raise CorruptError(f"{file}: the chunk is missing; restore it from a copy") from None
        self.files.append(FileRecord(file, size))
        return size


def _shapes(where: str, told: Mapping[str, object]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of an array and of its chunks."""
    given = (told.get("shape"), told.get("chunks"))
    shape, chunk = (tuple(each) if isinstance(each, list) else None for each in given)
    if not is_shape(shape) or not is_shape(chunk) or len(shape) != len(chunk) or 0 in chunk:
        raise FormatError(f"{where}: the array has no shape and chunks")
    if prod(size or 1 for size in shape) >= ELEMENTS or prod(chunk) >= ELEMENTS:
        raise HostileError(f"{where}: the array has more elements than torch can count")
    return shape, chunk


class ZstdChunk:
    """A chunk that is one file and one frame of zstd, without a checksum."""

    compressed = True

    def __init__(self, file: str, stored_bytes: int, raw_bytes: int) -> None:
        self.chunk_bytes = raw_bytes
        self._file, self._stored_bytes = file, stored_bytes

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Chunk:
        return Chunk(0, self._stored_bytes, self.chunk_bytes, b"", True)

    def wrong(self, first: int, stored: memoryview) -> int | None:
        """Returns None: there is no checksum."""
        return None

    def decode(self, index: int, stored: memoryview, width: int, target: memoryview) -> None:
        """Decodes the frame into `target`. Raises CorruptError for other bytes."""
        from formats.native.codec import decompress  # numpy

        decompress(stored, 1, target, self._file)
