"""Reads and writes one safetensors file as a checkpoint: whole tensors with names.

The format is flat. Rules for content that it lacks:

1. A tensor is stored under its name, without its nest. Plain values (a step count, learning rates)
   cannot be stored: `formats.catalog.plain_names` returns their key paths, for the caller to show.
2. One of tied names is stored, as by transformers, which ties them again after a load. The metadata
   has the other names under `ckpt.tied`, a JSON object from name to stored name. Files of
   `safetensors.torch.save_model`, with a metadata entry for each tied name, are read too: an empty
   `ckpt.tied` tells that entries of this form are text.
3. A dtype that safetensors lacks is stored as its carrier (see formats/dtypes.py). The metadata has
   the true name under `ckpt.dtypes`, a JSON object from tensor to dtype. Other readers see the
   carrier: complex128 is F64 with a last dimension of 2, complex32 is F16. float4_e2m1fn_x2 is F4,
   which counts both numbers of a byte: its last dimension is twice as long.
4. Larger elements come first, so that each tensor is aligned to the size of its elements.

The shards of a Hugging Face folder are such files.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from formats.catalog import (
    Catalog,
    Extent,
    FilePlan,
    FileRecord,
    Outgoing,
    OutgoingTensor,
    PieceTable,
    StoredPiece,
    TensorRecord,
    TensorRef,
    Tree,
)
from formats.dtypes import BY_NAME, DType
from formats.errors import FormatError, UnsupportedError
from formats.safetensors.header import BITS, Entry, Header, build, read_header
from formats.storage import Reader
from formats.strict_json import decode_object
from sharding.layout import Box, Piece

TIED_KEY = "ckpt.tied"
"""Metadata: a JSON object from each tied name to the stored name."""

PACKED = "F4_E2M1X2"
"""The dtype of two numbers a byte, which is F4 in a header."""

DTYPES_KEY = "ckpt.dtypes"
"""Metadata: a JSON object from each carried tensor to the name of its true dtype."""


@dataclass(frozen=True, slots=True)
class FileContents:
    """The content of one safetensors file, with ckpt's own metadata keys interpreted."""

    tensors: Mapping[str, TensorRecord]
    aliases: Mapping[str, str]
    metadata: Mapping[str, str]
    record: FileRecord


def read(reader: Reader, name: str) -> Catalog:
    """Reads the catalog of a safetensors file: only its header.

    Raises:
        CorruptError: the file is shorter or longer than its header says.
        HostileError: no writer makes such a header; see formats/safetensors/header.py.
        UnsupportedError: a tensor has elements smaller than a byte.
        FormatError: the file is not a safetensors file.
    """
    contents = read_contents(reader, name)
    return Catalog(
        format="safetensors",
        tensors=contents.tensors,
        tree=flat_tree(contents.tensors, contents.aliases),
        files=(contents.record,),
        aliases=contents.aliases,
        metadata=contents.metadata,
    )


def read_contents(reader: Reader, name: str) -> FileContents:
    """Reads the content of a file, of which `read` makes a catalog. Raises as `read` does."""
    header = read_header(reader, name)
    metadata = dict(header.metadata)
    true_dtypes = _json_object(metadata.pop(DTYPES_KEY, "{}"), DTYPES_KEY, name)
    tied = metadata.pop(TIED_KEY, None)
    if tied is None:
        aliases = _aliases_of_save_model(header)
        metadata = {key: text for key, text in metadata.items() if key not in aliases}
    else:
        aliases = _json_object(tied, TIED_KEY, name)
        _check_aliases(aliases, header, name)
    for carried in true_dtypes:
        if carried not in header.entries:
            raise FormatError(f"{name}: {DTYPES_KEY} in its metadata names {carried}, not a tensor")
    tensors = {
        entry.name: _record(entry, true_dtypes.get(entry.name), name, header.data_offset)
        for entry in header.entries.values()
    }
    size = header.data_offset + header.data_bytes
    return FileContents(tensors, aliases, metadata, FileRecord(name, size))


def plan(name: str, state: Outgoing) -> FilePlan:
    """Plans the safetensors file `name` with the tensors of a state.

    Raises:
        FormatError: two tensors have one name, or a name is not text.
        UnsupportedError: a header cannot hold so many tensors.
    """
    return plan_tensors(name, list(state.tensors.values()), state.aliases, state.metadata)


