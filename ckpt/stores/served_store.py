"""The half of a store that writes, for stores that are only read.

The store of a folder that `ckpt serve` offers, by HTTP.

Rules:

1. A server is one of ours if its first answer says so in its header `Server`. A process asks each
   server once; URLs of all other servers belong to the fsspec driver.
2. Listings are JSON. Files are read by ranges, each range in one request.
3. URLs have names quoted, and names of files are Python's: bytes that are not UTF-8 are half
   surrogate pairs.
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from errno import ENOENT
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ckpt.errors import StoreError
from ckpt.stores.addresses import TOKEN
from ckpt.stores.driver import Start, StoreCapabilities, Unfinished
from ckpt.stores.http_client import (
    Answer,
    HttpClient,
    HttpOptions,
    Place,
    json_of,
    past_end,
    path_of,
)
from ckpt.stores.retries import OverNetwork, PastEndError
from formats.errors import SizeError, TooLargeError
from formats.storage import BESIDE, REMOTE_READ_BYTES, FileWriter
from sharding.errors import ArgumentError, without_secrets


class ReadOnlyStore(OverNetwork):
    """All calls that write raise StoreError. Subclasses read."""

    url: str
    options: Mapping[str, Any]
    refusal: str
    sizes: Callable[[], dict[str, int]]
    capabilities = StoreCapabilities(
        put_if_absent=False, atomic_replace=True, hides_unfinished=True, durable=False
    )

    def names(self) -> list[str]:
        """Returns the files directly in the folder, sorted; none if the folder does not exist."""
        return sorted(self.sizes())

    def entries(self, folder: str = "") -> list[str]:
        """Returns the files; there are no folders."""
        return [] if folder else self.names()

    def folders(self) -> list[str]:
        """Returns no folders."""
        return []

    def arrivals(self) -> dict[str, float]:
        """Returns nothing: the server tells no times of its files."""
        return {}

    def below(self) -> None:
        """Returns None: the server lists folder by folder."""

    def tag(self, name: str) -> str:
        """Returns "": the server tells no tags."""
        return ""

    def read_whole(self, name: str, limit: int) -> bytes:
        size = self.size(name)
        if size > limit:
            raise TooLargeError(f"{self.url}/{name}", size, limit)
        return self.read(name, 0, size)

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """Reads the last bytes of a file. Raises SizeError unless it has `size` bytes."""
        found = self.size(name)
        if found != size:
            raise SizeError(f"{self.url}/{name}", found, size)
        return self.read(name, size - length, length)

    def read_start(self, name: str, length: int) -> Start:
        size = self.size(name)
        return Start(self.read(name, 0, min(length, size)), size, "")

    def list_unfinished(self) -> list[Unfinished]:
        """Returns nothing: the server shows only complete files."""
        return []

    def unfinished_bytes(self, unfinished: Unfinished) -> int:
        """Returns 0: there are none."""
        return 0

    def abort(self, unfinished: Unfinished) -> None:
        self._refuse(unfinished.name)

    def create(
        self, name: str, rewritable: bool = False, replace: bool = True
    ) -> AbstractContextManager[FileWriter]:
        self._refuse(name)

    def commit(
        self, name: str, data: bytes, replace: bool, check: Callable[[], object] | None = None
    ) -> None:
        self._refuse(name)

    def delete(self, name: str) -> bool:
        self._refuse(name)

    def delete_all(self, names: Sequence[str], tags: Mapping[str, str] | None = None) -> None:
        self._refuse(names[0])

    def remove_if_empty(self) -> None:
        """Does nothing: the folder is the server's."""

    def flush(self) -> None:
        """Does nothing: nothing was written."""

    def _refuse(self, name: str) -> NoReturn:
        raise StoreError(f"{self.url}/{name}: {self.refusal}")


LOOK_SECONDS = 5.0
"""The longest wait for a server that is probably not ours."""
OUR_SERVERS = "ckpt/"
"""The start of the header `Server` of our servers."""
PORTS = {"http": 80, "https": 443}
_ours: dict[Place, bool] = {}
"""Whether a server is ours, as its first answer has told."""


