"""Opens stores by path or URL. The only file that imports fsspec.

`open_store(url)` returns a folder from which ranges are read and into which files are streamed. A
path or a `file://` URL is a `ckpt.stores.local_store`, `live://` a `ckpt.live.store`, and
`http://` of `ckpt serve` a `ckpt.stores.served_store`. Any other URL is a
`ckpt.stores.object_store` on the fsspec file system of its protocol.

The commit protocol needs `commit`: an atomic write of a small file, without `replace` only if the
file does not exist. Local disks guarantee this by `link`, object stores by a conditional request.
`Store.capabilities` has the guarantees of a store (docs/stores.md).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote
from weakref import WeakValueDictionary

from ckpt.errors import StoreError
from ckpt.stores.addresses import SCHEME, TOKEN, parse
from ckpt.stores.driver import Start, StoreCapabilities, Unfinished
from ckpt.stores.local_files import explained_on_disk
from ckpt.stores.local_store import LocalStore
from formats.storage import FileWriter, Reader
from sharding.errors import ArgumentError, cause_without_secrets, without_secrets

if TYPE_CHECKING:
    from ckpt.stores.driver import ObjectInfo

Options = Mapping[str, Any] | None
"""Options of a driver: addresses, credentials. Never show or log them."""
WEB = ("http://", "https://")
LIVE_STORE = "ckpt.live.store:LiveStore"
"""The store of `live://` URLs: servers lie above the stores, so only their name is here."""
LIVE_VERSION = "live-version.json"
"""The file of a folder that is one version of a live state, most of it as a delta."""
STORED_VERSION = "ckpt.live.stored_version:StoredVersion"
"""The store of such a folder."""
ROOTED = ("http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
"""The protocols of URLs that begin with a host or a bucket, which is never a file."""
_LOST_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
"""The start of a URL that went through `pathlib.Path`."""


class Store(Reader, Protocol):
    """A folder on a disk or in a bucket. Close it, or use it in a `with` statement."""

    options: Mapping[str, Any]
    """The driver's options, for stores beside this one. Never show them: they may hold secrets."""
    refusal: str
    """The reason why nothing is written here, for errors; empty where files are written."""

    @property
    def capabilities(self) -> StoreCapabilities:
        """The guarantees of this store."""

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the files directly in the folder, by name, in one listing."""

    def folders(self) -> list[str]:
        """Returns the folders directly in the folder, sorted."""

    def below(self) -> dict[str, ObjectInfo] | None:
        """Returns all files in the folder and below it, by their paths, in one listing.

        Returns None if that takes as long as a listing of each folder: on disks, on servers without
        such a listing, and above folders with very many files.
        """

    def exists(self, name: str) -> bool:
        """Whether the folder has this file."""

    def create(
        self, name: str, rewritable: bool = False, replace: bool = True
    ) -> AbstractContextManager[FileWriter]:
        """Returns a writer of a new file: complete and durable if the block succeeds, else absent.

        `rewrite_start` needs `rewritable`, and replaces bytes of the first written buffer. Raises
        ExistsError at the end of the block if the file exists then, unless `replace`.
        """

    def commit(
        self, name: str, data: bytes, replace: bool, check: Callable[[], object] | None = None
    ) -> None:
        """Writes a small file atomically. Raises ExistsError if it exists, unless `replace`.

        `check` is called directly before the file gets its name, and again before each further
        try; its error leaves things as they are.
        """

    def read_start(self, name: str, length: int) -> Start:
        """Reads the first bytes of a file; fewer if it is shorter. Raises FileNotFoundError."""

    def tag(self, name: str) -> str:
        """Returns the mark of a file's content as this store has last read or written it.

        Other bytes of one name have another tag. Empty if it is unknown, and on disks.
        """

    def modified(self, name: str) -> float:
        """Returns the time of a file's last write: seconds since 1970, by the store's clock.

        Raises FileNotFoundError with the file's name.
        """

    def arrivals(self) -> dict[str, float]:
        """Returns when the files directly in the folder last changed or arrived, by name.

        One listing, with times as of `modified`. A copy may keep the time of the last write, but it
        has just arrived. "" is the folder itself, in stores with folders.
        """

    def list_unfinished(self) -> list[Unfinished]:
        """Returns the files whose write has begun and not finished. A process may still write."""

    def unfinished_bytes(self, unfinished: Unfinished) -> int:
        """Returns the bytes that an unfinished file takes; 0 if the store does not tell."""

    def abort(self, unfinished: Unfinished) -> None:
        """Removes an unfinished file, if it exists. A process that still writes to it fails."""

    def delete(self, name: str) -> bool:
        """Removes a file, if it exists. Returns False if the store tells that it did not.

        Raises ReplacedError if another program has replaced it since this store has read it, as far
        as the store has conditions for that.
        """

    def delete_all(self, names: Sequence[str], tags: Mapping[str, str] | None = None) -> None:
        """Removes files, if they exist, in as few requests as the store can.

        `tags`, by name, are those of `below`: such a file is removed in this state alone, as far as
        the store has conditions for that. Raises the error of the first file that stays.
        """

    def remove_if_empty(self) -> None:
        """Removes the folder if it is empty, in stores with folders."""

    def flush(self) -> None:
        """Makes the names of created files durable."""

    def close(self) -> None:
        """Closes open files."""

    def __enter__(self) -> Store: ...

    def __exit__(self, *exc: object) -> None: ...


def check_writable(store: Store) -> None:
    """Raises StoreError if a store is only read."""
    if store.refusal:
        raise StoreError(f"{store.url}: {store.refusal}")


def open_store(url: str | os.PathLike[str], options: Options = None) -> Store:
    """Opens the folder at a path or URL. It need not exist: the first file creates it.

    `options` are those of the fsspec driver; a local folder has none.

    Raises:
        ArgumentError: as for `local_path`; or an option that S3, Azure, Google or a server of ckpt
            does not take.
        StoreError: the driver of the URL is not installed, or refuses the URL or the options.
    """
    text, path = os.fspath(url), local_path(url)
    if path is not None:
        return LocalStore(path)
    ours = _server(text, options or {})
    if ours is not None:
        return ours
    try:
        return _bucket(text, dict(options or {}))
    except ImportError as error:
        protocol = text.partition("://")[0]
        raise StoreError(f"{url}: {error}; install the fsspec driver for {protocol}://") from error
    except ArgumentError as error:
        raise ArgumentError(f"{url}: {error}") from None
    except Exception as error:
        raise StoreError(
            f"{url}: cannot be opened: {type(error).__name__}: {error}; check the URL, and "
            "storage_options= or the driver's environment variables"
        ) from cause_without_secrets(error)


def stored_version(store: Store) -> Store:
    """Returns the version of a live state in a folder with a `LIVE_VERSION`, as a checkpoint."""
    module, name = STORED_VERSION.split(":")
    found: Store = getattr(import_module(module), name)(store)
    return found


def local_path(url: str | os.PathLike[str]) -> str | None:
    """Returns the path of a local folder or file; None for the URL of a driver.

    Raises ArgumentError for text that is surely a mistake: an empty path, `~`, which only a shell
    expands, a URL that has lost a slash, and a URL with a `::` that chains no drivers. A save would
    otherwise go to an unexpected place.

    >>> local_path("file:///runs/a%20b"), local_path("s3://bucket/run")
    ('/runs/a%20b', None)
    >>> local_path("runs/exp::1"), local_path("simplecache::s3://bucket/run")
    ('runs/exp::1', None)
    """
    text = os.fspath(url)
    if text.startswith("file://"):
        path = text.removeprefix("file://")
        path = path.removeprefix("localhost") if path.startswith("localhost/") else path
    elif _is_url(text):
        return None
    else:
        path = text
    if not path:
        raise ArgumentError(f"{text!r} names no folder; the working directory is '.'")
    if path.partition("/")[0] == "~":
        raise ArgumentError(
            f"{text}: only a shell expands ~, without quotes: give the whole path, in Python "
            f"os.path.expanduser({text!r}); a folder of that name is ./{path}"
        )
    lost = _LOST_SLASH.match(text)
    if lost is not None and _is_protocol(lost[1]):
        rest = text[lost.end() - (lost[1] == "file") :]
        raise ArgumentError(
            f"{text}: this URL has lost a slash, as in pathlib.Path: give it as text, "
            f"{lost[1]}://{rest}; a folder of that name is ./{text}"
        )
    return path


def _is_url(text: str) -> bool:
    """Whether text is the URL of a driver. `::` chains URLs and drivers; else it is part of a name.

    The address of a server may have `::` (IPv6), and so may a query. Raises ArgumentError for
    another URL with any other `::`, whose end a driver would ignore.
    """
    if "::" not in text or is_live(text) or text.startswith(WEB):
        return "://" in text
    other = [link for link in text.split("::") if "://" not in link and not _is_protocol(link)]
    if not other:
        return True
    if "://" in text and "/" not in text.partition("://")[0]:
        raise ArgumentError(
            without_secrets(
                f"{text}: :: stands between URLs and drivers of fsspec, and {other[0]!r} is "
                "neither: no name in a bucket can have it; a file on a disk is file://"
            )
        )
    return False


def _is_protocol(word: str) -> bool:
    import fsspec

    return word in fsspec.available_protocols()


def _server(url: str, options: Mapping[str, Any]) -> Store | None:
    """Returns the store of a URL whose server is one of ours."""
    if is_live(url):
        module, name = LIVE_STORE.split(":")
        live: Store = getattr(import_module(module), name)(url, options)
        return live
    if url.startswith(WEB):
        from ckpt.stores.served_store import ServedStore, is_served  # as below

        return ServedStore(url, options) if is_served(url, options) else None
    return None


def _token_apart(url: str, is_ours: bool) -> tuple[str, str]:
    """Returns the URL of a server of ours without its token, and the token with its `?token=`.

    >>> _token_apart("live://host:4000/policy/12?token=abc", True)
    ('live://host:4000/policy/12', '?token=abc')
    """
    place, mark, token = url.partition(TOKEN) if is_ours else (url, "", "")
    return place, mark + token


def _is_known_served(url: str) -> bool:
    module = sys.modules.get("ckpt.stores.served_store")  # it has seen the answers of servers
    return url.startswith(WEB) and module is not None and bool(module.is_known_served(url))


def _bucket(url: str, options: dict[str, Any]) -> Store:
    import fsspec  # these imports are here because a local disk needs none of them

    from ckpt.stores.fsspec_driver import driver_of, own_options, settings_of
    from ckpt.stores.object_store import ObjectStore

    place = url if url.endswith("://") else url.rstrip("/")
    protocol = url.partition("://")[0]
    own, others = own_options(options)
    settings = settings_of(protocol, others, own)
    if url.startswith(WEB):  # `url_to_fs` would divide it at a `::`
        driver = driver_of(fsspec.filesystem(protocol, **settings), own)
        return ObjectStore(place, place, driver, options)
    file_system, root = fsspec.core.url_to_fs(place, **settings)
    return ObjectStore(place, root, driver_of(file_system, own), options)


def absolute(url: str | os.PathLike[str]) -> str:
    """Returns a path or URL that a later change of the working directory does not affect."""
    text, path = os.fspath(url), local_path(url)
    if path is None:
        return text
    return f"{'file://' if text.startswith('file://') else ''}{os.path.abspath(path)}"


def one_spelling(url: str | os.PathLike[str]) -> str:
    """Returns a path without links and dots, or a URL; without slashes at the end."""
    path = local_path(url)
    if path is None:
        return os.fspath(url).rstrip("/")
    with explained_on_disk("looking for links at", path):
        return os.path.realpath(path)


def link_at(url: str | os.PathLike[str]) -> str | None:
    """Returns the path of the link that lies at a place on a disk; None if no link does.

    Links above the place do not count.
    """
    path = local_path(url) or ""
    while path.endswith(("/", "/.")):  # these endings would name the folder behind the link
        path = path[:-1]
    return path if os.path.islink(path) else None


def check_no_link(url: str | os.PathLike[str]) -> None:
    """Raises ArgumentError if a place is a link on a disk: a delete does not follow links."""
    link = link_at(url)
    if link is not None:
        raise ArgumentError(
            f"{link}: a link to {os.path.realpath(link)}, which was not deleted; to delete that "
            "folder, give its own path; to remove the link, use rm"
        )


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Returns the folder and the last part of a path or URL.

    >>> split_url("s3://bucket/run/model.safetensors")
    ('s3://bucket/run', 'model.safetensors')
    >>> split_url("model.safetensors")
    ('.', 'model.safetensors')
    >>> split_url("memory://model.safetensors")
    ('memory://', 'model.safetensors')
    >>> split_url("live://host:4000/policy/12?token=abc")
    ('live://host:4000/policy?token=abc', '12')
    """
    text = os.fspath(url)
    is_served = _is_known_served(text)
    text, token = _token_apart(text, is_live(text) or is_served)
    text = text.rstrip("/")
    folder, _, name = text.rpartition("/")
    name = unquote(name, errors="surrogateescape") if is_served else name
    if not folder:
        folder = "/" if text.startswith("/") else "."
    return (f"{folder}/" if folder.endswith(":/") and "://" in text else f"{folder}{token}"), name


