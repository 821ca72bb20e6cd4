"""The safetensors format: its header, and one file of it as a checkpoint of whole tensors.

[Note: header]
Files of other formats begin with such a header too. A file is `length | header | data`: the length
of the header as 8 bytes, little-endian; a JSON object from tensor name to
`{"dtype", "shape", "data_offsets": [begin, end]}`; then the data. The rules of the format
(https://huggingface.co/docs/safetensors), each with its reason:

1. A header has at most `Limits.header_bytes`: a file cannot make a reader allocate without bound.
   A written header has at most `MAX_HEADER_BYTES`.
2. Each key occurs once: two readers cannot see two different files.
3. `end - begin` is exactly the bytes of shape and dtype: a wrong shape is found before the data is
   read.
4. The tensors cover the data section without holes, overlaps or bytes behind it: no bytes can
   hide, and the size of a file reveals a truncation.
5. Metadata is text: a reader executes nothing of a header.

Blanks may follow the JSON, so the data can begin at any alignment. The entries of the JSON may come
in any order and may have unknown keys.

[Note: contents]
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
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import NamedTuple

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
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.limits import ELEMENTS, HEADER_DIMENSIONS, check, decode_object
from formats.storage import Reader
from sharding.layout import Box, Piece

MAX_HEADER_BYTES = 100_000_000
"""The longest header that is written, without its 8-byte length: the limit of the library."""

PREFIX_BYTES = 8
"""The bytes of the length before the header."""

METADATA_KEY = "__metadata__"
"""The one key of the header that is not a tensor."""

BITS = {
    name: bits
    for bits, names in (
        (64, "F64 I64 U64 C64"),
        (32, "F32 I32 U32"),
        (16, "F16 BF16 I16 U16"),
        (8, "F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I8 U8 BOOL"),
        (6, "F6_E2M3 F6_E3M2"),
        (4, "F4"),
    )
    for name in names.split()
}
"""Bits per element of each dtype of the library. Below 8, a tensor still fills whole bytes."""


class Entry(NamedTuple):
    """One tensor in a header. Its data is the bytes `begin <= byte < end` of the data section."""

    name: str
    dtype: str
    """The safetensors name, a key of `BITS`."""
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header that keeps all the rules above."""

    entries: Mapping[str, Entry]
    """By name, in the order of their data."""
    metadata: Mapping[str, str]
    data_offset: int
    """The first byte of the data section in the file: 8 + the length of the header."""

    @property
    def data_bytes(self) -> int:
        return max((entry.end for entry in self.entries.values()), default=0)


def read_header(reader: Reader, name: str, at: int = 0) -> Header:
    """Reads only the header of a file, which begins at byte `at` of `name`, and checks its size.

    Raises as `parse` does.
    """
    size = reader.size(name) - at
    prefix = reader.read(name, at, min(size, PREFIX_BYTES))
    length = _header_length(prefix, name, size)
    return parse(prefix + reader.read(name, at + PREFIX_BYTES, length), name, size)


def parse(data: bytes, file: str, file_size: int | None = None) -> Header:
    """Returns the header at the start of `data`, and checks all rules above.

    `data` begins with the 8-byte length and the header. With `file_size`, the data section must end
    with the file.

    Raises:
        CorruptError: the file ends too early or too late.
        HostileError: a size is absurd, a key occurs twice, or a byte belongs to no or two tensors.
        UnsupportedError: a dtype is unknown.
        FormatError: the header breaks another rule.

    >>> data = build([("w", "F32", (2, 3), 24)], {})
    >>> parse(data, "model.safetensors", len(data) + 24).entries["w"]
    Entry(name='w', dtype='F32', shape=(2, 3), begin=0, end=24)
    """
    length = _header_length(data[:PREFIX_BYTES], file, file_size)
    data_offset = PREFIX_BYTES + length
    if len(data) < data_offset:
        raise CorruptError(
            f"{file}: the header is {length} bytes long, {len(data) - PREFIX_BYTES} of them are "
            f"there: the file was truncated; restore it from another copy"
        )
    document = decode_object(data[PREFIX_BYTES:data_offset], f"{file}: the header")
    metadata = _metadata(document.pop(METADATA_KEY, None), file)
    entries = [_entry(name, described, file) for name, described in document.items()]
    entries.sort(key=_BEGIN_END)
    _check_covers(entries, file)
    if file_size is not None:
        _check_end(entries, file_size - data_offset, file)
    return Header({entry.name: entry for entry in entries}, metadata, data_offset)


