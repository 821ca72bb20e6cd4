"""A store that knows a checkpoint which is replaced or deleted while it is read from a damaged one.

A checkpoint is never changed in place: one that is written over gets a new manifest, and then its
old files go. So where a file is missing that a manifest names, the manifest is read again. If it
is what it was, the file is lost. If it is another one, or gone, nothing is lost: whoever reads was
too late, and may begin again.
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
"""How often a checkpoint is begun that is replaced each time."""
MANIFEST_HEAD_BYTES = 64
"""Of a manifest: its own digest stands in them, which no two checkpoints have in common."""


def guarded(store: Store) -> Store:
    """The store, which raises ReplacedError for what is missing because of another checkpoint.

    It is about the native checkpoint whose manifest was read through it first, and changes nothing
    where there is none.
    """
    return cast("Store", _ReplacementGuard(store))


def unless_replaced(action: Callable[[], T]) -> T:
    """What an action gives, begun again where the checkpoint is replaced meanwhile."""
    for _ in range(TRIES - 1):
        try:
            return action()
        except ReplacedError:
            pass
    return action()


def head_now(url: str, store: Store) -> bytes:
    """What the manifest begins with that is there now; nothing where none is.

    `url` is an absolute one. The store itself may still have the old one open.
    """
    with open_store(url, store.options) as fresh:
        try:
            return fresh.read_whole(MANIFEST, current().manifest_bytes)[:MANIFEST_HEAD_BYTES]
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except TooLargeError as error:
            return str(error).encode()  # which no manifest begins with


def replaced(url: str, name: str, now: bytes) -> ReplacedError:
    """The error for a file that is missing; `now` is what `head_now` gives."""
    happened = "replaced by another one" if now else "deleted"
    return ReplacedError(
        f"{url}: the checkpoint was {happened} while it was read, and {name} went with it; "
        "nothing is damaged: read it again"
    )


class _ReplacementGuard:
    """See `guarded`. What is not here is the store's own."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self.read_bytes = store.read_bytes
        self._store = store
        self._where = absolute(store.url)
        self._head: bytes | None = None

    def __str__(self) -> str:
        return str(self._store)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def size(self, name: str) -> int:
        """Bytes in a file."""
        try:
            return self._store.size(name)
        except FileNotFoundError as error:
            self._look(name, error)
            raise

    def read_whole(self, name: str, limit: int) -> bytes:
        """All bytes of a small file. The manifest is always the same one."""
        try:
            data = self._store.read_whole(name, limit)
        except FileNotFoundError as error:
            self._look(name, error)
            raise
        if name == MANIFEST:
            head = data[:MANIFEST_HEAD_BYTES]
            if self._head is not None and self._head != head:
                raise replaced(self.url, name, head)
            self._head = head
        return data

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """The last bytes of a file that should have `size` bytes."""
        try:
            return self._store.read_end(name, size, length)
        except FileNotFoundError as error:
            self._look(name, error)
            raise

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Exactly these bytes of a file."""
        try:
            return self._store.read(name, offset, length)
        except (GoneError, FileNotFoundError) as error:
            self._look(name, error)
            raise

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """Fill the buffers, end to end, from `offset` on."""
        try:
            self._store.read_into(name, offset, *targets)
        except (GoneError, FileNotFoundError) as error:
            self._look(name, error)
            raise

    def _look(self, name: str, error: Exception) -> None:
        """Raise ReplacedError where a file is missing because the checkpoint is another now."""
        if self._head is not None:
            now = head_now(self._where, self._store)
            if now != self._head:
                raise replaced(self.url, name, now) from error