def join_url(folder: str | os.PathLike[str], name: str) -> str:
    """Returns the path or URL of a name in a folder.

    >>> join_url("s3://bucket/runs/", "step-1"), join_url("memory://", "step-1")
    ('s3://bucket/runs/step-1', 'memory://step-1')
    """
    text = os.fspath(folder)
    if _is_known_served(text):
        name = re.sub(r"[%?#\t\r\n]", lambda found: f"%{ord(found[0]):02X}", name)
    text, token = _token_apart(text, is_live(text) or text.startswith(WEB))
    above = text.rstrip("/")
    return f"{text}{name}" if above.endswith(":") else f"{above}/{name}{token}"


def is_file(url: str | os.PathLike[str], options: Options = None) -> bool:
    """Whether the path or URL is one file, not a folder."""
    path = local_path(url)
    if path is not None:
        return Path(path).is_file()
    text = os.fspath(url)
    protocol, _, below = _token_apart(text, text.startswith(WEB))[0].partition("://")
    if is_live(text) or (protocol in ROOTED and "/" not in below.rstrip("/")):
        return False
    folder, name = split_url(url)
    with open_store(folder, options) as store:
        return store.exists(name)


def is_live(url: str) -> bool:
    """Whether the URL has the scheme of live states."""
    return url.startswith(f"{SCHEME}://")


