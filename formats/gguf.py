"""Reads and plans GGUF files, the format of llama.cpp: a header of typed values, and tensors.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian:
versions 2 and 3 are read, 3 is written. Rules:

1. Tensors have their names. The file's values are a dict under the key `gguf` of the tree. A file
   from another format has none, not even an architecture.
2. A tensor of a quantised type is read as stored: bytes, whose last dimension has the bytes of a
   row of blocks. The metadata has `gguf.quantised`, a JSON object from its name to its type and its
   true shape. A tensor to write is F32, F16, BF16, F64 or a signed integer, or such bytes. Any
   other dtype is refused by name.
3. Integers and floats of the values are Python's. The metadata has `gguf.types`, a JSON object with
   the type of each value that a writer would not choose again.
4. Text of the values may have bytes that are not UTF-8: tokens may be parts of characters. Such a
   byte is half a surrogate pair, as in Python's names of files, and is written as it was.
5. Numbers in the header size nothing before they are compared with the file and the limits.
6. ggml refuses names of 64 bytes and more, and more than 4 dimensions, so they are not written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from struct import Struct, pack, unpack
from struct import error as StructError
from typing import NamedTuple

from formats import joined
from formats.catalog import (
    Catalog,
    Extent,
    FilePlan,
    FileRecord,
    Key,
    Outgoing,
    OutgoingTensor,
    Part,
    PieceTable,
    StoredPiece,
    TensorRecord,
    TensorRef,
    Tree,
    check_inside,
    encode_name,
    plain_names,
)
from formats.dtypes import BY_NAME, DType
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.limits import DIMENSIONS, ELEMENTS, Names, check, current, decode_object
from formats.storage import Reader
from sharding.layout import Box, Piece

GGUF = "gguf"
"""The name of the format, and the key of the values in the tree."""
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGN_BYTES = 32
"""Tensors begin at multiples of so many bytes, unless `general.alignment` has another number."""
ALIGNMENT = "general.alignment"
QUANTISED, TYPES = "gguf.quantised", "gguf.types"
"""Keys of the metadata (rules 2 and 3)."""
_BLOCK_BYTES = 1 << 20
_DEPTH = 8

TENSOR_TYPES = {
    0: "F32",
    1: "F16",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    30: "BF16",
}
"""The types of tensors that are dtypes, by number, with the names of `formats.dtypes`."""


class BlockType(NamedTuple):
    """A quantised type: so many elements of a row are one block of so many bytes."""

    name: str
    elements: int
    nbytes: int

    def byte_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the stored bytes. Rows are whole blocks."""
        return (*shape[:-1], shape[-1] // self.elements * self.nbytes)


BLOCK_TYPES = {
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}
"""The quantised types by number, as in ggml.h."""

STRING, ARRAY = 8, 9
CODES = {
    "UINT8": "B",
    "INT8": "b",
    "UINT16": "H",
    "INT16": "h",
    "UINT32": "I",
    "INT32": "i",
    "FLOAT32": "f",
    "BOOL": "?",
    "STRING": "",
    "ARRAY": "",
    "UINT64": "Q",
    "INT64": "q",
    "FLOAT64": "d",
}
"""The types of values in the order of their numbers; those of numbers with the letter of `struct`.
"""
VALUE_TYPES = tuple(CODES)
_U32, _U64 = Struct("<I"), Struct("<Q")


def read(reader: Reader, name: str) -> Catalog:
    """Reads the catalog of the file `name`: its header.

    Raises:
        CorruptError: the file is truncated, or bytes follow its tensors.
        UnsupportedError: the file is big-endian, of version 1, or has a type that is not known.
        HostileError: tensors overlap, or a number is absurd.
        FormatError: the header is invalid in another way.
    """
    header = _Header(reader, name)
    kinds: dict[str, str] = {}
    values: dict[Key, Tree] = {}
    count = header.begin()
    for _ in range(header.number(_U64)):
        key = header.text()
        if key in values:
            raise FormatError(f"{name}: two values are named {key!r:.200}")
        kind = header.number(_U32)
        values[key], kinds[key] = header.value(kind), header.last_kind
    entries = [header.entry() for _ in range(count)]
    align = values.get(ALIGNMENT, ALIGN_BYTES)
    if type(align) is not int or not 1 <= align <= 1 << 20 or align & (align - 1):
        raise FormatError(f"{name}: {ALIGNMENT} is {align!r:.80}, not a power of two")
    start = -(-header.at // align) * align
    tensors = _tensors(entries, start, align, header)
    metadata = {QUANTISED: _describe_blocks(entries), TYPES: _unusual(values, kinds)}
    tree: dict[Key, Tree] = {tensor: TensorRef(tensor) for tensor in tensors}
    if values and GGUF in tree:
        raise UnsupportedError(f"{name}: a tensor is named {GGUF!r}, as the values here; rename it")
    if values:
        tree[GGUF] = values
    return Catalog(
        GGUF,
        tensors,
        tree,
        (FileRecord(name, header.size),),
        metadata={key: text for key, text in metadata.items() if text != "{}"},
    )


SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
"""The name of a file of a split model: its number, from 1 on, and the number of all."""


def read_split(reader: Reader) -> Catalog:
    """Reads the catalog of a folder with the files of one split model.

    The values are those of the first file, without those that number the files.

    Raises:
        FormatError: a file is missing, or the folder has several models. Others are those of
            `read`.
    """
    present = [name for name in reader.names() if name.endswith(".gguf")]
    splits = [match for name in present if (match := SPLIT.fullmatch(name))]
    names = [match[0] for match in sorted(splits, key=lambda match: int(match[2]))]
    if len({(match[1], match[3]) for match in splits}) > 1:
        raise FormatError(f"{reader.url}: files of several models: {', '.join(names[:4])}")
    if len(names) != int(splits[0][3]):
        raise FormatError(
            f"{reader.url}: of {splits[0][3]} files only {', '.join(names)} are there"
        )
    parts = [read(reader, name) for name in names]
    trees: list[dict[Key, Tree]] = [{name: TensorRef(name) for name in p.tensors} for p in parts]
    first = parts[0].tree.get(GGUF) if isinstance(parts[0].tree, dict) else None
    if isinstance(first, dict):
        own = {key: item for key, item in first.items() if not str(key).startswith("split.")}
        trees[0][GGUF] = own
    blocks = [json.loads(part.metadata.get(QUANTISED, "{}")) for part in parts]
    types = json.loads(parts[0].metadata.get(TYPES, "{}"))
    declared = {
        QUANTISED: json.dumps({name: each[name] for each in blocks for name in each}),
        TYPES: json.dumps({key: types[key] for key in types if not key.startswith("split.")}),
    }
    unread = tuple(name for name in present if name not in names)
    every = [
        joined.Part((), replace(part, tree=tree)) for part, tree in zip(parts, trees, strict=True)
    ]
    metadata = {key: text for key, text in declared.items() if text != "{}"}
    return replace(joined.join_catalogs(GGUF, every, metadata=metadata), unread=unread)


def type_of(value: Tree) -> str | None:
    """Returns the type that a writer chooses for a value: its name, or `ARRAY:` and that of items.

    None for a value that GGUF lacks.

    >>> type_of(3), type_of(-3), type_of(0.5), type_of(0.1), type_of(["a"]), type_of(None)
    ('UINT32', 'INT32', 'FLOAT32', 'FLOAT64', 'ARRAY:STRING', None)
    """
    if isinstance(value, bool):
        return "BOOL"
    if isinstance(value, int):
        return next((k for k in ("UINT32", "INT32", "UINT64", "INT64") if _holds(k, value)), None)
    if isinstance(value, float):
        return "FLOAT32" if unpack("<f", _f32(value))[0] == value else "FLOAT64"
    if isinstance(value, str):
        return "STRING"
    if not isinstance(value, list):
        return None
    kinds = {type_of(each) for each in value}
    if kinds <= {"UINT32", "INT32"} and all(_holds("INT32", each) for each in value):
        kinds = {"INT32"} if value else {"STRING"}
    if kinds == {"FLOAT32", "FLOAT64"}:
        kinds = {"FLOAT64"}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return None if kind is None or kind.startswith("ARRAY") else f"ARRAY:{kind}"


def _f32(value: float) -> bytes:
    try:
        return Struct("<f").pack(value)
    except OverflowError:
        return b"\0\0\xc0\x7f"  # a NaN, which no number equals


def _holds(kind: str, value: object) -> bool:
    bits = int(kind[-2:])
    lo, hi = (0, 1 << bits) if kind[0] == "U" else (-(1 << bits - 1), 1 << (bits - 1))
    return isinstance(value, int) and lo <= value < hi


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor in the header."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    """Bytes from the beginning of the data."""

    @property
    def stored(self) -> tuple[DType, tuple[int, ...]]:
        """The dtype and the shape of the stored elements."""
        block = BLOCK_TYPES.get(self.kind)
        if block is None:
            return BY_NAME[TENSOR_TYPES[self.kind]], self.shape
        return BY_NAME["U8"], block.byte_shape(self.shape)


class _Header:
    """The header, read from its beginning on in blocks."""

    def __init__(self, reader: Reader, file: str) -> None:
        self._reader, self.file = reader, file
        self.size = reader.size(file)
        self.at = 0
        self.last_kind = ""
        """The type of the last value, in the form of `type_of`."""
        self.names = Names(file, self.size)
        self._block = (0, b"")
        self._values = 0

    def begin(self) -> int:
        """Reads magic, version and number of tensors; returns the number."""
        magic, version = self.take(4), self.number(_U32)
        if magic != MAGIC:
            raise FormatError(f"{self.file}: not a GGUF file")
        if version not in VERSIONS:
            order, remedy = f"of version {version}", "convert it again with a newer llama.cpp"
            if version >= 1 << 16:
                order, remedy = "big-endian", "`gguf-convert-endian FILE little` of gguf turns it"
            raise UnsupportedError(
                f"{self.file}: this GGUF file is {order}; versions 2 and 3, little-endian, are "
                f"read: {remedy}"
            )
        return self.number(_U64)

    def take(self, nbytes: int) -> bytes:
        """Returns the next bytes. Raises CorruptError if the file has fewer."""
        if nbytes > self.size - self.at:
            raise CorruptError(
                f"{self.file}: its header needs {nbytes} bytes from byte {self.at} on, the file "
                f"has {self.size}: it was truncated; restore it from another copy"
            )
        check("header_bytes", self.at + nbytes, self.file)
        start, block = self._block
        if not start <= self.at or self.at + nbytes > start + len(block):
            length = min(self.size - self.at, max(nbytes, _BLOCK_BYTES))
            start, block = self._block = self.at, self._reader.read(self.file, self.at, length)
        self.at += nbytes
        return block[self.at - nbytes - start : self.at - start]

    def number(self, struct: Struct) -> int:
        (found,) = struct.unpack(self.take(struct.size))
        return int(found)

    def text(self, errors: str = "backslashreplace") -> str:
        return self.take(self.number(_U64)).decode("utf-8", errors)

    def value(self, kind: int, depth: int = 0) -> Tree:
        self._count(1)
        if kind == STRING:
            self.last_kind = "STRING"
            return self.text("surrogateescape")
        if kind == ARRAY:
            return self._array(depth)
        return self._numbers(kind, 1)[0]

    def entry(self) -> _Entry:
        """Reads the description of a tensor."""
        name, dimensions = self.text(), self.number(_U32)
        self.names.tensor(len(name))
        if dimensions > DIMENSIONS:
            raise HostileError(
                f"{self.file}: {name!r:.200} has {dimensions} dimensions, and the most are "
                f"{DIMENSIONS}"
            )
        sizes = unpack(f"<{dimensions}Q", self.take(8 * dimensions))
        kind, offset = self.number(_U32), self.number(_U64)
        shape, least = sizes[::-1], 1
        for size in shape:
            least *= size or 1
        block = BLOCK_TYPES.get(kind)
        if least >= ELEMENTS:
            raise HostileError(f"{self.file}: {name!r:.200} has absurdly many elements")
        if block is None and kind not in TENSOR_TYPES:
            raise UnsupportedError(
                f"{self.file}: {name!r:.200} has the type {kind}, which this version does not know"
            )
        if block is not None and (not shape or shape[-1] % block.elements):
            raise FormatError(
                f"{self.file}: {name!r:.200} is {block.name} of shape {shape}: a row is not whole "
                f"blocks of {block.elements}"
            )
        return _Entry(name, shape, kind, offset)

    def _array(self, depth: int) -> Tree:
        kind, count = self.number(_U32), self.number(_U64)
        if count > self.size - self.at or depth > _DEPTH:
            raise CorruptError(
                f"{self.file}: an array of {count} values reaches beyond the file: it was "
                "truncated; restore it from another copy"
            )
        self._count(count)
        items: list[Tree]
        if kind in (STRING, ARRAY):
            items = [self.value(kind, depth + 1) for _ in range(count)]
            inner = "STRING" if kind == STRING else "ARRAY"
        else:
            items = self._numbers(kind, count)
            inner = self.last_kind
        self.last_kind = f"ARRAY:{inner}"
        return items

    def _numbers(self, kind: int, count: int) -> list[Tree]:
        if kind >= len(VALUE_TYPES):
            raise FormatError(f"{self.file}: a value has the type {kind}, which is not one of GGUF")
        name = VALUE_TYPES[kind]
        code = Struct(f"<{CODES[name]}")
        self.last_kind = name
        data = self.take(count * code.size)
        return list(unpack(f"<{count}{CODES[name]}", data))

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > current().json_values:
            check("json_values", self._values, self.file)


def _tensors(
    entries: list[_Entry], start: int, align: int, header: _Header
) -> dict[str, TensorRecord]:
    """Returns the tensors, after the check that they lie in the file and share no bytes."""
    tensors: dict[str, TensorRecord] = {}
    spans = [(start, start, "the header")]
    for entry in entries:
        dtype, shape = entry.stored
        extent = Extent(header.file, start + entry.offset, dtype.nbytes(shape))
        check_inside(f"{entry.name!r:.200}", extent, header.size)
        if entry.name in tensors:
            raise FormatError(f"{header.file}: two tensors are named {entry.name!r:.200}")
        piece = Piece.packed(Box.whole(shape))
        pieces = PieceTable([StoredPiece(piece, extent)] if piece.box else [])
        tensors[entry.name] = TensorRecord(entry.name, shape, dtype, pieces)
        if extent.nbytes:
            spans.append((extent.offset, extent.offset + extent.nbytes, entry.name))
    spans.sort()
    for (_, before, one), (lo, _, other) in pairwise(spans):
        if lo < before:
            raise HostileError(f"{header.file}: {one!r:.200} and {other!r:.200} share bytes")
    end = -(-spans[-1][1] // align) * align
    if header.size > end:
        raise CorruptError(
            f"{header.file}: {header.size - end} bytes follow its tensors: bytes were appended; "
            "restore it from another copy"
        )
    return tensors


def _describe_blocks(entries: list[_Entry]) -> str:
    blocks = {
        entry.name: [BLOCK_TYPES[entry.kind].name, list(entry.shape)]
        for entry in entries
        if entry.kind in BLOCK_TYPES
    }
    return json.dumps(blocks, ensure_ascii=False)


def _unusual(values: Mapping[Key, Tree], kinds: Mapping[str, str]) -> str:
    """Returns the types of the values for which a writer would choose others, as JSON."""
    found = {key: kind for key, kind in kinds.items() if type_of(values[key]) != kind}
    return json.dumps(found, ensure_ascii=False)


METADATA = (QUANTISED, TYPES)
"""The keys of the metadata that a file has in its values and types."""
NAME_BYTES = 63
MOST_DIMENSIONS = 4
_NUMBERS = {name: number for number, name in TENSOR_TYPES.items()}
_BLOCKS = {block.name: number for number, block in BLOCK_TYPES.items()}


def plan(name: str, state: Outgoing) -> FilePlan:
    """Plans the GGUF file `name` with the tensors and the values of a state.

    Raises UnsupportedError if GGUF has no such dtype, name or shape, FormatError if a name is not
    Unicode text.
    """
    quantised = _object(state, QUANTISED)
    values, _ = _values(state)
    head = MAGIC + pack("<IQQ", VERSIONS[-1], len(state.tensors), len(values)) + b"".join(values)
    entries: list[bytes] = []
    parts: list[Part] = []
    offset = 0
    for tensor in state.tensors.values():
        kind, shape = _kind(name, tensor, quantised)
        sizes = pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        entries.append(_text(tensor.name) + sizes + pack("<IQ", kind, offset))
        padding = -tensor.nbytes % ALIGN_BYTES
        parts += [tensor, bytes(padding)] if padding else [tensor]
        offset += tensor.nbytes + padding
    head += b"".join(entries)
    return FilePlan(name, [head + bytes(-len(head) % ALIGN_BYTES), *parts])


def omissions(state: Outgoing) -> tuple[str, ...]:
    """Returns the key paths of values and the tied names of a state, which a file lacks."""
    values, lost = _values(state)
    rest = state.tree
    if values and isinstance(rest, dict):
        rest = {key: tree for key, tree in rest.items() if key != GGUF}
    return (*plain_names(rest), *lost, *state.aliases)


def _kind(
    file: str, tensor: OutgoingTensor, quantised: Mapping[str, object]
) -> tuple[int, tuple[int, ...]]:
    """Returns the number of a tensor's type, and its shape in the header."""
    name, shape, kind = tensor.name, tensor.shape, _NUMBERS.get(tensor.dtype.name)
    described = quantised.get(name)
    if tensor.dtype.name == "U8" and isinstance(described, list) and len(described) == 2:
        number = _BLOCKS.get(str(described[0]), -1)
        true_shape = tuple(described[1]) if isinstance(described[1], list) else ()
        if number >= 0 and BLOCK_TYPES[number].byte_shape(true_shape) == shape:
            kind, shape = number, true_shape
    if kind is None:
        raise UnsupportedError(
            f"{file}: GGUF has no {tensor.dtype}, of {name}; cast it (dtype='float16'), or "
            "leave it out (exclude=)"
        )
    if len(encode_name(name)) > NAME_BYTES or len(shape) > MOST_DIMENSIONS:
        raise UnsupportedError(
            f"{file}: {name} of shape {list(shape)}: in GGUF names have at most {NAME_BYTES} bytes "
            f"and tensors at most {MOST_DIMENSIONS} dimensions; leave it out (exclude=)"
        )
    return kind, shape


def _object(state: Outgoing, key: str) -> dict[str, object]:
    """Returns the JSON object of a metadata key; an empty one without it."""
    try:
        return dict(decode_object(state.metadata.get(key, "{}"), key))
    except FormatError:
        return {}  # the metadata of a user who has the same key


def _values(state: Outgoing) -> tuple[list[bytes], list[str]]:
    """Returns the encoded values, and the names of those that GGUF lacks."""
    tree, types = state.tree, _object(state, TYPES)
    values = tree.get(GGUF) if isinstance(tree, dict) else None
    kept, lost = [], []
    for key, value in values.items() if isinstance(values, dict) else ():
        kind = types.get(str(key)) or type_of(value)
        if key == ALIGNMENT or isinstance(value, TensorRef):
            continue  # tensors are aligned to the default here, and are no values
        encoded = _encode(key, value, str(kind)) if kind is not None else None
        if encoded is None:
            lost.append(f"{GGUF}.{key}")
        else:
            kept.append(encoded)
    return kept, lost


def _encode(key: Key, value: Tree, kind: str) -> bytes | None:
    """Returns a value with its key and type; None if it is not of this type."""
    name, _, inner = kind.partition(":")
    try:
        head = _text(str(key)) + pack("<I", VALUE_TYPES.index(name))
        if name != "ARRAY":
            return head + _plain(value, name)
        if not isinstance(value, list):
            return None
        counts = pack("<IQ", VALUE_TYPES.index(inner), len(value))
        return head + counts + b"".join(_plain(each, inner) for each in value)
    except (ValueError, TypeError, KeyError, StructError):
        return None


def _plain(value: Tree, kind: str) -> bytes:
    if kind == "STRING":
        return _text(str(value), "surrogateescape")
    return pack(f"<{CODES[kind]}", value)


def _text(text: str, errors: str = "strict") -> bytes:
    data = text.encode("utf-8", errors)
    return pack("<Q", len(data)) + data
