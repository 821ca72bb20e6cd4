"""Files of torch.save (.pt, .pth, .bin): the zip format that torch writes since 1.6.

Reading opens the zip directory and `data.pkl`, through the restricted reader; a tensor is the view
of its storage record that the pickle says, strides, offset and all. Writing streams a zip that
`torch.load` opens with `weights_only=True` and with `mmap=True`: storages stored as they are, each
beginning at a multiple of 64 bytes, sizes beyond 4 GiB by way of zip64. torch is not needed.

Files of the older format (a row of pickles) are refused with the way to convert them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence, Set

from formats.catalog import Catalog, FileRecord, TensorRef, Tree
from formats.errors import CorruptError, UnsupportedError
from formats.outgoing import Outgoing, OutgoingTensor
from formats.pickle_reader import load
from formats.pickle_records import Storage, StoredTensor
from formats.pickle_writer import dump
from formats.storage import FileWriter, Reader, Writer
from formats.torch_tree import Nest
from formats.zip_records import PICKLE, Archive
from sharding.layout import row_major

ALIGNMENT = 64
"""Storages begin at multiples of this, as torch's own do, for mmap and vector loads."""

FOLDER = "archive/"
"""The folder of the records in the zip; torch takes any."""

ZIP64_BYTES = 1 << 30
"""Records this large get 64-bit sizes. zipfile decides for itself somewhat above this (5 % below
2 GiB), so deciding earlier makes the length of the header certain."""

_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_EXTRA_HEADER_BYTES = 4


def read(reader: Reader, name: str) -> Catalog:
    """The catalog of the file `name`. Reads the zip directory and the pickle, no tensor.

    Raises:
        HostileError: the pickle asks for something that no checkpoint needs. Nothing was executed.
        UnsupportedError: an older format, big-endian bytes, kinds of tensors that are not read.
        CorruptError: the file is truncated or damaged.
        FormatError: it is no sound file in another way.
    """
    try:
        archive = Archive(reader, name)
    except CorruptError:
        if reader.size(name) >= 2 and reader.read(name, 0, 1) == b"\x80":
            raise UnsupportedError(
                f"{name}: a bare pickle or the format of torch.save before 1.6; open it with "
                "torch.load where you trust it, and save it again with torch.save"
            ) from None
        raise
    nest = Nest(name)
    tree = nest.tree(load(archive.read(PICKLE), name), (), archive)
    files = (FileRecord(name, reader.size(name)),)
    return Catalog("torch", nest.tensors, tree, files, nest.aliases)


def write(writer: Writer, name: str, state: Outgoing) -> None:
    """Stream a whole checkpoint into the file `name`, one block of one tensor in memory at a time.

    Tied names share a storage. Raises ValueError before a byte is written when the tree lacks a
    tensor or holds a value that torch could not load.
    """
    pickled, order = pack(state.tree, state.tensors, state.aliases)
    check_all_placed(name, state, {tensor.name for tensor in order})
    with writer.create(name) as file:
        write_archive(CountingFile(file), pickled, order)


def pack(
    tree: Tree, tensors: Mapping[str, OutgoingTensor], aliases: Mapping[str, str]
) -> tuple[bytes, list[OutgoingTensor]]:
    """The pickle of a tree, and the tensors whose bytes are the storages 0, 1, 2 ... of it."""
    order: dict[str, StoredTensor] = {}

    def packed(node: Tree) -> object:
        if isinstance(node, TensorRef):
            name = aliases.get(node.name, node.name)
            if name not in order:
                order[name] = _stored(tensors[name], str(len(order)))
            return order[name]
        if isinstance(node, dict):
            return {key: packed(value) for key, value in node.items()}
        if isinstance(node, list):
            return [packed(value) for value in node]
        if isinstance(node, tuple):
            return tuple(packed(value) for value in node)
        return node

    return dump(packed(tree)), [tensors[name] for name in order]


def check_all_placed(where: str, state: Outgoing, placed: Set[str]) -> None:
    """Raise ValueError when a tensor would be lost because the tree refers to it nowhere."""
    lost = [name for name, tensor in state.tensors.items() if tensor.name not in placed]
    if lost:
        raise ValueError(
            f"{where}: the tree has no place for {len(lost)} of the tensors: {', '.join(lost[:5])}"
        )


def _stored(tensor: OutgoingTensor, key: str) -> StoredTensor:
    numel = tensor.nbytes // tensor.dtype.itemsize
    storage = Storage(key, tensor.dtype, numel)
    return StoredTensor(storage, tensor.dtype, 0, tensor.shape, row_major(tensor.shape))


class CountingFile:
    """A file being written as zipfile wants it: it can say where it is, but not go back."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file
        self._at = 0

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        """Append the data."""
        self._file.write([data])
        nbytes = memoryview(data).nbytes
        self._at += nbytes
        return nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._at

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        """Whoever opened the file closes it."""


def write_archive(file: CountingFile, pickled: bytes, tensors: Sequence[OutgoingTensor]) -> None:
    """Write one torch.save zip; storage `i` of the pickle has the bytes of `tensors[i]`."""
    # torch 2.7 and later also write `.format_version`, by which they promise where miniz puts each
    # record. Without it, torch looks at the headers, as it does for files of earlier versions.
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(FOLDER + PICKLE), pickled)
        archive.writestr(zipfile.ZipInfo(FOLDER + "byteorder"), b"little")
        for key, tensor in enumerate(tensors):
            _write_storage(archive, file.tell(), f"{FOLDER}data/{key}", tensor)
        archive.writestr(zipfile.ZipInfo(FOLDER + "version"), b"3\n")


def _write_storage(archive: zipfile.ZipFile, at: int, name: str, tensor: OutgoingTensor) -> None:
    info = zipfile.ZipInfo(name)
    info.file_size = tensor.nbytes
    zip64 = tensor.nbytes >= ZIP64_BYTES
    header = _LOCAL_HEADER_BYTES + len(name) + zip64 * _ZIP64_EXTRA_BYTES + _EXTRA_HEADER_BYTES
    padding = -(at + header) % ALIGNMENT
    # "FB" is the extra field that torch itself pads with.
    info.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
    written = 0
    with archive.open(info, "w", force_zip64=zip64) as record:
        for block in tensor.blocks():
            written += record.write(block)
    if written != tensor.nbytes:
        raise ValueError(
            f"{tensor.name}: its stream gave {written} bytes, shape {tensor.shape} and dtype "
            f"{tensor.dtype} need {tensor.nbytes}"
        )