class ServedStore(ReadOnlyStore):
    """A folder of a server. Safe to use from several threads."""

    read_bytes = REMOTE_READ_BYTES
    refusal = "ckpt serve offers this folder, which is only read; write where its files lie"

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        place, self._root, token = _parts(url)
        self.url, _, _ = url.partition(TOKEN)
        if any(mark in self.url for mark in "?#\t\r\n"):  # urlsplit takes the last three away
            raise ArgumentError(
                f"{without_secrets(url)!r}: a folder of ckpt serve has no tab, line break, ? and # "
                "in its URL but the token's; write %09, %0A, %3F and %23 for those in names"
            )
        http = HttpOptions.of(options, token)
        self.url = self.url.rstrip("/")
        self.options: Mapping[str, Any] = http.as_storage_options()
        self._client = HttpClient(place, http)

    def entries(self, folder: str = "") -> list[str]:
        files, folders = self._listing(folder)
        return sorted([*files, *(f"{name}/" for name in folders)])

    def sizes(self) -> dict[str, int]:
        return dict(sorted(self._listing()[0].items()))

    def folders(self) -> list[str]:
        return sorted(self._listing()[1])

    def size(self, name: str) -> int:
        length = self._head(name).headers.get("content-length", "")
        if not length.isdecimal():
            raise StoreError(f"{self.url}/{name}: the server does not tell the size of the file")
        return int(length)

    def modified(self, name: str) -> float:
        """Returns the time of a file's last write; 0 if the server does not tell it."""
        date = self._head(name).headers.get("last-modified", "")
        try:
            return parsedate_to_datetime(date).timestamp()
        except ValueError:
            return 0.0

    def read_whole(self, name: str, limit: int) -> bytes:
        data = self._client.read_whole(self._path(name), limit)
        if isinstance(data, int):
            raise TooLargeError(f"{self.url}/{name}", data, limit)
        return self._sound(name, data).body

    read_end = OverNetwork.read_end

    def close(self) -> None:
        self._client.close()

    def _fetch(self, name: str, offset: int, views: Sequence[memoryview]) -> int:
        data = self._client.read_range(self._path(name), offset, views, {})
        if isinstance(data, int):
            return data
        size = past_end(data)
        if size is None:
            self._sound(name, data)
        raise PastEndError(size)

    def _listing(self, folder: str = "") -> tuple[dict[str, int], list[str]]:
        place = f"{self.url}/{folder}"
        answer = self._client.ask("GET", self._path(folder).rstrip("/") + "/")
        if answer.status == http.client.NOT_FOUND:
            return {}, []
        found = json_of(self._sound(folder, answer), place)
        files, folders = found.get("files"), found.get("folders")
        if (
            not isinstance(files, dict)
            or not isinstance(folders, list)
            or not all(type(size) is int and size >= 0 for size in files.values())
            or not all(isinstance(name, str) for name in folders)
        ):
            raise StoreError(f"{place}: the answer is no listing of a folder")
        return files, folders

    def _head(self, name: str) -> Answer:
        return self._sound(name, self._client.ask("HEAD", self._path(name)))

    def _sound(self, name: str, answer: Answer) -> Answer:
        """Returns the answer, unless its status is an error."""
        if answer.status < http.client.MULTIPLE_CHOICES:
            return answer
        where = f"{self.url}/{name}"
        if answer.status in (http.client.NOT_FOUND, http.client.MOVED_PERMANENTLY):
            # A folder without its slash is moved.
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), without_secrets(where))
        raise StoreError(f"{where}: the server says {answer.status} {answer.text()}")

    def _path(self, name: str) -> str:
        root = self._root
        while name.startswith(BESIDE):
            root, name = root.rpartition("/")[0], name.removeprefix(BESIDE)
        return path_of(root, name)


def is_served(url: str, options: Mapping[str, Any]) -> bool:
    """Whether the server of an http URL is `ckpt serve` (rule 1).

    False if the server does not answer, or lies behind a proxy: the driver then says so. With
    `?token=` in the URL it is the caller's error.
    """
    place, path, token = _parts(url)
    if place not in _ours:
        try:
            http = HttpOptions.of(options, token)
        except ArgumentError:  # options of the driver
            return False
        if TOKEN not in url:
            http = replace(http, seconds=min(http.seconds, LOOK_SECONDS))
        parts = urlsplit(url)
        if parts.scheme in getproxies() and not proxy_bypass(parts.netloc):
            return False
        client = HttpClient(place, http)
        try:
            first = client.answer("HEAD", path_of(path))
        except StoreError:
            if TOKEN in url:
                raise
            return False
        finally:
            client.close()
        _ours[place] = first.headers.get("server", "").startswith(OUR_SERVERS)
    return _ours[place]


def is_known_served(url: str) -> bool:
    """Whether `is_served` has found that the server of a URL is ours."""
    with suppress(ArgumentError):
        return _ours.get(_parts(url)[0], False)
    return False


def _parts(url: str) -> tuple[Place, str, str | None]:
    """Returns the server of a URL, the path, and the token."""
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS[parts.scheme]
    except ValueError as error:
        raise ArgumentError(f"{url}: {error}") from None
    if not parts.hostname:
        raise ArgumentError(f"{url}: the URL has no host")
    token = unquote(parts.query.removeprefix("token=")) if TOKEN in url else None
    path = unquote(parts.path, errors="surrogateescape")
    return Place(parts.hostname, port, parts.scheme == "https"), path, token
