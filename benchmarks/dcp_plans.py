"""torch DCP's planner, played by one process: every rank's plan, then what rank 0 makes of them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from formats.native.manifest import StoredTensor


@dataclass(frozen=True, slots=True)
class Figures:
    """CPU seconds, and bytes."""

    planning: float
    """On rank 0: the global plan, and unpickling what the others sent it."""
    nbytes: int
    """Of the metadata, without the places of the data."""
    opening: float
    """Unpickling it, on every rank."""
    loading: tuple[float, ...]
    """What a rank of each other world then plans to read."""


def measured(
    tensors: Mapping[str, StoredTensor],
    world_size: int,
    targets: Sequence[Mapping[str, StoredTensor]],
) -> Figures:
    """DCP's planning of one save, and of a load of it by rank 0 of other worlds."""
    sent = [pickle.dumps(_plan(tensors, rank)) for rank in range(world_size)]
    start = time.process_time()
    plans = [pickle.loads(text) for text in sent]  # rank 0 unpickles only what ranks sent it
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    _, metadata = planner.create_global_plan(plans)
    planning = time.process_time() - start
    text = pickle.dumps(metadata)
    start = time.process_time()
    found = pickle.loads(text)
    opening = time.process_time() - start
    loading = []
    for target in targets:
        start = time.process_time()
        for name, stored in target.items():
            chunks = [_chunk(stored, 0)]
            create_read_items_for_chunk_list(name, found.state_dict_metadata[name], chunks)
        loading.append(time.process_time() - start)
    return Figures(planning, len(text), opening, tuple(loading))


def _plan(tensors: Mapping[str, StoredTensor], rank: int) -> SavePlan:
    items = []
    properties = TensorProperties(torch.float32)
    for name, stored in tensors.items():
        chunk, size = _chunk(stored, rank), torch.Size(stored.shape)
        index = MetadataIndex(name, chunk.offsets)
        data = TensorWriteData(chunk, properties, size)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data={name: (name,) for name in tensors})


def _chunk(stored: StoredTensor, rank: int) -> ChunkStorageMetadata:
    (piece,) = stored.layout.pieces(rank)
    return ChunkStorageMetadata(torch.Size(piece.box.lo), torch.Size(piece.box.shape))
