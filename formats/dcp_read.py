"""Reads the folders of torch.distributed.checkpoint (DCP) without torch and without unpickling.

`.metadata` is a pickle with the shape, dtype and chunks (boxes) of each tensor, and the file and
byte range of each chunk's item. An item is a small torch.save zip with one tensor or one other
value. Rules:

1. `read` reads `.metadata` and the items of values. `formats.dcp_items` opens the items of tensors
   later.
2. `.metadata` has no checksum, so redundant parts of it must agree: the chunks tile their tensor,
   the items tile their file, and each name has its key path.
3. A name is DCP's: the key path joined by dots. `planner_data` has the key paths, from which the
   nest is rebuilt (`formats.dcp_nest`). Without it the tree is flat.
"""

from __future__ import annotations

from math import prod

from formats.catalog import Catalog, Extent, FileRecord, PieceTable, StoredPiece, TensorRecord, Tree
from formats.dcp_items import ItemPieces, Items, KnownPickles, ReadAhead
from formats.dcp_nest import METADATA, key_path, nested
from formats.dtypes import DType
from formats.errors import FormatError, HostileError, UnsupportedError
from formats.limits import DIMENSIONS, ELEMENTS, check
from formats.pickle_reader import load
from formats.pickle_records import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
    is_shape,
)
from formats.storage import Reader
from formats.tiling import check_tiling
from formats.torch_tree import Nest, shown
from formats.zip_records import PICKLE, Archive
from sharding.layout import Box, Piece


def read(reader: Reader) -> Catalog:
    """Reads the catalog of a DCP folder (rule 1).

    Raises:
        FileNotFoundError: the folder has no `.metadata`.
        HostileError: a pickle names a class that no checkpoint needs. Nothing was executed.
        UnsupportedError: items went through a transform, or have values that cannot be read.
        CorruptError: a file is missing or too short.
        FormatError: chunks overlap or leave holes, or the metadata is invalid in another way.
    """
    metadata = _metadata(reader)
    items = Items(reader, metadata.storage_data)
    entries = _mapping(metadata.state_dict_metadata, "state_dict_metadata")
    known_paths = _mapping(metadata.planner_data or {}, "planner_data")
    if known_paths and (lost := [name for name in entries if name not in known_paths]):
        raise FormatError(f"{METADATA}: planner_data has no key path for {shown(tuple(lost[:1]))}")
    paths = {name: key_path(name, known_paths) for name in entries}
    sizes = {METADATA: reader.size(METADATA)}
    nest, pickles = Nest(METADATA, sizes[METADATA]), KnownPickles()
    leaves: dict[str, Tree] = {}
    values: dict[str, Extent] = {}
    for name, entry in entries.items():
        leaves[name] = None  # keeps the order: values are read in the order of their bytes
        if isinstance(entry, TensorStorageMetadata):
            record, view = _tensor(reader, nest.claim(paths[name]), entry, items, pickles)
            leaves[name] = nest.place(view, record)
        elif isinstance(entry, BytesStorageMetadata):
            values[name] = items.find(name, None)
        else:
            raise FormatError(f"{METADATA}: {name} is a {type(entry).__name__}")
    if len(set(values.values())) < len(values):
        raise HostileError(f"{METADATA}: two values lie in the same bytes")
    ahead = ReadAhead(reader)
    for name, item in sorted(values.items(), key=lambda each: (each[1].file, each[1].offset)):
        archive = Archive(ahead, item.file, item.offset, item.nbytes)
        pickled = archive.read(PICKLE)
        nest.grow(len(pickled))
        leaves[name] = nest.tree(load(pickled, archive.where), paths[name], archive)
    sizes.update(items.sizes)
    return Catalog(
        format="dcp",
        tensors=nest.tensors,
        tree=nested({paths[name]: leaf for name, leaf in leaves.items()}),
        files=tuple(FileRecord(name, size) for name, size in sorted(sizes.items())),
        aliases=nest.aliases,
        metadata={"version": metadata.version} if isinstance(metadata.version, str) else {},
    )


def _metadata(reader: Reader) -> Metadata:
    try:
        size = reader.size(METADATA)
    except FileNotFoundError:
        if "__0" + METADATA in reader.names():
            raise UnsupportedError(
                f"{reader.url}: each rank saved a checkpoint of its own (__0.metadata, ...); save "
                "with a process group or with no_dist=True"
            ) from None
        raise
    check("pickle_bytes", size, METADATA)
    loaded = load(reader.read(METADATA, 0, size), METADATA)
    if not isinstance(loaded, Metadata):
        raise FormatError(
            f"{METADATA}: it holds a {type(loaded).__name__}, not the metadata of DCP"
        )
    return loaded


def _tensor(
    reader: Reader, name: str, entry: TensorStorageMetadata, items: Items, pickles: KnownPickles
) -> tuple[TensorRecord, object]:
    """Returns the record of a tensor, and a key that only tensors with equal items share."""
    properties, shape, chunks = entry.properties, _shape(name, entry.size), entry.chunks
    dtype = properties.dtype if isinstance(properties, TensorProperties) else None
    if prod(size or 1 for size in shape) >= ELEMENTS:
        raise HostileError(f"{METADATA}: {name} has more elements than torch can count")
    if not isinstance(dtype, DType) or not isinstance(chunks, list):
        raise FormatError(f"{METADATA}: {name} has no dtype and chunks")
    pieces = []
    for chunk in chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            raise FormatError(f"{METADATA}: a chunk of {name} is a {type(chunk).__name__}")
        lo, sizes = _shape(name, chunk.offsets), _shape(name, chunk.sizes)
        if len(lo) != len(shape) or len(sizes) != len(shape):
            raise FormatError(f"{METADATA}: a chunk of {name} has not {len(shape)} dimensions")
        box = Box(lo, tuple(start + size for start, size in zip(lo, sizes, strict=True)))
        if box:  # ranks beyond the last row have empty chunks
            pieces.append(StoredPiece(Piece.packed(box), items.find(name, lo)))
    check_tiling(f"{METADATA}: {name}", shape, [stored.piece.box for stored in pieces])
    if len({stored.extent for stored in pieces}) < len(pieces):
        raise FormatError(f"{METADATA}: two chunks of {name} lie in the same bytes")
    view = (dtype, shape, tuple(pieces)) if pieces else name
    table = ItemPieces(reader, name, dtype, PieceTable(pieces), items.raw, pickles)
    return TensorRecord(name, shape, dtype, table), view


def _shape(name: str, value: object) -> tuple[int, ...]:
    if not is_shape(value):
        raise FormatError(
            f"{METADATA}: a shape of {name} is not a tuple of whole numbers from 0 up, at most "
            f"{DIMENSIONS}"
        )
    return value


def _mapping(value: object, what: str) -> dict[str, object]:
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return value
    raise FormatError(f"{METADATA}: {what} is not a table of names")
