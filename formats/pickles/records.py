"""The parts of a checkpoint's pickle as inert records: tensors, objects, the metadata of DCP.

Frozen substitutes for the classes of torch that occur in checkpoints; torch is not needed. Rules:

1. A record has fields and no behaviour that a file could choose.
2. A `StoredTensor` is checked when it is made. The records of DCP are not: a file chooses the
   content of each field, even after it was set, so a user of a field checks its value.

The originals are in metadata.py and filesystem.py of torch.distributed.checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeGuard

from formats.dtypes import DType
from formats.errors import FormatError, HostileError
from formats.limits import DIMENSIONS, ELEMENTS, KEY_DEPTH, KEY_PARTS

LARGEST_STRIDE = ELEMENTS // 16
"""Strides of so many elements or more are refused: torch could not count them in bytes."""


@dataclass(frozen=True, slots=True)
class Name:
    """A known class or function that the file names. Here it is text and cannot be called."""

    full: str


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of typed storage, such as `torch.FloatStorage`; untyped storages count bytes."""

    dtype: DType


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage of the pickle. Its bytes are the record `data/<key>` of the zip, or `data`."""

    key: str
    dtype: DType
    """The dtype of the elements that `numel` counts."""
    numel: int
    data: bytes | None = field(default=None, repr=False)
    """The bytes of a storage that lies in the pickle itself."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view of a storage that lies inside it. Offset and strides count elements."""

    storage: Storage
    dtype: DType
    at: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Opaque:
    """An object of a class that this package does not know, as its parts. Nothing makes it.

    `formats.pickles.values` decides which parts are shown.
    """

    type: str
    """The class, or the function that makes the object, with its module."""
    arguments: tuple[object, ...] = ()
    state: object = None
    """The attributes, usually a dict."""
    items: list[object] | dict[object, object] | None = None
    """The items of an object that was filled as a list or dict is."""

    def __repr__(self) -> str:
        return f"<{self.type}>"


@dataclass(frozen=True, slots=True)
class Metadata:
    """`torch.distributed.checkpoint.metadata.Metadata`: the whole of a `.metadata` file."""

    state_dict_metadata: object = None
    planner_data: object = None
    storage_data: object = None
    storage_meta: object = None
    version: object = None


@dataclass(frozen=True, slots=True)
class TensorStorageMetadata:
    """One tensor of a DCP checkpoint."""

    properties: object = None
    size: object = None
    chunks: object = None


@dataclass(frozen=True, slots=True)
class TensorProperties:
    """A tensor's dtype, and fields that torch has deprecated. Pickled as a tuple."""

    dtype: object = None
    layout: object = None
    requires_grad: object = None
    memory_format: object = None
    pin_memory: object = None


@dataclass(frozen=True, slots=True)
class ChunkStorageMetadata:
    """One box of a tensor."""

    offsets: object = None
    sizes: object = None


@dataclass(frozen=True, slots=True)
class BytesStorageMetadata:
    """A value of a DCP checkpoint that is not a tensor."""


@dataclass(frozen=True, slots=True)
class MetadataIndex:
    """The key of an item: a name and, for a tensor, the offsets of a chunk."""

    fqn: object = None
    offset: object = None
    index: object = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StorageMeta:
    """The writer's ids of the checkpoint."""

    checkpoint_id: object = None
    save_id: object = None
    load_id: object = None
    modules: object = None


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """The place of an item: `length` bytes from `offset` of a file."""

    relative_path: object = None
    offset: object = None
    length: object = None
    transform_descriptors: object = None


Record = (
    Metadata
    | TensorStorageMetadata
    | TensorProperties
    | ChunkStorageMetadata
    | BytesStorageMetadata
    | MetadataIndex
    | StorageMeta
    | StorageInfo
)

_DCP = "torch.distributed.checkpoint.metadata."

RECORDS: dict[str, type[Record]] = {
    _DCP + "Metadata": Metadata,
    _DCP + "TensorStorageMetadata": TensorStorageMetadata,
    _DCP + "TensorProperties": TensorProperties,
    # the name before torch 2.3
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": TensorProperties,
    _DCP + "ChunkStorageMetadata": ChunkStorageMetadata,
    _DCP + "BytesStorageMetadata": BytesStorageMetadata,
    _DCP + "MetadataIndex": MetadataIndex,
    _DCP + "StorageMeta": StorageMeta,
    "torch.distributed.checkpoint.filesystem._StorageInfo": StorageInfo,
}
"""The classes that become a record of this file, by their names in torch."""

