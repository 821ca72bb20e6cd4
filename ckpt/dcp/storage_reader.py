"""A StorageReader for torch.distributed.checkpoint that reads every format.

DCP's planner lists boxes of tensors with their targets. This class finds the bytes of each box, and
reads and verifies them in few large reads. Only the restricted reader of `formats` reads pickles.

In DCP's Metadata, each tensor is one chunk, even if it lies in several files: a planner of DCP asks
for a part of the chunk, and the reader finds the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt.arguments import memory_budget
from ckpt.dcp.arguments import OfAPath
from ckpt.errors import StateError
from ckpt.loading.lazy import Checkpoint
from ckpt.state.memory import empty_for, is_plain, torch_dtype, will_change
from ckpt.state.saved import by_name
from ckpt.state.typed_values import restore_values
from ckpt.stores.store import Options
from ckpt.transfer.record_sums import Verify, check_verify
from formats.catalog import Catalog, OpaqueValue, TensorRecord, TensorRef, Tree, map_tree
from formats.dcp.nest import flatten
from formats.pickles.tree import KeyPath
from sharding.layout import Box


class _Wanted(NamedTuple):
    """A box of a stored tensor, the memory that it is read into, and the target it is copied to."""

    record: TensorRecord
    box: Box
    memory: torch.Tensor
    target: torch.Tensor
    item: ReadItem


class CkptStorageReader(OfAPath, StorageReader):
    """Reads any checkpoint for `torch.distributed.checkpoint.load(..., storage_reader=)`.

    Reads the native format, safetensors files and Hugging Face folders, torch.save files and
    folders of DCP, at any path or URL. Each rank makes a reader. `verify` is as in `ckpt.load`,
    `storage_options` are the fsspec driver's. torch's function raises errors in a
    CheckpointException, `ckpt.dcp.load` raises those of `ckpt`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        verify: Verify = True,
        storage_options: Options = None,
    ) -> None:
        super().__init__()
        self.path = None if path is None else os.fspath(path)
        self.verify = check_verify(verify)
        self.storage_options = storage_options
        self.load_id = str(uuid4())
        """The id that torch's StorageMeta has of the next load, until `reset`."""
        self._checkpoint: Checkpoint | None = None
        self._items: dict[str, tuple[KeyPath, Tree]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Sets the checkpoint that the next load reads; by default the last one again."""
        self.close()
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)
        self.load_id = str(uuid4())

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint = None

    def read_metadata(self) -> Metadata:
        """Returns names, shapes and dtypes. Each tensor is one chunk, even in several files."""
        self.close()
        checkpoint = Checkpoint(self.checkpoint_id, self.verify, self.storage_options)
        checkpoint.catalog = self._part_of(checkpoint.catalog)
        self._items = items_of(checkpoint.catalog)
        metadata = metadata_of(checkpoint.catalog, self._items)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self.load_id)
        self._checkpoint = checkpoint
        return metadata

    def _part_of(self, catalog: Catalog) -> Catalog:
        """Returns the part of a checkpoint that this reader reads: all of it."""
        return catalog

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of the plan into the planner's targets; returns a future that is done."""
        if self._checkpoint is None:
            self.read_metadata()
        try:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._pickle_value(item.storage_index.fqn))
            for wanted in _batches(self._iter_wanted(plan, planner), memory_budget() // 2):
                self._read(wanted, planner)
        finally:
            self.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _node(self, name: str) -> Tree:
        if name not in self._items:
            raise StateError(f"{self.checkpoint_id} has no {name!r}, which the plan wants to read")
        return self._items[name][1]

    def _pickle_value(self, name: str) -> BytesIO:
        """Returns a saved value as a pickle of plain types, which DCP's planners read."""
        checkpoint, data = self._opened, BytesIO()

        def leaf(node: Tree) -> object:
            if isinstance(node, OpaqueValue):
                raise StateError(
                    f"{self.checkpoint_id}: {name} is {node}, an object that is never rebuilt; "
                    "leave "
                    "it out of the state to load"
                )
            return (
                checkpoint[node.name][...] if isinstance(node, TensorRef) else restore_values(node)
            )

        torch.save(map_tree(self._node(name), leaf), data)
        data.seek(0)
        return data

    def _iter_wanted(self, plan: LoadPlan, planner: LoadPlanner) -> Iterator[_Wanted]:
        catalog = self._opened.catalog
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            name, lo, shape = item.storage_index.fqn, tuple(item.storage_offsets), item.lengths
            node = self._node(name)
            if not isinstance(node, TensorRef):
                raise StateError(f"{name} is not a tensor in {self.checkpoint_id}")
            record, target = catalog.tensors[node.name], planner.resolve_tensor(item).detach()
            if target.shape != shape:
                raise StateError(
                    f"{name}: resolve_tensor gives shape {tuple(target.shape)} for a part of shape "
                    f"{tuple(shape)}"
                )
            box = Box(lo, tuple(start + size for start, size in zip(lo, shape, strict=True)))
            is_direct = target.dtype == torch_dtype(record.dtype.torch_name) and is_plain(target)
            memory = target if is_direct else empty_for(record, box.shape)
            yield _Wanted(record, box, memory, target, item)

    def _read(self, wanted: Sequence[_Wanted], planner: LoadPlanner) -> None:
        for request in wanted:
            will_change(request.target)
        self._opened.fill([(request.record, request.box, request.memory) for request in wanted])
        for request in wanted:
            if request.memory is not request.target:
                request.target.copy_(request.memory)
            planner.commit_tensor(request.item, request.target)

    @property
    def _opened(self) -> Checkpoint:
        assert self._checkpoint is not None
        return self._checkpoint


def _batches(wanted: Iterator[_Wanted], most_bytes: int) -> Iterator[list[_Wanted]]:
    """Yields batches that take at most so much memory beside the targets, or have one tensor."""
    batch: list[_Wanted] = []
    nbytes = 0
    for request in wanted:
        more = 0 if request.memory is request.target else request.memory.nbytes
        if batch and nbytes + more > most_bytes:
            yield batch
            batch, nbytes = [], 0
        batch.append(request)
        nbytes += more
    if batch:
        yield batch


Entry = TensorStorageMetadata | BytesStorageMetadata


def items_of(catalog: Catalog) -> dict[str, tuple[KeyPath, Tree]]:
    """Returns the key path and the node of each item, by its name in DCP.

    Raises UnsupportedError for a state that is not a dict, StateError for two equal names.
    """
    return by_name((".".join(map(str, path)), (path, node)) for path, node in flatten(catalog.tree))


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
