"""A StorageWriter for torch.distributed.checkpoint that writes the native format.

DCP plans, and this class writes: each rank writes its items into a shard file, and the coordinator
writes the manifest when all ranks have written.

Rules:

1. The manifest is the commit point. Until then an earlier checkpoint at the place stays whole.
2. Values are stored as values, never as pickles. A value that cannot be stored is a StateError. If
   a planner returns bytes, torch's restricted unpickler reads them: they run no code, although they
   come from this process.
3. A file has at most one part of a tensor. A rank's second part goes into a second file.
4. Every rank draws a random number for its files, because a planner may reuse a plan for later
   saves.
5. `resolve_data` may take memory. A planner whose `resolve_data` may do more than look a tensor up
   is therefore called when the tensor is written, and not before.
6. DCP lists a box for each part of a tensor, and the native format has symbolic layouts. Parts have
   a layout if they form a grid and torch.chunk's rule, applied once or repeatedly, cuts each
   dimension. All parts of DTensors and of FSDP's sharded tensors do. Parts of other sizes are an
   error with the tensor's name.
"""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import pairwise, product
from math import prod
from typing import Any, TypeGuard
from uuid import uuid4

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt.dcp.arguments import OfAPath
from ckpt.errors import ArgumentError, StateError
from ckpt.saving.agreement import check_place, writer_of
from ckpt.state.flatten import flatten
from ckpt.state.memory import kind_problem, memory_problem, outgoing_whole, wait_for
from ckpt.stores.store import Options, open_store
from ckpt.transfer.commit import commit, now
from formats.catalog import OutgoingTensor, TensorRef, Tree
from formats.dcp.nest import key_path, unflatten
from formats.dtypes import DType, dtype_of_torch
from formats.errors import UnsupportedError
from formats.native.manifest import Manifest, ShardFile, StoredTensor
from formats.native.shard_writer import write_shard
from formats.pickles.tree import KeyPath
from sharding.layout import Box, Layout, Mesh, Shape, Shard
from sharding.layout.box import chunk


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a rank among those that save: `SavePlan.storage_data`."""

    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class _WrittenPart:
    """A box of a tensor in a file of one rank."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: DType
    box: Box
    file: ShardFile | None
    """The file; None for an empty box."""


@dataclass(frozen=True, slots=True)
class _WrittenItem:
    """A rank's report of an item to the coordinator: `WriteResult.storage_data`."""

    value: Tree
    parts: tuple[_WrittenPart, ...]


