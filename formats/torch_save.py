"""Reads and writes files of torch.save (.pt, .pth, .bin) in the zip format of torch since 1.6.

`read` opens the zip directory and, by the restricted reader, `data.pkl`. A tensor is a view of its
storage record, with the strides and offset in the pickle. The file of a TorchScript program is such
a zip too: its attributes are the tree, or the constants of a frozen one, and its code is not read.
`plan` makes a zip that `torch.load` opens with `weights_only=True` and with `mmap=True`: storages
are uncompressed and begin at multiples of 64 bytes, and zip64 holds sizes beyond 4 GiB. torch is
not needed.

`formats.torch_legacy` reads files of the older format, a row of pickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from formats import torch_legacy
from formats.catalog import (
    Catalog,
    Extent,
    FileRecord,
    Key,
    TensorRef,
    Tree,
    change_dicts,
    map_tree,
    module_metadata,
)
from formats.errors import CorruptError
from formats.file_plan import FilePlan, Part
from formats.outgoing import Outgoing, OutgoingTensor
from formats.pickle_reader import load, load_whole
from formats.pickle_records import Storage, StoredTensor
from formats.pickle_writer import StateDict, dump
from formats.storage import Reader
from formats.torch_tree import Nest
from formats.zip_plan import Member, zip_parts
from formats.zip_records import PICKLE, Archive
from sharding.errors import ArgumentError, listed
from sharding.layout import row_major

ALIGNMENT = 64
"""Storages begin at multiples of so many bytes, as torch's own, for mmap and vector loads."""

TORCH, TORCHSCRIPT = "torch", "torchscript"
"""The names of the formats."""

LIGHTNING_VERSION, WEIGHTS = "pytorch-lightning_version", "state_dict"
"""The keys by which a checkpoint of Lightning is known, and of its weights."""

CONSTANTS, OF_CODE = "constants.pkl", "CONSTANTS"
"""The pickle of a TorchScript program's constants, and the name that they have in its code."""

FOLDER = "archive/"
"""The folder of the records in the zip; torch accepts any name."""


def read(reader: Reader, name: str) -> Catalog:
    """Reads the catalog of the file `name`, of this or the older format, and no tensor.

    Raises:
        HostileError: the pickle has a name of an attack. Nothing was executed.
        UnsupportedError: the file has big-endian bytes, or is another kind of zip.
        CorruptError: the file is truncated or damaged.
        FormatError: the file is invalid in another way.
    """
    try:
        archive = Archive(reader, name)
    except CorruptError:
        if reader.size(name) and reader.read(name, 0, 1) == b"\x80":
            return torch_legacy.read(reader, name)
        raise
    return read_archive(archive, reader.size(name))


def read_archive(archive: Archive, size: int) -> Catalog:
    """Reads the catalog of a zip that is a file of `size` bytes. Raises as `read` does."""
    name, pickled = archive.file, archive.read(PICKLE)
    nest = Nest(name, len(pickled))
    loaded = load_whole(pickled, name)
    nest.attributes = loaded.attributes
    tree = nest.tree(loaded.value, (), archive)
    kind = TORCHSCRIPT if CONSTANTS in archive else TORCH
    if kind == TORCHSCRIPT and isinstance(tree, dict) and not nest.tensors:
        tree |= _constants(archive, nest)
    files = (FileRecord(name, size),)
    weights = weights_of_lightning(tree)
    tensors, versions = nest.tensors, nest.versions
    return Catalog(kind, tensors, tree, files, nest.aliases, weights=weights, versions=versions)


def _constants(archive: Archive, nest: Nest) -> dict[Key, Tree]:
    """Returns the constants of a TorchScript program, by the names that its code gives them.

    They are the weights of a frozen program, which has no attributes. Other programs have small
    tensors of their code among them, which `state_dict()` does not show.
    """
    pickled = archive.read(CONSTANTS)
    nest.grow(len(pickled))
    constants = load(pickled, archive.file)
    if not isinstance(constants, tuple) or not constants:
        return {}
    named = {f"c{at}": constant for at, constant in enumerate(constants)}
    storages = _Constants(archive, archive.where, archive.file)
    return {OF_CODE: nest.tree(named, (OF_CODE,), storages)}


