"""DCP's Metadata for any checkpoint, and for a state that was saved.

Each tensor is one chunk in the Metadata, even if it lies in several files: a planner of DCP asks
for a part of the chunk, and the reader finds the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.state.memory import torch_dtype
from ckpt.state.saved import by_name
from formats.catalog import Catalog, TensorRef, Tree
from formats.dcp.nest import flattened
from formats.pickles.tree import KeyPath

Entry = TensorStorageMetadata | BytesStorageMetadata


def items_of(catalog: Catalog) -> dict[str, tuple[KeyPath, Tree]]:
    """Returns the key path and the node of each item, by its name in DCP.

    Raises UnsupportedError for a state that is not a dict, StateError for two equal names.
    """
    return by_name(
        (".".join(map(str, path)), (path, node)) for path, node in flattened(catalog.tree)
    )


def metadata_of(catalog: Catalog, items: Mapping[str, tuple[KeyPath, Tree]]) -> Metadata:
    """Returns DCP's Metadata for a checkpoint of any format."""

    def entry(node: Tree) -> Entry:
        if not isinstance(node, TensorRef):
            return BytesStorageMetadata()
        record = catalog.tensors[node.name]
        return _tensor(record.shape, torch_dtype(record.dtype.torch_name))

    entries: dict[str, Entry] = {name: entry(node) for name, (_, node) in items.items()}
    return Metadata(entries, {name: path for name, (path, _) in items.items()})


def metadata_of_state(state: Mapping[str, object]) -> Metadata:
    """Returns DCP's Metadata for a state, by this rank's names. Does not communicate."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state))
    entries: dict[str, Entry] = {
        name: _tensor(leaf.shape, leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else BytesStorageMetadata()
        for name, leaf in planner.state_dict.items()
    }
    return Metadata(entries, dict(planner.mappings))


def _tensor(shape: Iterable[int], dtype: torch.dtype) -> TensorStorageMetadata:
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype), size, [whole])
