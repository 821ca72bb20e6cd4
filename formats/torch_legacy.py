"""Reads files of torch.save before torch 1.6, and files that are one pickle.

A file of the older format is a row of pickles, the state among them, and then the storages in the
order of the listed keys: the number of elements in 8 bytes, and the elements. Tensors thus lie at
known bytes of the file, as in the zip format. torch writes it today if
`_use_new_zipfile_serialization=False`.

A pickle of plain `pickle.dump` has numpy's arrays and torch's storages inside. Neither format has
checksums. The reader reads the beginning of the file, and twice as much each time that the pickles
do not end in it.
"""

from __future__ import annotations

from collections.abc import Mapping

from formats.catalog import Catalog, Extent, FileRecord
from formats.errors import (
    CorruptError,
    FormatError,
    HostileError,
    SizeError,
    UnsupportedError,
)
from formats.limits import check
from formats.pickle_machine import Loaded
from formats.pickle_reader import COUNT_BYTES, LEGACY_MAGIC, load_first, load_row
from formats.pickle_records import Storage
from formats.storage import Reader
from formats.torch_tree import Nest

LEGACY, PICKLE = "torch-legacy", "pickle"
"""The names of the two formats."""
FIRST_BYTES = 1 << 20
"""Bytes of the first read."""


def read(reader: Reader, name: str) -> Catalog:
    """Reads the catalog of the file `name`: its pickles, and no tensor of the older format.

    Raises:
        HostileError: a pickle has a name of an attack. Nothing was executed.
        UnsupportedError: bytes follow a plain pickle, as in files of joblib.
        CorruptError: the file is truncated.
        FormatError: the file is invalid in another way.
    """
    size = reader.size(name)
    loaded, row = _read_pickles(reader, name, size)
    if row is None and loaded.end != size:
        raise UnsupportedError(
            f"{name}: {size - loaded.end} bytes follow its pickle: there are several, or joblib "
            "wrote it; load it with the library that wrote it, and save it with torch.save"
        )
    held = loaded if row is None else row
    storages = LegacyStorages(reader, name, size, held.storages, held.end)
    if row is None and held.storages:
        raise FormatError(f"{name}: the pickle refers to storages outside of it")
    nest = Nest(name, held.end)
    tree = nest.tree(held.value, (), storages)
    kind = PICKLE if row is None else LEGACY
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
        """Returns the bytes of a storage."""
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


def _read_pickles(reader: Reader, name: str, size: int) -> tuple[Loaded, Loaded | None]:
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
