"""Plans GGUF files of version 3: values, and tensors with their names.

Rules (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):

1. The values are those of a GGUF file that was read: the dict `gguf` of the tree, with the types in
   the metadata. A file from another format has none, not even an architecture.
2. A tensor is F32, F16, BF16, F64 or a signed integer, or bytes that the metadata describes as
   quantised. Any other dtype is refused by name.
3. ggml refuses names of 64 bytes and more, and more than 4 dimensions, so they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import error as StructError
from struct import pack

from formats import safetensors_file
from formats.catalog import Key, TensorRef, Tree
from formats.errors import FormatError, UnsupportedError
from formats.file_plan import FilePlan, Part
from formats.gguf import (
    ALIGN_BYTES,
    ALIGNMENT,
    BLOCK_TYPES,
    CODES,
    GGUF,
    MAGIC,
    QUANTISED,
    TENSOR_TYPES,
    TYPES,
    VALUE_TYPES,
    VERSIONS,
    type_of,
)
from formats.outgoing import Outgoing, OutgoingTensor, encoded_name
from formats.strict_json import decode_object

METADATA = (QUANTISED, TYPES)
"""The keys of the metadata that a file has in its values and types."""
NAME_BYTES = 63
DIMENSIONS = 4
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


def left_out(state: Outgoing) -> tuple[str, ...]:
    """Returns the key paths of values and the tied names of a state, which a file lacks."""
    values, lost = _values(state)
    rest = state.tree
    if values and isinstance(rest, dict):
        rest = {key: tree for key, tree in rest.items() if key != GGUF}
    return (*safetensors_file.left_out(rest), *lost, *state.aliases)


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
    if len(encoded_name(name)) > NAME_BYTES or len(shape) > DIMENSIONS:
        raise UnsupportedError(
            f"{file}: {name} of shape {list(shape)}: in GGUF names have at most {NAME_BYTES} bytes "
            f"and tensors at most {DIMENSIONS} dimensions; leave it out (exclude=)"
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
    found, lost = [], []
    for key, value in values.items() if isinstance(values, dict) else ():
        kind = types.get(str(key)) or type_of(value)
        if key == ALIGNMENT or isinstance(value, TensorRef):
            continue  # tensors are aligned to the default here, and are no values
        encoded = _encoded(key, value, str(kind)) if kind is not None else None
        if encoded is None:
            lost.append(f"{GGUF}.{key}")
        else:
            found.append(encoded)
    return found, lost


def _encoded(key: Key, value: Tree, kind: str) -> bytes | None:
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
