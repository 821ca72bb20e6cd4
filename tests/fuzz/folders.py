"""A folder in memory that notes what is asked of it, and everything that a reader does with one."""

from __future__ import annotations

from typing import cast

import numpy as np

from ckpt.checking import verify as verifying
from ckpt.errors import NotACheckpointError
from ckpt.opening import sources
from ckpt.plan.read_plan import requests_for
from ckpt.stores.store import Store
from ckpt.transfer.read import read_requests
from formats.catalog import Catalog, plain_values
from formats.errors import CorruptError, FormatError, GoneError, SizeError, TooLargeError
from formats.storage import LOCAL_READ_BYTES
from sharding.errors import HoleError
from sharding.layout import Box, Piece
from tools import inspect

Files = dict[str, bytes]
"""What a folder has, by name; `../other/name` lies in a folder beside it."""

REFUSALS = (FormatError, NotACheckpointError, HoleError)
"""What a reader may raise, whatever the bytes are."""

MOST_BYTES = 1 << 20
"""Larger tensors are looked at, and not read: their memory is the caller's."""


class Folder:
    """A reader of files in memory."""

    def __init__(self, files: Files) -> None:
        self.url = "memory://fuzz"
        self.read_bytes = LOCAL_READ_BYTES
        self.files = files
        self.asked: set[str] = set()

    def names(self) -> list[str]:
        return sorted(name for name in self.files if "/" not in name)

    def folders(self) -> list[str]:
        return []

    def entries(self, folder: str = "") -> list[str]:
        start = f"{folder}/" if folder else ""
        below = [name[len(start) :] for name in self.files if name.startswith(start)]
        return sorted({name.partition("/")[0] + "/" * ("/" in name) for name in below})

    def size(self, name: str) -> int:
        return len(self._data(name))

    def read_whole(self, name: str, limit: int) -> bytes:
        data = self._data(name)
        if len(data) > limit:
            raise TooLargeError(name, len(data), limit)
        return data

    def read_end(self, name: str, size: int, length: int) -> bytes:
        data = self._data(name)
        if len(data) != size:
            raise SizeError(name, len(data), size)
        return self.read(name, size - length, length)

    def read(self, name: str, offset: int, length: int) -> bytes:
        assert 0 <= offset <= 1 << 62, f"{name} is read from byte {offset} on"
        assert 0 <= length <= 1 << 62, f"{length} bytes of {name} are read"
        if name not in self.files:
            raise GoneError(name)
        data = self._data(name)[offset : offset + length]
        if len(data) != length:
            raise CorruptError(f"{name}: it ends before byte {offset + length}")
        return data

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        for target in targets:
            target[:] = self.read(name, offset, target.nbytes)
            offset += target.nbytes

    def _data(self, name: str) -> bytes:
        self.asked.add(name)
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]


def exercise(files: Files, file: str | None = None) -> Catalog | None:
    """All that is done with a checkpoint: opened, looked at, read and verified.

    None where it was refused. Raises whatever no reader may raise.
    """
    folder = Folder(files)
    found, message = None, ""
    try:
        found = _exercise(folder, file)
    except REFUSALS as error:
        message = str(error)
    assert len(message) < 100_000, "a message of megabytes"
    for name in folder.asked:
        parts = name.removeprefix("../").split("/")
        assert not {"..", ".", ""} & set(parts), f"{name!r} leaves the folder"
        assert len(parts) <= 3, f"{name!r} is far away"
    return found


def _exercise(folder: Folder, file: str | None) -> Catalog:
    store = cast("Store", folder)
    found = sources._read_folder(store) if file is None else sources._read_file(store, file)
    catalog = sources._credible("memory", found)
    _look(catalog)
    refused: list[Exception] = []
    for name in catalog.tensors:
        try:
            _read(folder, catalog, name)
        except REFUSALS as error:
            refused.append(error)
    report = verifying._of_catalog(store, catalog, None)
    if refused:
        raise refused[0]
    if report.problems:
        raise CorruptError(report.problems[0].message)
    return catalog


def _read(folder: Folder, catalog: Catalog, name: str) -> None:
    record = catalog.tensors[name]
    for stored in record.pieces:
        assert stored.piece.box in Box.whole(record.shape)
    if record.nbytes <= MOST_BYTES:
        memory = np.zeros(record.nbytes // record.dtype.itemsize * record.dtype.itemsize, np.uint8)
        whole = [Piece.packed(Box.whole(record.shape))]
        read_requests(folder, requests_for(record, whole), [memoryview(memory.data)])


def _look(catalog: Catalog) -> None:
    """`ckpt inspect` and `ckpt ls` show nothing that a terminal would take for a command."""
    shown = inspect.Options("memory", [], None, True, True, True, as_json=False, html=None)
    values = dict(plain_values(catalog.tree))
    for line in inspect._lines(shown, catalog, values, lambda name: True):
        assert line.isprintable(), line
    inspect.json_text(inspect._describe("memory", catalog, values, lambda name: True))
    for alias, name in catalog.aliases.items():
        assert name in catalog.tensors, f"{alias} is tied to {name}, which is nowhere"
