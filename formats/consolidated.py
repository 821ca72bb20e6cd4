"""Llama's files as Meta publishes them: `consolidated.00.pth`, one file for each parallel rank.

Each file has all names, and of most tensors a cut. The layers of the published model
(https://github.com/meta-llama/llama-models, models/llama3/model.py) decide the dimension:

| layers | cut |
|---|---|
| attention.wq, wk, wv; feed_forward.w1, w3; output | rows (ColumnParallelLinear) |
| attention.wo; feed_forward.w2 | columns (RowParallelLinear) |
| tok_embeddings | rows (Llama 3) or columns (before), by the length of norm.weight |
| norms, rope.freqs | none: each file has the whole, and the first one counts |

A model with other layers, such as Llama 4's experts, is refused: each file is readable by its name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from formats import torch_save
from formats.catalog import Catalog, Pieces, PieceTable, StoredPiece, TensorRecord
from formats.errors import CorruptError, FormatError, UnsupportedError
from formats.joined import Part, join_catalogs
from formats.storage import Reader
from sharding.layout import Box, Piece

FILE = re.compile(r"consolidated\.([0-9]{2,4})\.pth")
_CUTS = (
    (re.compile(r"(layers\.[0-9]+\.(attention\.w[qkv]|feed_forward\.w[13])|output)\.weight"), 0),
    (re.compile(r"layers\.[0-9]+\.(attention\.wo|feed_forward\.w2)\.weight"), 1),
    (re.compile(r"(layers\.[0-9]+\.(attention|ffn)_norm|norm)\.weight|rope\.freqs"), None),
)
_EMBEDDINGS = "tok_embeddings.weight"


def read(reader: Reader) -> Catalog:
    """Reads the catalog of a folder: the directories and pickles of its files.

    Raises:
        UnsupportedError: the cut of a tensor of several files is unknown.
        CorruptError: a file is missing.
        FormatError: the files do not fit together, or a file is invalid.
    """
    names = sorted(filter(FILE.fullmatch, reader.names()), key=_number)
    if [_number(name) for name in names] != [*range(len(names))]:
        raise CorruptError(
            f"{reader.url}: consolidated files are missing: only {', '.join(names)} are there; "
            "copy "
            "all of them"
        )
    parts = [torch_save.read(reader, name) for name in names]
    if len(parts) == 1:
        return join_catalogs("consolidated", [Part((), parts[0])])
    for part, name in zip(parts, names, strict=True):
        if set(part.tensors) != set(parts[0].tensors) or part.aliases:
            raise FormatError(f"{name}: it has other names than {names[0]}; open each by its name")
    tensors = {name: _tensor(name, parts) for name in parts[0].tensors}
    others = [name for part, name in zip(parts, names, strict=True) if part.tree != parts[0].tree]
    return Catalog(
        format="consolidated",
        tensors=tensors,
        tree=parts[0].tree,
        files=tuple(file for part in parts for file in part.files),
        parts=tuple(("", part) for part in parts),
        notes=(f"the values are those of {names[0]}, and others in {', '.join(others)}",)
        if others
        else (),
    )


def _number(name: str) -> int:
    match = FILE.fullmatch(name)
    return int(match[1]) if match else -1


def _tensor(name: str, parts: Sequence[Catalog]) -> TensorRecord:
    records = [part.tensors[name] for part in parts]
    first, files = records[0], [part.files[0].name for part in parts]
    dim = _dim(name, parts[0])
    for record, file in zip(records, files, strict=True):
        if record.shape != first.shape or record.dtype != first.dtype:
            raise FormatError(
                f"{file}: {name} has another shape or dtype than in {files[0]}; open each by its "
                "name"
            )
    if dim is None:
        return first
    if dim >= len(first.shape):
        raise FormatError(f"{files[0]}: {name} has {len(first.shape)} dimensions, 2 are expected")
    size = first.shape[dim]
    shape = (*first.shape[:dim], size * len(parts), *first.shape[dim + 1 :])
    pieces: list[StoredPiece] = []
    for at, record in enumerate(records):
        lo = tuple(at * size if each == dim else 0 for each in range(len(shape)))
        pieces += _move(record.pieces, lo)
    return first._replace(shape=shape, pieces=PieceTable(pieces))


def _move(pieces: Pieces, lo: tuple[int, ...]) -> list[StoredPiece]:
    """Returns pieces whose boxes begin at `lo`."""
    moved = []
    for piece, extent in pieces:
        box = Box(
            tuple(a + b for a, b in zip(piece.box.lo, lo, strict=True)),
            tuple(a + b for a, b in zip(piece.box.hi, lo, strict=True)),
        )
        moved.append(StoredPiece(Piece(box, piece.at, piece.strides), extent))
    return moved


def _dim(name: str, part: Catalog) -> int | None:
    """Returns the dimension that is cut; None for a whole tensor."""
    for pattern, dim in _CUTS:
        if pattern.fullmatch(name):
            return dim
    norm = part.tensors.get("norm.weight")
    shape = part.tensors[name].shape
    if name == _EMBEDDINGS and norm is not None and len(shape) == 2:
        return 0 if shape[1:] == norm.shape else 1
    raise UnsupportedError(
        f"{part.files[0].name}: the published layout does not say how {name} is cut over the "
        "files; open each file by its name, and put the parts together by a mapping"
    )
