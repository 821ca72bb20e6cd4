"""Reads folders of meta-pytorch/torch_checkpointing: a file for each item and rank.

    metadata.pkl              a pickle of plain values: the mesh and placements of sharded tensors
    model_0.pt, model_1.pt    the item `model` of rank 0 and of rank 1, by torch.save

Rules:

1. An item is a top key of the state. Items whose tensors are sharded are in metadata.pkl. Each of
   their tensors has a layout, and the file of each rank has the rank's part.
2. Other values of such an item are those of the first rank that has them. A dict or list has the
   entries of all ranks: a pipeline's stages have different ones.
3. An item that is not in metadata.pkl is one value, if all ranks have the same plain value, or one
   for each rank, at `rank 0`, `rank 1`.

The layout is that of distributed_metadata.py and dtensor_metadata.py of the library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from formats.catalog import Catalog, FileRecord, Key, TensorRecord, TensorRef, Tree
from formats.deepspeed.zero import File, open_file
from formats.errors import CorruptError, FormatError, UnsupportedError
from formats.limits import AXES, RANKS, check, decode_object
from formats.pickles.machine import load
from formats.pickles.records import Opaque, StoredTensor, is_shape
from formats.pickles.tree import KeyPath, Nest, StoragePieces, Storages, format_path
from formats.storage import Reader
from formats.zip_records import DATA_PICKLE
from sharding.errors import ArgumentError
from sharding.layout import Box, Layout, Mesh, Piece, Placement, Replicate, Shard

METADATA = "metadata.pkl"
_FILE = re.compile(r"(.+)_([0-9]{1,9})\.pt")
Tensors = dict[KeyPath, Layout]
"""The sharded tensors of an item, by key path."""
_OfRanks = list[tuple[File, object]]
"""The values of ranks at one key path, each with its file."""


def read(reader: Reader) -> Catalog:
    """Reads the catalog of a folder: the pickles of all files, no tensor.

    Raises:
        UnsupportedError: an item has another serialization than torch.save, or a tensor has
            placements that do not divide it evenly.
        CorruptError: the file of a rank is missing or damaged.
        FormatError: the files do not belong together, or are invalid in another way.
    """
    size = reader.size(METADATA)
    check("pickle_bytes", size, METADATA)
    metadata = load(reader.read(METADATA, 0, size), METADATA)
    folder = _Folder(reader, Nest(METADATA, size), _files(reader))
    sharded = _dict(_dict(metadata, METADATA).get("metadata"), "metadata")
    items = {str(key): _tensors(str(key), value) for key, value in sharded.items()}
    tree: dict[Key, Tree] = {}
    for item in dict.fromkeys((*items, *folder.files)):
        if item not in folder.files:
            raise CorruptError(f"{reader.url}: no file has the item {item!r:.200}; copy all files")
        tree[item] = folder.item(item, items.get(item, {}))
    files = (FileRecord(METADATA, size), *folder.records)
    return Catalog(
        "torch_checkpointing",
        folder.nest.tensors,
        tree,
        files,
        folder.nest.aliases,
        weights="model" if "model" in tree else "",
        parts=tuple(("", Catalog("torch", {}, None, (file,))) for file in folder.records),
    )


def _tensors(item: str, value: object) -> Tensors:
    where = f"{METADATA}: {item!r:.200}"
    holder = _dict(value, where)
    for layout in _dict(holder.get("rank_to_layout_info", {}), where).values():
        if layout is not None:
            raise UnsupportedError(
                f"{where} has a layout of its own, which this version cannot read; load it with "
                "torch_checkpointing and save it with the default layout"
            )
    tensors: Tensors = {}
    for text, groups in _dict(holder.get("nested_path_to_metadata"), where).items():
        path = decode_object(f'{{"path":{text}}}', where).get("path")
        if not isinstance(path, list) or not all(type(key) in (str, int) for key in path):
            raise FormatError(f"{where} has the key path {text!r:.200}, which is no list of keys")
        if not isinstance(groups, list) or len(groups) != 1:
            raise UnsupportedError(
                f"{where}: ranks have different tensors at {format_path(tuple(path))}"
            )
        data = _dict(_dict(groups[0], where).get("sharding_metadata"), where).get("data")
        tensors[tuple(path)] = _layout(f"{where} {format_path(tuple(path))}", _dict(data, where))
    return tensors


def _layout(where: str, data: Mapping[object, object]) -> Layout:
    """Returns the layout of a tensor by its mesh and placements."""
    mesh = _dict(data.get("mesh_spec"), where)
    shape, sizes, ranks = (
        tuple(found) if isinstance(found, list | tuple) else found
        for found in (data.get("global_shape"), mesh.get("mesh_shape"), mesh.get("mesh_data"))
    )
    declared = data.get("placements")
    if not (is_shape(shape) and is_shape(sizes) and isinstance(ranks, tuple)):
        raise FormatError(f"{where} has no shape and mesh")
    if not all(type(rank) is int and 0 <= rank < RANKS for rank in ranks) or (
        len(sizes) > AXES or len(set(ranks)) < len(ranks)
    ):
        raise FormatError(f"{where} has a mesh that is not made of ranks")
    if not isinstance(declared, list) or len(declared) != len(sizes):
        raise FormatError(f"{where} has not a placement for each axis of its mesh")
    placements = tuple(_placement(where, _dict(each, where)) for each in declared)
    try:
        names = [f"axis_{at}" for at in range(len(sizes))]
        return Layout(shape, Mesh.of_ranks(names, sizes, ranks), placements)
    except ArgumentError as error:
        raise FormatError(f"{where}: {error}") from None


def _placement(where: str, value: Mapping[object, object]) -> Placement:
    kind, dim = value.get("type"), value.get("dim")
    if kind == "Replicate":
        return Replicate()
    if kind == "Shard" and type(dim) is int:
        return Shard(dim)
    raise UnsupportedError(
        f"{where} has the placement {kind!r:.80}, which this version cannot read; load it with "
        "torch_checkpointing and save it with DCP"
    )


def _files(reader: Reader) -> dict[str, dict[int, str]]:
    """Returns the names of the files by item and rank. Raises FormatError for two of one rank."""
    files: dict[str, dict[int, str]] = {}
    for name in reader.names():
        match = _FILE.fullmatch(name)
        if match is not None:
            rank = int(match[2])
            other = files.setdefault(match[1], {}).setdefault(rank, name)
            if other != name:
                raise FormatError(f"{other} and {name} are both of rank {rank}; remove one")
    return files


@dataclass(slots=True)
class _Folder:
    """The files of a folder, opened one item after the other."""

    reader: Reader
    nest: Nest
    files: Mapping[str, Mapping[int, str]]
    """The names of the files by item and rank."""
    records: list[FileRecord] = field(default_factory=list)

    def item(self, item: str, tensors: Tensors) -> Tree:
        names = self.files[item]
        files = {rank: self._open(names[rank]) for rank in sorted(names)}
        if not tensors:
            return self._of_ranks(item, files)
        for path, layout in tensors.items():
            self._add(item, path, layout, files)
        left = set(tensors)
        values: _OfRanks = [(file, file.content) for file in files.values()]
        tree = self._tree(values, (item,), tensors, left)
        if left:
            raise FormatError(
                f"{METADATA}: {item}{format_path(min(left, key=str))} lies below a value of "
                "another rank"
            )
        return tree

    def _open(self, name: str) -> File:
        file = open_file(self.reader, name)
        self.nest.grow(file.pickle_bytes)
        self.records.append(FileRecord(name, file.size))
        return file

    def _of_ranks(self, item: str, files: Mapping[int, File]) -> Tree:
        """Returns an item without sharded tensors (rule 3)."""
        first, *others = files.values()
        is_plain = not any(name.startswith("data/") for name in first.archive.names)
        pickled = first.archive.read(DATA_PICKLE)
        if not others or (is_plain and all(o.archive.read(DATA_PICKLE) == pickled for o in others)):
            return self.nest.tree(first.content, (item,), first.archive)
        return {
            f"rank {rank}": self.nest.tree(file.content, (item, f"rank {rank}"), file.archive)
            for rank, file in files.items()
        }

    def _add(self, item: str, path: KeyPath, layout: Layout, files: Mapping[int, File]) -> None:
        where = f"{item}{format_path(path)}"
        parts: list[tuple[Piece, Storages, str]] = []
        seen: set[Box] = set()
        dtype = None
        for rank in layout.mesh.ranks():
            pieces = [piece for piece in layout.pieces(rank) if piece.box not in seen]
            if not pieces and dtype is not None:
                continue
            if rank not in files:
                raise CorruptError(
                    f"{self.reader.url}: the file of rank {rank} is missing, which has a part of "
                    f"{where}; copy the files of all ranks"
                )
            tensor = _local(files[rank], path, where)
            if tensor.shape != layout.local_shape(rank) or not _is_packed(tensor):
                raise FormatError(
                    f"{files[rank].name}: {where} has the shape {tensor.shape}, by {METADATA} it "
                    f"has {layout.local_shape(rank)}"
                )
            if dtype not in (None, tensor.dtype):
                raise FormatError(f"{files[rank].name}: {where} has the dtype {tensor.dtype}")
            dtype = tensor.dtype
            archive, key = files[rank].archive, tensor.storage.key
            stored_bytes = archive.nbytes_of(key) if pieces else 0
            if pieces and stored_bytes != tensor.storage.nbytes:
                raise CorruptError(
                    f"{files[rank].name}: the storage of {where} has {stored_bytes} bytes, its "
                    f"pickle says {tensor.storage.nbytes}; restore the file from another copy"
                )
            for piece in pieces:
                seen.add(piece.box)
                there = Piece(piece.box, piece.at + tensor.at, piece.strides)
                parts.append((there, archive, key))
        name = self.nest.claim((item, *path))
        assert dtype is not None  # a mesh has ranks
        self.nest.place(name, TensorRecord(name, layout.shape, dtype, StoragePieces(*parts)))

    def _tree(self, values: _OfRanks, path: KeyPath, tensors: Tensors, left: set[KeyPath]) -> Tree:
        """Returns the tree of a value by rule 2, with sharded tensors in their places.

        Takes the key paths of these from those that are `left`.
        """
        if path[1:] in tensors:
            left.discard(path[1:])
            return TensorRef(".".join(map(str, path)))
        file, value = values[0]
        if not isinstance(value, dict | list | tuple):
            return self.nest.tree(value, path, file.archive)
        self.nest.enter(path, len(path))
        entries: dict[Key, _OfRanks] = {}
        for file, each in values:
            if type(each) is not type(value):
                continue
            for key, inner in each.items() if isinstance(each, dict) else enumerate(each):
                if not isinstance(key, str | int):
                    raise file.unlike("key of text", key, *path)
                entries.setdefault(key, []).append((file, inner))
        tree = {key: self._tree(each, (*path, key), tensors, left) for key, each in entries.items()}
        if isinstance(value, dict):
            return tree
        return list(tree.values()) if isinstance(value, list) else tuple(tree.values())


def _local(file: File, path: KeyPath, where: str) -> StoredTensor:
    """Returns the tensor at a key path of a rank's file; of a DTensor its local part."""
    found = file.content
    for key in path:
        if isinstance(found, dict):
            found = found.get(key)
        else:
            inside = isinstance(found, list | tuple) and type(key) is int and 0 <= key < len(found)
            found = found[key] if inside else None  # type: ignore[index]
    if isinstance(found, Opaque):  # its state is a dict, or two with its slots
        states = found.state if isinstance(found.state, tuple) else (found.state,)
        inner = [state["_local_tensor"] for state in states if _has_local(state)]
        found = inner[0] if inner else found
    if isinstance(found, StoredTensor):
        return found
    raise FormatError(f"{file.name}: {where} is a {type(found).__name__}, not a tensor")


def _has_local(state: object) -> TypeGuard[dict[str, object]]:
    return isinstance(state, dict) and "_local_tensor" in state


def _is_packed(tensor: StoredTensor) -> bool:
    return Piece(Box.whole(tensor.shape), 0, tensor.strides).is_packed or 0 in tensor.shape


def _dict(value: object, where: str) -> Mapping[object, object]:
    if isinstance(value, dict):
        return value
    raise FormatError(f"{where} is a {type(value).__name__}, torch_checkpointing stores a dict")