def build(
    entries: Iterable[tuple[str, str, tuple[int, ...], int]],
    metadata: Mapping[str, str],
    align: int = 8,
    reserve_bytes: int = 0,
) -> bytes:
    """Returns the 8-byte length and the header of a file.

    `entries` are name, safetensors dtype, shape and bytes, in the order of the data. Blanks pad the
    result to a multiple of `align` bytes and to at least `reserve_bytes`, so that a later header of
    this size can replace it. Equal input gives equal bytes.

    Raises:
        FormatError: a name occurs twice, a size contradicts its shape, or metadata is not text.
        UnsupportedError: safetensors lacks a dtype, or a header cannot hold so many tensors.
    """
    document: dict[str, object] = {METADATA_KEY: dict(metadata)}
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise FormatError(
                f"the metadata {key!r} is of type {type(text).__name__}; give a text, as by str()"
            )
    at = 0
    for name, dtype, shape, nbytes in entries:
        bits = BITS.get(dtype)
        if bits is None:
            raise UnsupportedError(
                f"{name}: safetensors has no dtype {dtype}; cast it (dtype=), or leave it out "
                "(exclude=)"
            )
        if nbytes * 8 != prod(shape) * bits:
            raise FormatError(f"{name}: {dtype} of shape {shape} does not fill {nbytes} bytes")
        if name in document:
            raise FormatError(f"{name}: this name is taken; give the tensor another one")
        end = at + nbytes
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, end)}
        at = end
    if not metadata:
        del document[METADATA_KEY]
    try:
        encoded = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 40) : error.end + 40]
        raise FormatError(f"a name or text is not Unicode text, near {near!r}") from None
    data_offset = max(PREFIX_BYTES + len(encoded), reserve_bytes)
    data_offset += -data_offset % align
    length = data_offset - PREFIX_BYTES
    if length > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"a header for {len(document)} entries takes {length} bytes, safetensors allows "
            f"{MAX_HEADER_BYTES}; write several files, by more ranks or by max_shard_bytes of a "
            "conversion to a Hugging Face folder, or give shorter names"
        )
    return length.to_bytes(PREFIX_BYTES, "little") + encoded.ljust(length)


_BEGIN_END = itemgetter(3, 4)


def _header_length(prefix: bytes, file: str, file_size: int | None) -> int:
    if len(prefix) < PREFIX_BYTES:
        raise CorruptError(
            f"{file}: the file has {len(prefix)} bytes, a safetensors file at least "
            f"{PREFIX_BYTES + 2}: it was truncated, or is of another kind; restore it from another "
            "copy"
        )
    length = int.from_bytes(prefix, "little")
    check("header_bytes", length, f"{file}: not a safetensors file, or hostile")
    if file_size is not None and PREFIX_BYTES + length > file_size:
        raise CorruptError(
            f"{file}: the header ends at byte {PREFIX_BYTES + length}, the file has {file_size}: "
            "it was truncated, or is not a safetensors file; restore it from another copy"
        )
    return length


def _metadata(found: object, file: str) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise FormatError(f"{file}: {METADATA_KEY} is a {type(found).__name__}, not an object")
    for key, value in found.items():
        if not isinstance(value, str):
            raise FormatError(f"{file}: {METADATA_KEY}[{key!r}] is {value!r}, not text")
    return found


