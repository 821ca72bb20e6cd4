"""The half of a store that writes, for stores that are only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from ckpt.errors import StoreError
from ckpt.stores.capabilities import Start, StoreCapabilities, Unfinished
from ckpt.stores.retries import OverNetwork
from formats.storage import FileWriter
from sharding.url_secrets import without_secrets


class ReadOnlyStore(OverNetwork):
    """All calls that write raise StoreError. Subclasses read."""

    url: str
    options: Mapping[str, Any]
    refusal: str
    """The end of the message of a call that writes."""
    size: Callable[[str], int]
    read: Callable[[str, int, int], bytes]
    capabilities = StoreCapabilities(
        put_if_absent=False, atomic_replace=True, hides_unfinished=True, durable=False
    )

    def __str__(self) -> str:
        return without_secrets(self.url)

    def arrivals(self) -> dict[str, float]:
        """Returns nothing: the server tells no times of its files."""
        return {}

    def below(self) -> None:
        """Returns None: the server lists folder by folder."""

    def read_start(self, name: str, length: int) -> Start:
        """Reads the first bytes of a file; fewer if it is shorter."""
        size = self.size(name)
        return Start(self.read(name, 0, min(length, size)), size, "")

    def unfinished(self) -> list[Unfinished]:
        """Returns nothing: the server shows only complete files."""
        return []

    def unfinished_bytes(self, unfinished: Unfinished) -> int:
        """Returns 0: there are none."""
        return 0

    def abort(self, unfinished: Unfinished) -> None:
        """Raises StoreError."""
        self._refuse(unfinished.name)

    def create(
        self, name: str, rewritable: bool = False, replace: bool = True
    ) -> AbstractContextManager[FileWriter]:
        """Raises StoreError."""
        self._refuse(name)

    def commit(
        self, name: str, data: bytes, replace: bool, check: Callable[[], object] | None = None
    ) -> None:
        """Raises StoreError."""
        self._refuse(name)

    def delete(self, name: str) -> bool:
        """Raises StoreError."""
        self._refuse(name)

    def delete_all(self, names: Sequence[str], tags: Mapping[str, str] | None = None) -> None:
        """Raises StoreError."""
        self._refuse(names[0])

    def remove_if_empty(self) -> None:
        """Does nothing: the folder is the server's."""

    def flush(self) -> None:
        """Does nothing: nothing was written."""

    def _refuse(self, name: str) -> NoReturn:
        raise StoreError(f"{self.url}/{name}: {self.refusal}")


def check_writable(store: object) -> None:
    """Raises StoreError if a store is only read."""
    if isinstance(store, ReadOnlyStore):
        raise StoreError(f"{store.url}: {store.refusal}")
