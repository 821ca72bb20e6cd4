"""Plans folders that torch.distributed.checkpoint (DCP) loads. torch is not needed.

`plans` has one file of items and then `.metadata`, which makes the folder a checkpoint. Torch's own
rules flatten the state (`formats.dcp.nest`), so that `dcp.load` finds each name of the same
nested state. Torch's limits hold too: keys become text, and an empty dict is lost. (An empty dict
as a value would make `dcp.load` assume a checkpoint of torch before 2.4.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from formats.catalog import FilePlan, Outgoing, OutgoingTensor, Part, TensorRef, length_of
from formats.dcp.nest import METADATA, flatten
from formats.errors import UnsupportedError
from formats.pickles.records import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    TensorProperties,
    TensorStorageMetadata,
)
from formats.pickles.tree import KeyPath, format_path
from formats.pickles.writer import Call, dump
from formats.torch_save import archive_parts, check_all_placed, pack

ITEMS = "__0_0.distcp"
"""The file with the items, with the name of rank 0's first file."""

VERSION = "1.0.0"
"""The version of the format that torch 2.6 to 2.13 write."""


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of the flattened state."""

    name: str
    path: KeyPath
    pickled: bytes
    tensors: tuple[OutgoingTensor, ...]
    """The storages of its zip, in order."""
    whole: OutgoingTensor | None
    """The tensor, if the item is a tensor."""
    first: str
    """The item with the bytes: itself, or the first of tied names."""


def plans(state: Outgoing) -> list[FilePlan]:
    """Plans a folder with a whole checkpoint, `.metadata` last. Tied names share an item.

    Raises:
        UnsupportedError: the state is not a dict, or two key paths have one name.
        ArgumentError: the tree lacks a tensor, or a value cannot be pickled.
    """
    items = list(_items(state))
    check_all_placed(METADATA, state, {tensor.name for item in items for tensor in item.tensors})
    places: dict[str, StorageInfo] = {}
    parts: list[Part] = []
    at, tensors = 0, 0
    for item in items:
        if item.first != item.name:
            continue
        archive = archive_parts(item.pickled, item.tensors, tensors)
        nbytes = sum(map(length_of, archive))
        places[item.name] = StorageInfo(ITEMS, at, nbytes)
        at, tensors = at + nbytes, tensors + len(item.tensors)
        parts += archive
    return [FilePlan(ITEMS, parts), FilePlan(METADATA, [_metadata(items, places)])]


def _items(state: Outgoing) -> Iterator[Item]:
    paths: dict[str, KeyPath] = {}
    holders: dict[str, Item] = {}
    for path, node in flatten(state.tree):
        name = ".".join(map(str, path))
        if name in paths:
            raise UnsupportedError(
                f"{format_path(paths[name])} and {format_path(path)} would both be named "
                f"{name!r}, which DCP "
                "cannot hold; rename a key"
            )
        paths[name] = path
        pickled, tensors = pack(node, state.tensors, state.aliases)
        whole = tensors[0] if isinstance(node, TensorRef) else None
        writers = [holders[tensor.name] for tensor in tensors if tensor.name in holders]
        if writers and (whole is None or writers[0].whole is None):
            raise UnsupportedError(
                f"{format_path(path)} shares a tensor with {format_path(writers[0].path)}, and "
                "one of them is in "
                "a tuple, which DCP stores as one value; make it a list"
            )
        item = Item(
            name, path, pickled, tuple(tensors), whole, writers[0].name if writers else name
        )
        for tensor in tensors:
            holders.setdefault(tensor.name, item)
        yield item


def _metadata(items: Sequence[Item], places: Mapping[str, StorageInfo]) -> bytes:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    for item in items:
        if item.whole is None:
            entries[item.name] = BytesStorageMetadata()
            index = MetadataIndex(item.name)
        else:
            zeros = Call("torch.Size", ((0,) * len(item.whole.shape),))
            size = Call("torch.Size", (item.whole.shape,))
            chunk = ChunkStorageMetadata(zeros, size)
            entries[item.name] = TensorStorageMetadata(_properties(item.whole), size, [chunk])
            index = MetadataIndex(item.name, zeros, 0)
        storage[index] = places[item.first]
    paths = {item.name: item.path for item in items}
    return dump(Metadata(entries, paths, storage, None, VERSION))


def _properties(tensor: OutgoingTensor) -> TensorProperties:
    strided = Call("torch.serialization._get_layout", ("torch.strided",))
    contiguous = Call("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", (0,))
    return TensorProperties(tensor.dtype, strided, False, contiguous, False)
