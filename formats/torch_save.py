"""Reads and writes files of torch.save (.pt, .pth, .bin), and reads files that are one pickle.

A file since torch 1.6 is a zip. `read_archive` opens its directory and, by the restricted reader,
`data.pkl`. A tensor is a view of its storage record, with the strides and offset in the pickle. The
file of a TorchScript program is such a zip too: its attributes are the tree, or the constants of a
frozen one, and its code is not read. `plan` makes a zip that `torch.load` opens with
`weights_only=True` and with `mmap=True`: storages are uncompressed and begin at multiples of 64
bytes, and zip64 holds sizes beyond 4 GiB. torch is not needed.

An older file is a row of pickles, the state among them, and then the storages in the order of the
listed keys: the number of elements in 8 bytes, and the elements. Its tensors thus lie at known
bytes as well. torch writes it today if `_use_new_zipfile_serialization=False`. A pickle of plain
`pickle.dump` has numpy's arrays and torch's storages inside. Neither has checksums. The reader
reads the beginning of such a file, and twice as much each time that the pickles do not end in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from copy import copy
from types import MappingProxyType

from formats import npz
from formats.catalog import (
    Catalog,
    Extent,
    FilePlan,
    FileRecord,
    Key,
    Outgoing,
    OutgoingTensor,
    Part,
    TensorRef,
    Tree,
    change_dicts,
    map_tree,
    module_metadata,
)
from formats.detect import HEAD_BYTES, PICKLE, kind_of, zip_kind
from formats.errors import (
    CorruptError,
    ForeignFileError,
    FormatError,
    HostileError,
    SizeError,
    UnsupportedError,
)
from formats.limits import check
from formats.pickles.machine import (
    COUNT_BYTES,
    LEGACY_MAGIC,
    Loaded,
    load,
    load_first,
    load_row,
    load_whole,
)
from formats.pickles.records import Storage, StoredTensor
from formats.pickles.tree import Nest
from formats.pickles.writer import StateDict, dump
from formats.storage import Reader
from formats.zip_plan import Member, zip_parts
from formats.zip_records import DATA_PICKLE, Archive
from sharding.errors import ArgumentError, format_names
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
    """Reads the catalog of the file `name`, of any age, and no tensor.

    Raises:
        HostileError: the pickle has a name of an attack. Nothing was executed.
        UnsupportedError: the file has big-endian bytes, or is another kind of zip.
        CorruptError: the file is truncated or damaged.
        FormatError: the file is invalid in another way.
    """
    size = reader.size(name)
    if kind_of(reader.read(name, 0, min(HEAD_BYTES, size))) is PICKLE:
        return read_pickles(reader, name)
    return read_archive(Archive(reader, name), size)


def read_zip(reader: Reader, name: str) -> Catalog:
    """Reads the catalog of a zip of torch.save, of TorchScript or of numpy, by its records.

    Raises as the reader of its format does, and ForeignFileError for another kind of zip.
    """
    archive, size = Archive(reader, name, is_torch=False), reader.size(name)
    kind = zip_kind(archive.names)
    if kind is None:
        archive.enter()
        return read_archive(archive, size)
    if kind.reader:
        return npz.read_archive(archive, size)
    raise ForeignFileError(name, kind.name, kind.advice)


def read_archive(archive: Archive, size: int) -> Catalog:
    """Reads the catalog of a zip that is a file of `size` bytes. Raises as `read` does."""
    name, pickled = archive.file, archive.read(DATA_PICKLE)
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
    storages = copy(archive)
    storages.storages = "constants/"
    return {OF_CODE: nest.tree(named, (OF_CODE,), storages)}


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

    def pack_leaf(leaf: Tree) -> object:
        if not isinstance(leaf, TensorRef):
            return leaf
        name = aliases.get(leaf.name, leaf.name)
        if name not in order:
            order[name] = _place(tensors[name], str(len(order)))
        return order[name]

    def add_versions(entries: dict[object, object], path: str) -> object:
        return StateDict(entries, {"_metadata": module_metadata(entries, versions[path])})

    nest = change_dicts(map_tree(tree, pack_leaf), versions.keys(), add_versions)
    return dump(nest), [tensors[name] for name in order]


def check_all_placed(where: str, state: Outgoing, placed: Set[str]) -> None:
    """Raises ArgumentError if the tree refers to a tensor nowhere, so that it would be lost."""
    lost = [name for name, tensor in state.tensors.items() if tensor.name not in placed]
    if lost:
        raise ArgumentError(
            f"{where}: the tree has no place for {len(lost)} of the tensors: "
            f"{format_names(lost, 5)}",
            names=lost,
        )


def _place(tensor: OutgoingTensor, key: str) -> StoredTensor:
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
    first = (Member(FOLDER + DATA_PICKLE, pickled), Member(FOLDER + "byteorder", b"little"))
    return zip_parts([*first, *storages, Member(FOLDER + "version", b"3\n")], tensors_before)


LEGACY, PLAIN_PICKLE = "torch-legacy", "pickle"
"""The names of the two formats."""
FIRST_BYTES = 1 << 20
"""Bytes of the first read."""


def read_pickles(reader: Reader, name: str) -> Catalog:
    """Reads the catalog of the file `name`: its pickles, and no tensor of the older format.

    Raises:
        HostileError: a pickle has a name of an attack. Nothing was executed.
        UnsupportedError: bytes follow a plain pickle, as in files of joblib.
        CorruptError: the file is truncated.
        FormatError: the file is invalid in another way.
    """
    size = reader.size(name)
    loaded, row = _load_pickles(reader, name, size)
    if row is None and loaded.end != size:
        raise UnsupportedError(
            f"{name}: {size - loaded.end} bytes follow its pickle: there are several, or joblib "
            "wrote it; load it with the library that wrote it, and save it with torch.save"
        )
    value = loaded if row is None else row
    storages = LegacyStorages(reader, name, size, value.storages, value.end)
    if row is None and value.storages:
        raise FormatError(f"{name}: the pickle refers to storages outside of it")
    nest = Nest(name, value.end)
    tree = nest.tree(value.value, (), storages)
    kind = PLAIN_PICKLE if row is None else LEGACY
    return Catalog(kind, nest.tensors, tree, (FileRecord(name, size),), nest.aliases)


class LegacyStorages:
    """The storages of a file, which lie end to end from a byte on."""

    def __init__(
        self, reader: Reader, file: str, size: int, storages: Mapping[str, Storage], at: int
    ) -> None:
        self.where = self.file = file
        self._reader = reader
        self._extents: dict[str, Extent] = {}
        self._storages = storages
        for key, storage in storages.items():
            at += COUNT_BYTES
            self._extents[key] = Extent(file, at, storage.nbytes)
            at += storage.nbytes
        if storages and at != size:
            raise SizeError(file, size, at)

    def nbytes_of(self, key: str) -> int:
        return self._extents[key].nbytes

    def extent_of(self, key: str) -> Extent:
        """Returns the extent of a storage. Compares the number of elements in front of it."""
        extent, storage = self._extents[key], self._storages[key]
        head = self._reader.read(self.file, extent.offset - COUNT_BYTES, COUNT_BYTES)
        if int.from_bytes(head, "little") != storage.numel:
            raise CorruptError(
                f"{self.file}: bytes {extent.offset - COUNT_BYTES}:{extent.offset} have another "
                f"number of elements than the pickle, {storage.numel}; restore the file from "
                "another copy"
            )
        return extent


def _load_pickles(reader: Reader, name: str, size: int) -> tuple[Loaded, Loaded | None]:
    """Returns the first pickle, and the state of a file of the older format."""
    nbytes = min(size, FIRST_BYTES)
    while True:
        check("pickle_bytes", nbytes, name)
        data = reader.read(name, 0, nbytes)
        try:
            first = load_first(data, name)
            return first, load_row(data, name) if first.value == LEGACY_MAGIC else None
        except (HostileError, UnsupportedError):
            raise
        except FormatError:
            if nbytes == size:
                raise
        nbytes = min(size, 2 * nbytes)
