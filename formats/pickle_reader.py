"""Reads pickles as data: one that is the whole of its bytes, or the first of several in a file.

`formats.pickle_machine` has the rules. The result may contain itself, or one part many times: a
walk over it needs bounds.
"""

from __future__ import annotations

from dataclasses import replace

from formats.errors import FormatError, UnsupportedError
from formats.limits import check
from formats.pickle_machine import Loaded, run
from formats.pickle_records import Storage

LEGACY_MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
"""The first two pickles of a file of torch.save before 1.6."""
COUNT_BYTES = 8
"""The bytes of the number of elements before each storage of such a file."""


def load(data: bytes, where: str) -> object:
    """Returns the content of a pickle as plain values and records of `formats.pickle_records`.

    `where` begins each message: the file and, if it has several pickles, the place of this one.

    Raises:
        HostileError: the pickle has a name of an attack, or an absurd size.
        UnsupportedError: the pickle has an older protocol, or a kind of tensors that is not read.
        FormatError: the pickle is not valid.
    """
    return load_whole(data, where).value


def load_whole(data: bytes, where: str) -> Loaded:
    """Returns the content of a pickle, with the attributes of its dicts. Raises as `load` does."""
    loaded = load_first(data, where)
    if loaded.end != len(data):
        raise FormatError(f"{where}: bytes follow the pickle, which ends at byte {loaded.end}")
    return loaded


def load_first(data: bytes, where: str, at: int = 0, is_inside: bool = False) -> Loaded:
    """Returns the content of the pickle at byte `at`. Raises as `load` does.

    `is_inside` is for a pickle in another one; it may have no third one inside.
    """
    check("pickle_bytes", len(data) - at, where)
    return run(data, at, where, _no_storage if is_inside else _storage_inside)


def load_row(data: bytes, where: str, is_inside: bool = False) -> Loaded:
    """Returns the content of the pickles at the beginning of a file of torch.save before 1.6.

    These are a magic number, a version, the sizes of C's types, the state, and the keys of the
    storages, which follow. `storages` has them in the order of the file. Raises as `load` does.
    """
    values, at = [], 0
    for _ in range(5):
        loaded = load_first(data, where, at, is_inside)
        values.append(loaded)
        at = loaded.end
    magic, version, system, state, keys = values
    if magic.value != LEGACY_MAGIC or version.value != LEGACY_VERSION:
        raise FormatError(f"{where}: not a file of torch.save")
    if not isinstance(system.value, dict) or system.value.get("little_endian") is not True:
        raise UnsupportedError(
            f"{where}: it was written on a big-endian machine; load it there with torch.load and "
            "save it again"
        )
    listed = keys.value if isinstance(keys.value, list) else []
    found = {
        key: state.storages[key] for key in listed if type(key) is str and key in state.storages
    }
    if not len(listed) == len(found) == len(state.storages):
        raise FormatError(f"{where}: the listed storages are not those of the state")
    return Loaded(state.value, at, found, state.attributes)


def _storage_inside(data: object) -> Storage:
    """Returns the storage in the bytes of a file of torch.save, as plain pickles have it."""
    if type(data) is not bytes:
        raise FormatError("a storage is not in bytes of its own")
    row = load_row(data, "a storage in the pickle", is_inside=True)
    found = row.value
    if not isinstance(found, Storage) or len(data) - row.end != COUNT_BYTES + found.nbytes:
        raise FormatError("the bytes of a storage have another length")
    return replace(found, data=data[row.end + COUNT_BYTES :])


def _no_storage(data: object) -> Storage:
    raise FormatError("the pickle of a storage has a storage inside")
