"""The shards that DCP's HuggingFaceStorageWriter writes with `save_distributed=True`.

    shard-00001-model-00001-of-00001.safetensors     the chunks of rank 0
    shard-00002-model-00001-of-00001.safetensors     the chunks of rank 1

Each file has the chunks of one rank as tensors, and in its metadata, under `DCP_SHARDING_INFO`, the
offsets of each chunk in its tensor: `{"w": {"saved_offsets": [4, 0]}}`. Nothing in the folder has
the shape of a whole tensor or the number of files. Rules:

1. A tensor reaches as far as its last chunk, as for torch's own reader. The chunks must tile it.
2. A tensor without offsets begins at zero.
3. If the last file is missing, the rest may still tile smaller tensors. A note tells it.

The layout is that of torch/distributed/checkpoint/hf_storage.py and _hf_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from formats.catalog import Catalog, FileRecord, PieceTable, StoredPiece, TensorRecord
from formats.errors import FormatError, HostileError
from formats.limits import ELEMENTS
from formats.safetensors_file import FileContents, flat_tree, read_contents
from formats.storage import Reader
from formats.strict_json import decode_object
from formats.tiling import check_tiling
from sharding.layout import Box, Piece

SHARD = re.compile(r"shard-([0-9]{5,9})-model-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors")
OFFSETS_KEY = "DCP_SHARDING_INFO"
_WRITTEN = frozenset({OFFSETS_KEY, "DCP_VERSION", "format"})
"""The keys of the metadata that the writer adds."""


def read(reader: Reader) -> Catalog:
    """Reads the catalog of a folder: only the headers of its files.

    Raises:
        FormatError: the offsets are invalid, or chunks overlap or leave holes.
        HostileError: a tensor has more elements than torch can count.
        CorruptError, UnsupportedError: as for one safetensors file.
    """
    shards = sorted(filter(SHARD.fullmatch, reader.names()))
    parts: dict[str, list[tuple[str, TensorRecord, Box]]] = {}
    files: list[FileRecord] = []
    metadata: dict[str, str] = {}
    for shard in shards:
        contents = read_contents(reader, shard)
        offsets = _offsets(contents, shard)
        for name, record in contents.tensors.items():
            parts.setdefault(name, []).append((shard, record, _box(record, offsets, shard)))
        files.append(contents.record)
        metadata |= {k: text for k, text in contents.metadata.items() if k not in _WRITTEN}
    tensors = {name: _tensor(name, found) for name, found in parts.items()}
    note = (
        f"these {len(shards)} files have no list of all files: if the last ranks' are missing, "
        "tensors end earlier"
    )
    return Catalog(
        format="huggingface",
        tensors=tensors,
        tree=flat_tree(tensors, {}),
        files=tuple(files),
        metadata=metadata,
        notes=(note,),
    )


def _offsets(contents: FileContents, file: str) -> Mapping[str, object]:
    """Returns the metadata's entry for each tensor of a file."""
    text = contents.metadata.get(OFFSETS_KEY)
    return decode_object(text, f"{file}: {OFFSETS_KEY}") if text is not None else {}


def _box(record: TensorRecord, offsets: Mapping[str, object], file: str) -> Box:
    """Returns the box of a chunk in its tensor."""
    entry = offsets.get(record.name)
    at = entry.get("saved_offsets") if isinstance(entry, dict) else [0] * len(record.shape)
    if not isinstance(at, list) or len(at) != len(record.shape):
        raise FormatError(
            f"{file}: {OFFSETS_KEY} has no {len(record.shape)} offsets of {record.name}"
        )
    if any(type(lo) is not int or not 0 <= lo < ELEMENTS for lo in at):
        raise FormatError(f"{file}: the offsets of {record.name} are {at!r:.80}, not whole numbers")
    return Box(tuple(at), tuple(lo + size for lo, size in zip(at, record.shape, strict=True)))


def _tensor(name: str, found: list[tuple[str, TensorRecord, Box]]) -> TensorRecord:
    """Returns the tensor of these chunks (rule 1)."""
    file, first, _ = found[0]
    for other, record, _ in found:
        if record.dtype != first.dtype or len(record.shape) != len(first.shape):
            raise FormatError(
                f"{other}: {name} is {record.dtype} of {len(record.shape)} dimensions, and "
                f"{first.dtype} of {len(first.shape)} in {file}"
            )
    shape = tuple(max(his) for his in zip(*(box.hi for _, _, box in found), strict=True))
    if prod(size or 1 for size in shape) >= ELEMENTS:
        raise HostileError(f"{file}: {name} has more elements than torch can count")
    placed = [(record, box) for _, record, box in found if box]
    check_tiling(name, shape, [box for _, box in placed])
    pieces = [
        StoredPiece(Piece.packed(box), stored.extent)
        for record, box in placed
        for stored in record.pieces
    ]
    return replace(first, shape=shape, pieces=PieceTable(pieces))