@dataclass(slots=True)
class _Constants:
    """The storages of the constants, which lie in a folder of their own."""

    archive: Archive
    where: str
    file: str

    def nbytes_of(self, key: str) -> int:
        """Returns the bytes of a storage. Raises CorruptError if it is missing."""
        return self.archive.record(f"constants/{key}").nbytes

    def extent_of(self, key: str) -> Extent:
        """Returns the extent of a storage."""
        return self.archive.extent(f"constants/{key}")


def weights_of_lightning(tree: Tree) -> str:
    """Returns the place of the weights in a checkpoint of Lightning; empty for another one.

    >>> weights_of_lightning({"pytorch-lightning_version": "2.6", "state_dict": {}})
    'state_dict'
    """
    is_lightning = isinstance(tree, dict) and LIGHTNING_VERSION in tree and WEIGHTS in tree
    return WEIGHTS if is_lightning else ""


def plan(name: str, state: Outgoing) -> FilePlan:
    """Plans the file `name` with a whole checkpoint. Tied names share a storage.

    Raises ArgumentError if the tree lacks a tensor or has a value that torch could not load.
    """
    pickled, order = pack(state.tree, state.tensors, state.aliases, state.versions)
    check_all_placed(name, state, {tensor.name for tensor in order})
    return FilePlan(name, archive_parts(pickled, order))


def pack(
    tree: Tree,
    tensors: Mapping[str, OutgoingTensor],
    aliases: Mapping[str, str],
    versions: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> tuple[bytes, list[OutgoingTensor]]:
    """Returns the pickle of a tree, and the tensors whose bytes are its storages 0, 1, 2 ...

    The state dicts of modules with `versions` have them in `_metadata`, for `load_state_dict`.
    """
    order: dict[str, StoredTensor] = {}

    def packed(leaf: Tree) -> object:
        if not isinstance(leaf, TensorRef):
            return leaf
        name = aliases.get(leaf.name, leaf.name)
        if name not in order:
            order[name] = _stored(tensors[name], str(len(order)))
        return order[name]

    def told(entries: dict[object, object], path: str) -> object:
        return StateDict(entries, {"_metadata": module_metadata(entries, versions[path])})

    nest = change_dicts(map_tree(tree, packed), versions.keys(), told)
    return dump(nest), [tensors[name] for name in order]


def check_all_placed(where: str, state: Outgoing, placed: Set[str]) -> None:
    """Raises ArgumentError if the tree refers to a tensor nowhere, so that it would be lost."""
    lost = [name for name, tensor in state.tensors.items() if tensor.name not in placed]
    if lost:
        raise ArgumentError(
            f"{where}: the tree has no place for {len(lost)} of the tensors: {listed(lost, 5)}",
            names=lost,
        )


def _stored(tensor: OutgoingTensor, key: str) -> StoredTensor:
    numel = tensor.nbytes // tensor.dtype.itemsize
    storage = Storage(key, tensor.dtype, numel)
    return StoredTensor(storage, tensor.dtype, 0, tensor.shape, row_major(tensor.shape))


def archive_parts(
    pickled: bytes, tensors: Sequence[OutgoingTensor], tensors_before: int = 0
) -> list[Part]:
    """Plans one torch.save zip. Storage `i` of the pickle has the bytes of `tensors[i]`."""
    # torch 2.7 and later also write `.format_version`, which guarantees the places of records.
    # Without it, torch reads the headers, as for files of earlier versions.
    storages = [
        Member(f"{FOLDER}data/{key}", tensor, ALIGNMENT) for key, tensor in enumerate(tensors)
    ]
    first = (Member(FOLDER + PICKLE, pickled), Member(FOLDER + "byteorder", b"little"))
    return zip_parts([*first, *storages, Member(FOLDER + "version", b"3\n")], tensors_before)