class CkptStorageWriter(OfAPath, StorageWriter):
    """Writes native checkpoints for `torch.distributed.checkpoint.save(..., storage_writer=)`.

    Each rank that saves makes a writer, with equal arguments. A writer may be used again, for the
    same or another `checkpoint_id`. `overwrite` replaces an existing checkpoint, which stays
    readable until the new one is complete. `compress` and `metadata` are as in `ckpt.save`,
    `storage_options` are the fsspec driver's. torch's function raises errors in a
    CheckpointException, `ckpt.dcp.save` raises those of `ckpt`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = True,
        compress: bool = False,
        metadata: Mapping[str, str] | None = None,
        storage_options: Options = None,
    ) -> None:
        super().__init__()
        self.path = None if path is None else os.fspath(path)
        self.overwrite, self.compress = overwrite, compress
        self.metadata = dict(metadata or {})
        self.storage_options = storage_options
        self.save_id = str(uuid4())
        """The id that torch's StorageMeta has of the next save, until `reset`."""
        self._began = now()

    def storage_meta(self) -> StorageMeta:
        """Returns the folder and the id of the save, for the planner."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Sets the folder that the next save writes; by default the last one again."""
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)
        self.save_id = str(uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises ArgumentError for `use_collectives=False`, ExistsError as `ckpt.save`."""
        check_collectives(bool(kwargs.get("use_collectives", True)))
        self._began = now()
        if is_coordinator:
            with open_store(self.checkpoint_id, self.storage_options) as store:
                check_place(store, self.overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns the plans, each with the position of its rank."""
        return [
            replace(plan, storage_data=_Place(rank, len(plans))) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, complete and durable; returns a future that is done."""
        items = [(item.index, *outgoing_item(item, planner)) for item in plan.items]
        files = self._write(plan.storage_data, [part for *_, parts in items for part in parts])
        results = []
        for index, value, parts in items:
            written = tuple(
                _WrittenPart(p.tensor.name, p.shape, p.tensor.dtype, p.box, files.get(id(p)))
                for p in parts
            )
            nbytes = sum(part.tensor.nbytes for part in parts)
            results.append(WriteResult(index, nbytes, _WrittenItem(value, written)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, place: _Place, parts: Sequence[OutgoingPart]) -> dict[int, ShardFile]:
        """Returns the files of the parts that are not empty, by the part's id (rules 3 and 4)."""
        turns: dict[str, int] = defaultdict(int)
        groups: dict[int, list[OutgoingPart]] = defaultdict(list)
        for part in filter(lambda item: item.box.numel, parts):
            groups[turns[part.tensor.name]].append(part)
            turns[part.tensor.name] += 1
        attempt, files = secrets.randbits(64), dict[int, ShardFile]()
        with open_store(self.checkpoint_id, self.storage_options) as store:
            try:
                for turn, group in groups.items():
                    rank = place.rank + turn * place.world_size
                    name = f"{attempt:016x}-{rank:05d}.safetensors"
                    with store.create(name, rewritable=self.compress) as file:
                        wrote = write_shard(file, [item.tensor for item in group], self.compress)
                    files.update(dict.fromkeys(map(id, group), wrote.to_file(name, rank)))
            except BaseException:
                self._delete(files.values())
                raise
        return files

    def _delete(self, files: Iterable[ShardFile]) -> None:
        """Deletes files that no manifest will name, as far as the store allows."""
        with open_store(self.checkpoint_id, self.storage_options) as store:
            for name in {file.name for file in files}:
                with suppress(OSError):
                    store.delete(name)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the manifest: then the checkpoint exists. The coordinator alone calls this."""
        items = [(result.index.fqn, result.storage_data) for rank in results for result in rank]
        parts = [part for _, item in items for part in item.parts]
        files = {part.file.name: part.file for part in parts if part.file is not None}
        try:
            tensors = _stored_tensors(metadata, parts)
            tree = _tree(metadata, tensors, {name: item.value for name, item in items})
        except BaseException:
            self._delete(files.values())
            raise
        wrote = writer_of(len(results), self.metadata)
        manifest = Manifest(tensors, {}, tree, list(files.values()), wrote)
        with open_store(self.checkpoint_id, self.storage_options) as store:
            commit(store, manifest, self._began, self.overwrite)
        metadata.storage_meta = self.storage_meta()


def _stored_tensors(metadata: Metadata, parts: Sequence[_WrittenPart]) -> dict[str, StoredTensor]:
    """Returns the tensors for the manifest.

    Raises StateError for a tensor that no rank has written, UnsupportedError as `layout_of` does.
    """
    known: dict[str, tuple[tuple[int, ...], DType]] = {
        name: (tuple(entry.size), dtype_of_torch(str(entry.properties.dtype), name))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    boxes: dict[str, dict[Box, int]] = defaultdict(dict)
    for part in parts:
        known[part.name] = part.shape, part.dtype
        if part.file is not None:
            boxes[part.name][part.box] = part.file.rank
    for name, (shape, _) in known.items():
        if prod(shape) and not boxes[name]:
            raise _unwritten(name)
    return {
        name: StoredTensor(shape, dtype, layout_of(name, shape, boxes[name]))
        for name, (shape, dtype) in known.items()
    }


def _tree(
    metadata: Metadata, tensors: Mapping[str, StoredTensor], values: Mapping[str, Tree]
) -> Tree:
    """Returns the nest of a state by the planner's key paths; a flat dict without them."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    leaves: dict[KeyPath, Tree] = {}
    for name, entry in metadata.state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        if not is_tensor and name not in values:
            raise _unwritten(name)
        leaves[key_path(name, paths)] = TensorRef(name) if is_tensor else values[name]
    return unflatten(leaves)


def _unwritten(name: str) -> StateError:
    return StateError(f"{name}: it is in the plan of all ranks, and no rank has written it")


def check_collectives(use_collectives: bool) -> None:
    """Raises ArgumentError for `use_collectives=False`: each rank would save its own checkpoint."""
    if not use_collectives:
        raise ArgumentError(
            "use_collectives=False would make a separate checkpoint of each rank, which no other "
            "rank reads: leave it out (ckpt.dcp.save uses no collectives in any case), or pass "
            "no_dist=True with another checkpoint_id for each rank"
        )


_ALONE = Mesh.grid(("world",), (1,))


@dataclass(frozen=True, slots=True)
class OutgoingPart:
    """A box of a tensor on its way to a file."""

    tensor: OutgoingTensor
    """The elements, under the whole tensor's name."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    box: Box


def outgoing_item(item: WriteItem, planner: SavePlanner) -> tuple[Tree, list[OutgoingPart]]:
    """Returns the value of an item, with a reference for each tensor in it, and these tensors.

    The value is None if the item is a tensor or a part of one. Raises StateError for a value that
    cannot be stored, UnsupportedError for a dtype that cannot.
    """
    if item.type == WriteItemType.BYTE_IO:
        return _value(item, planner)
    data, name = item.tensor_data, item.index.fqn
    assert data is not None  # DCP defines it for every item that is not a value
    lo, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    box = Box(lo, tuple(start + size for start, size in zip(lo, shape, strict=True)))
    dtype = dtype_of_torch(str(data.properties.dtype), name)

    def part() -> OutgoingTensor:
        found = planner.resolve_data(item)
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape:
            what = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise StateError(f"{name}: the plan has a part {box}, and resolve_data gives {what}")
        local = wait_for(found).detach()
        if (problem := kind_problem(local) or memory_problem(local)) is not None:
            raise StateError(f"{name}: {problem}")
        return outgoing_whole(name, dtype, local.to(data.properties.dtype))

    def blocks() -> Iterator[memoryview]:
        yield from part().blocks()

    lazy = OutgoingTensor(name, shape, dtype, blocks)
    tensor = part() if _only_looks_up(planner) and box.numel else lazy
    return None, [OutgoingPart(tensor, tuple(data.size), box)]


def _value(item: WriteItem, planner: SavePlanner) -> tuple[Tree, list[OutgoingPart]]:
    name = item.index.fqn
    if _only_looks_up(planner):
        value = planner.lookup_object(item.index)
    else:
        value = _unpickle(name, planner.resolve_data(item))
    flat = flatten({name: value}, _ALONE)
    assert isinstance(flat.tree, dict)
    parts = []
    for leaf in flat.leaves.values():
        shape = tuple(leaf.local.shape)
        outgoing = outgoing_whole(leaf.name, leaf.dtype, leaf.local)
        parts.append(OutgoingPart(outgoing, shape, Box.whole(shape)))
    return flat.tree[name], parts


def _unpickle(name: str, data: object) -> object:
    if not isinstance(data, BytesIO):
        raise StateError(f"{name}: resolve_data gives a {type(data).__name__}, not a BytesIO")
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:
        raise StateError(
            f"{name}: the planner's bytes hold no plain value, and no pickle is stored: give the "
            f"value as numbers, texts, lists, dicts and tensors ({error})"
        ) from error


def _only_looks_up(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether a planner only looks tensors up to resolve them, like DCP's own planner."""
    if not isinstance(planner, DefaultSavePlanner):
        return False
    kind, default = type(planner), DefaultSavePlanner
    return (
        kind.resolve_data is default.resolve_data
        and kind.transform_object is default.transform_object
    )


def layout_of(name: str, shape: Shape, ranks: Mapping[Box, int]) -> Layout:
    """Returns the layout in which each of these non-empty boxes lies at its rank.

    Raises UnsupportedError, with the tensor's name, if no layout has these boxes.

    >>> boxes = {Box((0, 0), (3, 2)): 1, Box((3, 0), (5, 2)): 0}
    >>> layout = layout_of("w", (5, 2), boxes)
    >>> str(layout), layout.holders(Box((4, 0), (5, 1)))
    ('cut0.0:2=S(0)', (0,))
    """
    if not prod(shape):
        return Layout.single(shape)
    cuts = [sorted({(box.lo[d], box.hi[d]) for box in ranks}) for d in range(len(shape))]
    grid = [
        Box(tuple(lo for lo, _ in cell), tuple(hi for _, hi in cell)) for cell in product(*cuts)
    ]
    sizes = [_axes(cut, size) for cut, size in zip(cuts, shape, strict=True)]
    if len(grid) != len(ranks) or any(box not in ranks for box in grid) or None in sizes:
        raise UnsupportedError(
            f"{name}: it is divided into {len(ranks)} parts ({', '.join(map(str, [*ranks][:3]))}, "
            "...) that are not those of torch.chunk, and no layout describes them; cut it so, or "
            "give it as a DTensor"
        )
    axes = [(d, i, n) for d, found in enumerate(sizes) for i, n in enumerate(found or ())]
    names = [f"cut{d}.{i}" for d, i, _ in axes]
    mesh = Mesh.of_ranks(names, [n for *_, n in axes], [ranks[box] for box in grid])
    return Layout(shape, mesh, tuple(Shard(d) for d, *_ in axes))


def _axes(cut: Sequence[tuple[int, int]], size: int) -> tuple[int, ...] | None:
    """Returns the sizes of mesh axes that make this cut, the outermost first; None without any."""
    if cut[0][0] != 0 or cut[-1][1] != size or any(a[1] != b[0] for a, b in pairwise(cut)):
        return None
    return _factor_lengths(tuple(hi - lo for lo, hi in cut))


def _factor_lengths(lengths: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the numbers of nested chunks that give these lengths; None if none do.

    >>> _factor_lengths((3, 3, 3, 1)), _factor_lengths((3, 2, 3, 2)), _factor_lengths((1, 3))
    ((4,), (2, 2), None)
    """
    count = len(lengths)
    if count == 1:
        return ()
    if lengths == _chunks(sum(lengths), count):
        return (count,)
    for outer in range(2, count // 2 + 1):
        step = count // outer
        groups = [lengths[at : at + step] for at in range(0, count, step)]
        if tuple(map(sum, groups)) != _chunks(sum(lengths), outer):
            continue
        inner = {_factor_lengths(group) for group in groups}
        [found] = inner if len(inner) == 1 else [None]
        if found is not None:
            return (outer, *found)
    return None


def _chunks(size: int, count: int) -> tuple[int, ...]:
    """Returns the lengths of torch.chunk's chunks."""
    return tuple(hi - lo for lo, hi in (chunk(size, count, i) for i in range(count)))