def _entry(name: str, described: object, file: str) -> Entry:
    if not isinstance(described, dict):
        raise FormatError(f"{file}: {name} is described by {described!r:.80}, not by an object")
    try:
        dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    except KeyError as error:
        raise FormatError(f"{file}: {name} has no {error.args[0]} in the header") from None
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise UnsupportedError(
            f"{file}: {name} has dtype {dtype!r:.80}; known are {', '.join(BITS)}"
        )
    if not isinstance(shape, list):
        raise FormatError(f"{file}: {name} has shape {shape!r:.80}, not a list")
    if len(shape) > HEADER_DIMENSIONS:
        raise HostileError(
            f"{file}: {name} has {len(shape)} dimensions, the limit is {HEADER_DIMENSIONS}"
        )
    for size in shape:
        if type(size) is not int or size < 0:
            raise FormatError(f"{file}: {name} has a size of {size!r:.80} in its shape")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise FormatError(f"{file}: {name} has data_offsets {offsets!r:.80}, not [begin, end]")
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise FormatError(f"{file}: {name} has data_offsets {offsets!r:.80}, not 0 <= begin <= end")
    elements = prod(shape)
    if elements * bits != (end - begin) * 8:
        _check_elements(name, shape, file)
        raise FormatError(
            f"{file}: {name} is {dtype} of shape {shape!r:.80}, {elements * bits / 8:g} bytes; its "
            f"data_offsets {offsets} hold {end - begin}"
        )
    if elements == 0 or elements >= ELEMENTS:
        _check_elements(name, shape, file)
    return Entry(name, dtype, tuple(shape), begin, end)


def _check_elements(name: str, shape: Sequence[int], file: str) -> None:
    """Raises HostileError if the product of a shape's sizes, without zeros, is too large."""
    if prod(size for size in shape if size) >= ELEMENTS:
        raise HostileError(f"{file}: {name} has the absurd shape {shape!r:.80}")


def _check_covers(entries: Sequence[Entry], file: str) -> None:
    """Raises HostileError unless the entries, sorted by `begin`, lie end to end from byte 0 on."""
    at, before = 0, "the start of the data"
    for entry in entries:
        if entry.begin > at:
            raise HostileError(
                f"{file}: data bytes {at}:{entry.begin}, between {before} and {entry.name}, "
                f"belong to no tensor"
            )
        if entry.begin < at:
            raise HostileError(
                f"{file}: {before} and {entry.name} overlap in data bytes {entry.begin}:{at}"
            )
        at, before = entry.end, entry.name


def _check_end(entries: Sequence[Entry], data_bytes: int, file: str) -> None:
    """Raises CorruptError unless the last entry ends with the file."""
    end = entries[-1].end if entries else 0
    if end > data_bytes:
        cut = next(entry for entry in entries if entry.end > data_bytes)
        raise CorruptError(
            f"{file}: the header describes {end} bytes of data, the file has {data_bytes}: it was "
            f"truncated within {cut.name}; restore it from another copy"
        )
    if end < data_bytes:
        raise CorruptError(
            f"{file}: {data_bytes - end} bytes follow the last tensor's; they are not part of a "
            f"safetensors file: restore it from another copy"
        )


TIED_KEY = "ckpt.tied"
"""Metadata: a JSON object from each tied name to the stored name."""

PACKED = "F4_E2M1X2"
"""The dtype of two numbers a byte, which is F4 in a header."""

DTYPES_KEY = "ckpt.dtypes"
"""Metadata: a JSON object from each carried tensor to the name of its true dtype."""


def read(reader: Reader, name: str) -> Catalog:
    """Reads the catalog of a safetensors file: only its header.

    Raises:
        CorruptError: the file is shorter or longer than its header says.
        HostileError: no writer makes such a header; see [Note: header].
        UnsupportedError: a tensor has elements smaller than a byte.
        FormatError: the file is not a safetensors file.
    """
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
    return Catalog(
        format="safetensors",
        tensors=tensors,
        tree=flat_tree(tensors, aliases),
        files=(FileRecord(name, header.data_offset + header.data_bytes),),
        aliases=aliases,
        metadata=metadata,
    )


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
        _build_metadata(named, tied if start else aliases, metadata),
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
    entries: dict[str, str] = {}
    for name, value in decode_object(text, f"{file}: {key} in its metadata").items():
        if not isinstance(value, str):
            raise FormatError(
                f"{file}: {key} in its metadata has {value!r:.80} for {name}, which is not text"
            )
        entries[name] = value
    return entries


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


def _build_metadata(
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
