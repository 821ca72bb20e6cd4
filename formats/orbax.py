"""Reads folders of Orbax: the tree of names, and arrays that lie in plain zarr files.

    _METADATA                          JSON: the key path and kind of each value
    params.embed/.zarray, 0.0, ...     zarr version 2: shape and dtype, a file for each chunk
    params.embed/zarr.json, c/0/0, ... or version 3, with an index of smaller chunks at its end
    manifest.ocdbt, d/, ocdbt.process_0/    or such files as values of a database (formats/ocdbt.py)

Rules:

1. Names are key paths, with keys of dicts and positions in sequences.
2. Arrays of zarr version 2 in C order without filters, and of version 3 in little-endian bytes,
   uncompressed or by zstd, are tensors. A chunk is a file, or a value of the database OCDBT. Chunks
   at an edge are stored whole. In version 3 a chunk may consist of chunks that its index lists.
3. Other arrays are opaque values: `inspect` shows them, and no load or conversion takes them.

The layout is that of orbax/checkpoint/_src/metadata/tree.py and of zarr's specification, version 2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import add, lt, mod, mul

from formats import ocdbt
from formats.catalog import (
    Catalog,
    DecodedChunks,
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
from formats.dtypes import BY_TORCH_NAME, DType
from formats.errors import CorruptError, FormatError, HostileError
from formats.joined import join_folders
from formats.limits import DEPTH, ELEMENTS, check, decode_object
from formats.ocdbt import Value
from formats.pickles.records import is_shape
from formats.pickles.tree import KeyPath
from formats.pickles.values import NumpyDType
from formats.storage import Reader
from sharding.layout import Box, Piece, row_major

METADATA = "_METADATA"
STEP = "_CHECKPOINT_METADATA"
ZARRAY, ZARR_JSON = ".zarray", "zarr.json"
SMALL_BYTES = 1 << 20
CHUNKS = 1 << 20
"""The most chunks of one array."""
_EMPTY: Mapping[str, Tree] = {"Dict": {}, "List": [], "Tuple": (), "None": None}
"""Values without content by their kind."""
_ARRAYS = frozenset({"jax.Array", "np.ndarray", "scalar"})
"""The kinds of values that are arrays."""
_NOTE = (
    "arrays with other dtypes or compressors cannot be read: load the checkpoint with Orbax, and "
    "save it with PyTreeCheckpointHandler() or as safetensors"
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
    folders = [entry[:-1] for entry in entries if entry.endswith("/")]
    found = join_folders("orbax", reader, folders, [FileRecord(STEP, reader.size(STEP))])
    if not found.parts:
        raise FormatError(f"{reader.url}: no folder in it has a {METADATA} of Orbax; copy all")
    return found


def _item(reader: Reader) -> Catalog:
    size = reader.size(METADATA)
    check("manifest_bytes", size, METADATA)
    content = decode_object(reader.read(METADATA, 0, size), METADATA)
    values = content.get("tree_metadata")
    if not isinstance(values, dict):
        raise FormatError(f"{METADATA}: it has no table `tree_metadata`")
    has_files = content.get("use_ocdbt") is False
    description = ZARR_JSON if content.get("use_zarr3") else ZARRAY
    arrays = _Arrays(reader, None if has_files else ocdbt.values_in(reader), description)
    leaves: dict[KeyPath, Tree] = {}
    for text, entry in values.items():
        path, kind = _parse_entry(text, entry)
        if kind in _EMPTY:
            leaves[path] = _EMPTY[kind]
        else:
            leaves[path] = arrays.leaf(".".join(map(str, path)), kind)
    has_opaque = any(isinstance(leaf, OpaqueValue) for leaf in leaves.values())
    return Catalog(
        "orbax",
        arrays.tensors,
        unflatten(leaves) if leaves else {},
        (FileRecord(METADATA, size), *arrays.files),
        notes=(_NOTE,) if has_opaque else (),
    )


def _parse_entry(text: str, entry: object) -> tuple[KeyPath, str]:
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
    return tuple(path), kind if isinstance(kind, str) and kind.isprintable() else "value"


class _Arrays:
    """The arrays found so far, with their files."""

    def __init__(
        self, reader: Reader, values: Mapping[str, Value] | None, description: str
    ) -> None:
        """`values` are those of a database; without one, each value is a file."""
        self.tensors: dict[str, TensorRecord] = {}
        self._sizes: dict[str, int] = {}
        self._reader, self._values, self._description = reader, values, description

    @property
    def files(self) -> list[FileRecord]:
        return [FileRecord(name, size) for name, size in self._sizes.items()]

    def leaf(self, name: str, kind: str) -> Tree:
        """Returns the array in the folder `name` as a tensor, or as an opaque value (rule 3)."""
        if "/" in name or "\\" in name or name in ("", ".", "..") or not name.isprintable():
            raise HostileError(f"{METADATA}: {name!r:.200} is no name of a folder")
        described = f"{name}/{self._description}"
        value = self._find(described)
        if value is None:
            if kind in _ARRAYS:
                raise CorruptError(f"{described}: it is missing; restore it from a copy")
            return OpaqueValue(kind)
        if value.nbytes > SMALL_BYTES:
            raise HostileError(f"{described}: a description of {value.nbytes} bytes")
        content = decode_object(self._content(value), described)
        array = _Array.of_2(described, content) or _Array.of_3(described, content)
        if array is None:
            dtype = content.get("dtype", content.get("data_type"))
            return OpaqueValue(f"{kind} {dtype!r:.40} {content.get('shape')!r:.80}", 1)
        pieces = PieceTable(list(self._pieces(name, array)))
        self.tensors[name] = TensorRecord(name, array.shape, array.dtype, pieces)
        return TensorRef(name)

    def _pieces(self, name: str, array: _Array) -> Iterator[StoredPiece]:
        """Yields a piece for each chunk, which has all elements of the chunk's shape."""
        for place, lo in _places(name, array.shape, array.chunk):
            file = f"{name}/{array.file(place)}"
            value = self._find(file)
            if value is None:
                raise CorruptError(f"{file}: the chunk is missing; restore it from a copy")
            if array.inner is None:
                yield _piece(file, value, array, array.chunk, lo)
                continue
            chunks = self._chunks_of(file, value, array.chunk, array.inner)
            for (_, inside), chunk in zip(
                _places(name, array.chunk, array.inner), chunks, strict=True
            ):
                start = tuple(map(add, lo, inside))
                if all(map(lt, start, array.shape)):
                    if chunk is None:
                        raise CorruptError(f"{file}: a chunk is missing; restore it from a copy")
                    yield _piece(file, chunk, array, array.inner, start)

    def _chunks_of(
        self, file: str, shard: Value, outer: tuple[int, ...], inner: tuple[int, ...]
    ) -> list[Value | None]:
        """Returns the chunks of a shard by its index: an offset and a length each, and CRC-32C."""
        count = prod(outer) // prod(inner)
        index_bytes = 16 * count + 4
        if shard.nbytes < index_bytes:
            raise CorruptError(f"{file}: it has no index of {count} chunks; restore it from a copy")
        at = shard.nbytes - index_bytes
        data = shard.data[at:] if shard.data is not None else None
        index = self._content(Value(shard.file, shard.offset + at, index_bytes, data))
        if ocdbt.crc32c(index[:-4]) != int.from_bytes(index[-4:], "little"):
            raise CorruptError(f"{file}: its index has another checksum; restore it from a copy")
        chunks: list[Value | None] = []
        for offset, nbytes in struct.iter_unpack("<QQ", index[:-4]):
            if offset == nbytes == (1 << 64) - 1:
                chunks.append(None)
                continue
            if offset + nbytes > at:
                raise CorruptError(f"{file}: it ends before a chunk; restore it from a copy")
            data = shard.data[offset : offset + nbytes] if shard.data is not None else None
            start = shard.offset + (0 if data is not None else offset)
            chunks.append(Value(shard.file, start, nbytes, data))
        return chunks

    def _content(self, value: Value) -> bytes:
        return self._reader.read(*value[:3]) if value.data is None else value.data

    def _find(self, name: str) -> Value | None:
        """Returns the place of a value; None if it is missing."""
        value = None if self._values is None else self._values.get(name)
        try:
            if self._values is None:
                value = Value(name, 0, self._reader.size(name))
                self._sizes[name] = value.nbytes
            elif value is not None and value.file not in self._sizes:
                self._sizes[value.file] = self._reader.size(value.file)
        except FileNotFoundError:
            return None
        if value is not None and value.offset + value.nbytes > self._sizes[value.file]:
            raise CorruptError(f"{value.file}: it ends before {name}; restore it from a copy")
        return value