FIELDS = {cls: tuple(each.name for each in fields(cls)) for cls in RECORDS.values()}


_NEVER_MISSING = ("state_dict_metadata", "planner_data", "storage_data")
"""Fields of `Metadata` that every version of torch writes."""


def fill(record: Record, state: object) -> None:
    """Sets the fields of a new record. Drops unknown fields, which a later torch may add.

    Raises FormatError if the state is not a dict, or lacks a field that every torch writes.
    """
    names = FIELDS[type(record)]
    if isinstance(record, TensorProperties) and type(state) is tuple:
        state = dict(zip(names, state, strict=False))
    if type(state) is not dict:
        raise FormatError(f"the state of a {type(record).__name__} is a {type(state).__name__}")
    for name in _NEVER_MISSING if isinstance(record, Metadata) else ():
        if name not in state:
            raise FormatError(f"the state of a Metadata has no {name}")
    for name in names:
        if name in state:
            object.__setattr__(record, name, state[name])


_KEYS = (str, int, float, complex, bytes, DType, StoredTensor, Opaque, Name, type(None))


def check_key(key: object, depth: int = 0, parts: int = KEY_PARTS) -> int:
    """Raises FormatError unless `key` is safe and cheap to hash and compare.

    Returns the number of `parts` that are left of the allowed ones.
    """
    if isinstance(key, tuple | frozenset) and depth < KEY_DEPTH:
        if len(key) > parts:
            kind = "tuple" if isinstance(key, tuple) else "frozenset"
            raise HostileError(f"a {kind} of over {KEY_PARTS} parts is the key of a dict")
        for each in key:
            parts = check_key(each, depth + 1, parts - 1)
    elif isinstance(key, MetadataIndex):
        check_index(key)
    elif not isinstance(key, _KEYS):
        raise FormatError(f"a {type(key).__name__} cannot be a key of a dict or a member of a set")
    return parts


def check_index(index: MetadataIndex) -> tuple[str, tuple[int, ...] | None]:
    """Returns name and offsets of an item. Raises FormatError for fields of other types."""
    name, offset = index.fqn, index.offset
    if type(name) is not str or not (offset is None or is_shape(offset)):
        raise FormatError("the index of an item of a DCP checkpoint is not a name with offsets")
    return name, offset


def view(
    storage: Storage, dtype: DType, at: object, shape: object, strides: object
) -> StoredTensor:
    """Returns the tensor of this shape in a storage. Raises unless all elements lie inside."""
    start, sizes, steps = integer_of(at), shape_of(shape), shape_of(strides)
    if len(sizes) != len(steps):
        raise FormatError(f"a tensor has the shape {sizes} and the strides {steps}")
    numel = least = 1
    for size, step in zip(sizes, steps, strict=True):
        numel, least = numel * size, least * (size or 1)
        if least >= ELEMENTS or step >= LARGEST_STRIDE:
            raise HostileError(
                f"a tensor of shape {sizes} and strides {steps} has more elements than torch can "
                "count"
            )
    last = start + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if not 0 <= start < ELEMENTS or (numel and (last + 1) * dtype.itemsize > storage.nbytes):
        raise FormatError(
            f"a tensor of shape {sizes}, strides {steps} and offset {start} reaches beyond its "
            f"storage of {storage.nbytes} bytes"
        )
    return StoredTensor(storage, dtype, start, sizes, steps)


def integer_of(value: object) -> int:
    """Returns the value. Raises FormatError unless it is an integer."""
    if type(value) is int:
        return value
    raise FormatError(f"a whole number is expected, not a {type(value).__name__}")


def is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    """Whether a value is a tuple of integers from 0 up, at most as many as torch's dimensions."""
    if type(value) is not tuple or len(value) > DIMENSIONS:
        return False
    for size in value:  # noqa: SIM110 - a generator takes three times as long
        if type(size) is not int or size < 0:
            return False
    return True


def shape_of(value: object) -> tuple[int, ...]:
    """Returns the value. Raises FormatError unless it is a tuple of integers from 0 up."""
    if is_shape(value):
        return value
    raise FormatError(
        "a shape or the strides of a tensor are not a tuple of whole numbers from 0 up, at most "
        f"{DIMENSIONS}"
    )