def is_one_version(url: str) -> bool:
    """Whether the URL means one version of a live state, which no other can replace."""
    return is_live(url) and parse(url).version is not None


def is_newest(url: str) -> bool:
    """Whether the URL means the newest version of a live state."""
    return is_live(url) and parse(url).version is None


class Kept:
    """What loads leave for those of the next version, while a job follows their address."""

    def __init__(self) -> None:
        self.match: Any = None
        """For `ckpt.loading.agreement`; one value, as threads share it."""
        self.sums: dict[int, dict[object, bytes]] = {}
        """For `ckpt.live.stored_version`: the checksums by version and part of a file."""


_KEPT: WeakValueDictionary[str, Kept] = WeakValueDictionary()


def keep(url: str) -> Kept:
    """Returns an object that loads from this live state or folder have, as long as it lives."""
    place = parse(url).shown if is_live(url) else absolute(url)
    return _KEPT.setdefault(place.rstrip("/"), Kept())


def kept_for(version: str) -> Kept | None:
    """Returns the object of `keep` for the URL of a version; None if nobody follows its address."""
    return _KEPT.get(absolute(split_url(version)[0]).rstrip("/")) if _KEPT else None


def place_elsewhere(
    url: str | os.PathLike[str], options: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]] | None:
    """Returns the URL and options by which another process on this machine opens the same folder.

    Returns None if another process cannot: for `memory://`, for drivers that the program has
    registered, and for options that are not JSON.
    """
    text = absolute(url)
    if local_path(text) is not None:
        return text, {}
    import fsspec
    from fsspec.registry import known_implementations

    for part in text.split("::"):
        protocol = part.partition("://")[0]
        known = str(known_implementations.get(protocol, {}).get("class", ""))
        module, _, name = known.rpartition(".")
        used = fsspec.registry.get(protocol)
        if used is not None and used is not getattr(sys.modules.get(module), name, None):
            return None
        set_here = fsspec.config.conf.get(protocol)
        if protocol == "memory" or not known or (set_here and "::" in text):
            return None
        options = {**(set_here or {}), **options}  # as fsspec takes them together
    try:
        return (text, options) if json.loads(json.dumps(options)) == options else None
    except (TypeError, ValueError):
        return None


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Returns a sort key that puts step-9 before step-10.

    >>> sorted(["step-10", "step-9"], key=natural)
    ['step-9', 'step-10']
    """
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name))