@dataclass(frozen=True, slots=True)
class _Array:
    """The description of an array."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: DType
    is_compressed: bool
    start: str
    """The beginning of the names of chunks."""
    separator: str
    inner: tuple[int, ...] | None = None
    """The shape of the chunks in a chunk with an index; None if it has none."""

    @classmethod
    def of_2(cls, where: str, metadata: Mapping[str, object]) -> _Array | None:
        """Returns the array that `.zarray` describes; None for one that is not read (rule 2)."""
        dtype = NumpyDType(str(metadata.get("dtype"))).dtype
        compressor = metadata.get("compressor")
        by = compressor.get("id") if isinstance(compressor, dict) else compressor
        is_known = metadata.get("zarr_format") == 2 and metadata.get("order") == "C"
        if dtype is None or not is_known or metadata.get("filters") or by not in (None, "zstd"):
            return None
        shape, chunk = _shapes(where, metadata.get("shape"), metadata.get("chunks"))
        separator = "/" if metadata.get("dimension_separator") == "/" else "."
        return cls(shape, chunk, dtype, by is not None, "", separator)

    @classmethod
    def of_3(cls, where: str, metadata: Mapping[str, object]) -> _Array | None:
        """Returns the array that `zarr.json` describes; None for one that is not read (rule 3)."""
        dtype = BY_TORCH_NAME.get(str(metadata.get("data_type")))
        names = _options(metadata.get("chunk_key_encoding"), "default")
        codecs, index = metadata.get("codecs"), None
        if isinstance(codecs, list) and len(codecs) == 1:
            index = _options(codecs[0], "sharding_indexed")
        if index is not None:
            ends = index.get("index_location", "end") == "end"
            codecs = index.get("codecs") if ends and _steps(index) == ["bytes", "crc32c"] else None
        steps = _steps({"index_codecs": codecs})
        grid = _options(metadata.get("chunk_grid"), "regular")
        if dtype is None or names is None or grid is None or metadata.get("zarr_format") != 3:
            return None
        if steps not in (["bytes"], ["bytes", "zstd"]):
            return None
        shape, chunk = _shapes(where, metadata.get("shape"), grid.get("chunk_shape"))
        inner = None
        if index is not None:
            inner = _shapes(where, list(chunk), index.get("chunk_shape"))[1]
            if any(map(mod, chunk, inner)):
                raise FormatError(f"{where}: chunks of {inner} do not divide {chunk}")
        separator = "." if names.get("separator") == "." else "/"
        return cls(shape, chunk, dtype, "zstd" in steps, "c", separator, inner)

    def file(self, place: tuple[int, ...]) -> str:
        parts = [self.start, *map(str, place)] if self.start else map(str, place)
        return self.separator.join(parts) or "0"


def _options(entry: object, name: str) -> Mapping[str, object] | None:
    """Returns the configuration of an extension of zarr 3 with this name; None for another one."""
    if not isinstance(entry, dict) or entry.get("name") != name:
        return None
    options = entry.get("configuration", {})
    return options if isinstance(options, dict) else None


def _steps(index: Mapping[str, object]) -> list[object]:
    """Returns the names of codecs; none if their bytes are of big-endian numbers."""
    codecs = index.get("index_codecs")
    found = [each for each in codecs if isinstance(each, dict)] if isinstance(codecs, list) else []
    if any((_options(each, "bytes") or {}).get("endian", "little") != "little" for each in found):
        return []
    return [each.get("name") for each in found]


def _places(
    name: str, shape: tuple[int, ...], chunk: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields the place of each chunk in the grid, and its first indices in the array."""
    counts = [-(-size // part) for size, part in zip(shape, chunk, strict=True)]
    if prod(counts) > CHUNKS:
        raise HostileError(f"{name}: the array has {prod(counts)} chunks")
    for place in product(*map(range, counts)):
        yield place, tuple(map(mul, place, chunk))


def _piece(
    file: str, value: Value, array: _Array, chunk: tuple[int, ...], lo: tuple[int, ...]
) -> StoredPiece:
    """Returns the piece of a chunk whose first element is at `lo`."""
    nbytes = prod(chunk) * array.dtype.itemsize
    if array.is_compressed:
        check("chunk_bytes", nbytes, f"{file}: a chunk")
    if value.nbytes == 0 or (not array.is_compressed and value.nbytes != nbytes):
        raise CorruptError(
            f"{file}: the chunk has {value.nbytes} bytes and decodes to {nbytes}; restore it from "
            "another copy"
        )
    hi = tuple(min(a + part, n) for a, part, n in zip(lo, chunk, array.shape, strict=True))

    def fill(at: int, stored: memoryview, target: memoryview) -> None:
        """Fills `target` with the decoded chunk. Raises CorruptError for other bytes."""
        from formats.native.codec import decompress  # numpy

        raw = memoryview(value.data) if value.data is not None else stored
        if array.is_compressed:
            decompress(raw, 1, target, file)
        else:
            target[:] = raw

    chunks = None
    if array.is_compressed or value.data is not None:
        stored_bytes = value.nbytes if value.data is None else _HEAD_BYTES
        chunks = DecodedChunks(value.offset, stored_bytes, nbytes, nbytes, fill)
    extent = Extent(value.file, value.offset, nbytes, chunks)
    return StoredPiece(Piece(Box(lo, hi), 0, row_major(chunk)), extent)


def _shapes(where: str, *shapes: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape, chunk = (tuple(each) if isinstance(each, list) else None for each in shapes)
    if not is_shape(shape) or not is_shape(chunk) or len(shape) != len(chunk) or 0 in chunk:
        raise FormatError(f"{where}: the array has no shape and chunks")
    if prod(size or 1 for size in shape) >= ELEMENTS or prod(chunk) >= ELEMENTS:
        raise HostileError(f"{where}: the array has more elements than torch can count")
    return shape, chunk


_HEAD_BYTES = 12
"""The least bytes of a node of a database, of which a chunk in it reads no more."""
