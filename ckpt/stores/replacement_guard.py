"""A store that distinguishes a checkpoint that was replaced or deleted from a damaged one.

A checkpoint never changes in place. An overwriting save commits a new manifest and then deletes the
old files. If a file that the manifest names is missing, the guard reads the manifest again. If the
manifest is unchanged, the file is lost. If it is another one, or gone, the checkpoint was replaced
or deleted, and the reader may begin again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from ckpt.errors import ReplacedError
from ckpt.stores.store import Store, absolute, open_store
from formats.errors import GoneError, TooLargeError
from formats.limits import current
from formats.native.manifest import MANIFEST

T = TypeVar("T")

TRIES = 10
"""The largest number of reads of a checkpoint that is replaced each time."""
MANIFEST_HEAD_BYTES = 64
"""The first bytes of a manifest. They contain its digest, which no two checkpoints share."""


def guard(store: Store) -> Store:
    """Returns a store that raises ReplacedError for files that went with a replaced checkpoint.

    The first manifest that is read through this store defines the checkpoint. Without one the guard
    does nothing.
    """
    return cast("Store", _ReplacementGuard(store))


def unless_replaced(action: Callable[[], T]) -> T:
    """Returns the result of an action, which begins again after a ReplacedError."""
    for _ in range(TRIES - 1):
        try:
            return action()
        except ReplacedError:
            pass
    return action()


def head_now(url: str, store: Store) -> bytes:
    """Reads the first bytes of the present manifest; none without a manifest.

    `url` is absolute. The store itself may still have the old manifest open.
    """
    with open_store(url, store.options) as fresh:
        try:
            return fresh.read_whole(MANIFEST, current().manifest_bytes)[:MANIFEST_HEAD_BYTES]
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except TooLargeError as error:
            return str(error).encode()  # no manifest begins like this


def replaced_error(url: str, name: str, now: bytes) -> ReplacedError:
    """Returns the error for a missing file; `now` is the result of `head_now`."""
    happened = "replaced by another one" if now else "deleted"
    return ReplacedError(
        f"{url}: the checkpoint was {happened} while it was read, and {name} went with it; "
        "nothing is damaged: read it again"
    )


class _ReplacementGuard:
    """See `guard`. Attributes that are not here are the store's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._where = absolute(store.url)
        self._head: bytes | None = None

    def __str__(self) -> str:
        return str(self._store)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def size(self, name: str) -> int:
        """Returns the size of a file."""
        try:
            return self._store.size(name)
        except FileNotFoundError as error:
            self._look(name, error)
            raise

    def read_whole(self, name: str, limit: int) -> bytes:
        """Reads all bytes of a small file. Raises ReplacedError for another manifest."""
        try:
            data = self._store.read_whole(name, limit)
        except FileNotFoundError as error:
            self._look(name, error)
            raise
        if name == MANIFEST:
            head = data[:MANIFEST_HEAD_BYTES]
            if self._head is not None and self._head != head:
                raise replaced_error(self._store.url, name, head)
            self._head = head
        return data

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """Reads the last bytes of a file. Raises SizeError unless it has `size` bytes."""
        try:
            return self._store.read_end(name, size, length)
        except FileNotFoundError as error:
            self._look(name, error)
            raise

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Reads exactly these bytes of a file."""
        try:
            return self._store.read(name, offset, length)
        except (GoneError, FileNotFoundError) as error:
            self._look(name, error)
            raise

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """Fills the buffers end to end with the bytes from `offset` on."""
        try:
            self._store.read_into(name, offset, *targets)
        except (GoneError, FileNotFoundError) as error:
            self._look(name, error)
            raise

    def _look(self, name: str, error: Exception) -> None:
        """Raises ReplacedError if the manifest is no longer the one that was read first."""
        if self._head is not None:
            now = head_now(self._where, self._store)
            if now != self._head:
                raise replaced_error(self._store.url, name, now) from error