def plan_tensors(
    name: str,
    tensors: Sequence[OutgoingTensor],
    aliases: Mapping[str, str],
    metadata: Mapping[str, str],
    start: str = "",
) -> FilePlan:
    """Plans a safetensors file with these tensors and their aliases. Raises as `plan` does.

    All names begin with `start`, which they lose in the file.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    named = [tensor._replace(name=tensor.name.removeprefix(start)) for tensor in ordered]
    tied = {a.removeprefix(start): b.removeprefix(start) for a, b in aliases.items()}
    header = build(
        [(t.name, *label(t.dtype, t.shape), t.nbytes) for t in named],
        _metadata(named, tied if start else aliases, metadata),
    )
    return FilePlan(name, [header, *ordered])


def label(dtype: DType, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and shape in a header: those of the tensor, or of its carrier (rule 3).

    >>> label(BY_NAME["F4_E2M1X2"], (2, 4)), label(BY_NAME["C128"], (3,))
    (('F4', (2, 8)), ('F64', (3, 2)))
    """
    if dtype.name == PACKED and shape:
        return "F4", (*shape[:-1], 2 * shape[-1])
    if dtype.name in BITS:
        return dtype.name, shape
    return dtype.carrier, dtype.carrier_shape(shape)


def is_carried(dtype: DType, shape: tuple[int, ...]) -> bool:
    """Whether other readers of safetensors see another dtype, that of the carrier (rule 3)."""
    return label(dtype, shape)[0] not in (dtype.name, "F4")


def flat_tree(tensors: Mapping[str, TensorRecord], aliases: Mapping[str, str]) -> Tree:
    """Returns the tree of a flat format: each name, also tied ones, with its tensor."""
    return {
        **{name: TensorRef(name) for name in tensors},
        **{alias: TensorRef(name) for alias, name in aliases.items()},
    }


def _record(entry: Entry, true_dtype: str | None, file: str, data_offset: int) -> TensorRecord:
    dtype = BY_NAME.get(true_dtype or entry.dtype)
    shape = entry.shape
    if entry.dtype == "F4" and true_dtype is None and shape and shape[-1] % 2 == 0:
        dtype, shape = BY_NAME[PACKED], (*shape[:-1], shape[-1] // 2)
    if dtype is None:
        raise UnsupportedError(
            f"{file}: {entry.name} has dtype {true_dtype or entry.dtype}, which cannot be read as "
            f"a tensor; known are {', '.join(BY_NAME)}"
        )
    if true_dtype is not None:
        shape = _true_shape(entry, dtype, file)
    nbytes = entry.end - entry.begin
    whole = Piece.packed(Box.whole(shape))
    stored = StoredPiece(whole, Extent(file, data_offset + entry.begin, nbytes))
    return TensorRecord(entry.name, shape, dtype, PieceTable([stored]))


def _true_shape(entry: Entry, dtype: DType, file: str) -> tuple[int, ...]:
    """Returns the true shape of a carried tensor."""
    widened = BY_NAME[dtype.carrier].itemsize != dtype.itemsize
    shape = entry.shape[:-1] if widened else entry.shape
    if entry.dtype != dtype.carrier or entry.shape != dtype.carrier_shape(shape):
        raise FormatError(
            f"{file}: {entry.name} is {entry.dtype} of shape {list(entry.shape)}; its metadata has "
            f"it as {dtype.name}, which is carried as {dtype.carrier}"
        )
    return shape


def _json_object(text: str, key: str, file: str) -> dict[str, str]:
    """Returns the JSON object from text to text in a metadata entry of ckpt's."""
    found: dict[str, str] = {}
    for name, value in decode_object(text, f"{file}: {key} in its metadata").items():
        if not isinstance(value, str):
            raise FormatError(
                f"{file}: {key} in its metadata has {value!r:.80} for {name}, which is not text"
            )
        found[name] = value
    return found


def _check_aliases(aliases: Mapping[str, str], header: Header, file: str) -> None:
    for alias, stored in aliases.items():
        if stored not in header.entries or alias in header.entries:
            raise FormatError(
                f"{file}: {TIED_KEY} in its metadata ties {alias} to {stored}; {stored} must be a "
                f"tensor of the file, and {alias} must not"
            )


def _aliases_of_save_model(header: Header) -> dict[str, str]:
    """Returns the tied names of `safetensors.torch.save_model`, which stores each in the metadata.

    All writers store the key `format`, so it is not a tied name even if a tensor is called `pt`.
    """
    metadata = header.metadata.items()
    return {key: text for key, text in metadata if _looks_tied(key, text, header.entries)}


def _looks_tied(key: str, text: str, names: Container[str]) -> bool:
    return key != "format" and text in names and key not in names


def _metadata(
    tensors: Sequence[OutgoingTensor], aliases: Mapping[str, str], metadata: Mapping[str, str]
) -> dict[str, str]:
    """Returns the metadata of a file with these tensors, with ckpt's own keys only if needed."""
    names = {tensor.name for tensor in tensors}
    tied = {a: name for a, name in aliases.items() if name in names and a not in names}
    looks_tied = any(_looks_tied(key, text, names) for key, text in metadata.items())
    carried = {t.name: t.dtype.name for t in tensors if is_carried(t.dtype, t.shape)}
    found = {"format": "pt", **metadata}
    for key, value, is_needed in ((TIED_KEY, tied, looks_tied), (DTYPES_KEY, carried, False)):
        found.pop(key, None)
        if value or is_needed:
            found[key] = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return found
