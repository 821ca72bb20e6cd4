"""Where checkpoints live: the one file that imports fsspec.

`open_store(url)` gives a folder to read ranges from and stream files into. A path, or a `file://`
URL, is a local folder and goes through the operating system (`ckpt.stores.local_store`); any other
URL is a `ckpt.stores.object_store`, on the fsspec file system of its protocol.

What the commit protocol needs of a store is `commit`: a small file written atomically, and without
`replace` only when it is absent. Local disks promise it by `link`, object stores by a conditional
request. `Store.capabilities` says what holds here (docs/stores.md).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from ckpt.errors import NotACheckpointError, StoreError
from ckpt.stores.capabilities import StoreCapabilities, Unfinished
from ckpt.stores.local_store import LocalStore
from formats.storage import FileWriter, Reader
from sharding.errors import ArgumentError
from sharding.url_secrets import cause_without_secrets, without_secrets

Options = Mapping[str, Any] | None
"""What a driver is told beside the URL: addresses, credentials. Never to be shown or logged."""
_LOST_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
"""How a URL begins that went through `pathlib.Path`."""


class Store(Reader, Protocol):
    """A folder on a disk or in a bucket. Close it, or use it in a `with`."""

    options: Mapping[str, Any]
    """What it was opened with, for stores beside it. Never to be shown: it may hold secrets."""

    @property
    def capabilities(self) -> StoreCapabilities:
        """What may be relied on here."""
        ...

    def sizes(self) -> dict[str, int]:
        """The bytes of the files directly in the folder, by name, in one listing."""
        ...

    def folders(self) -> list[str]:
        """The folders directly in the folder, sorted."""
        ...

    def exists(self, name: str) -> bool:
        """True when the folder has this file."""
        ...

    def create(
        self, name: str, rewritable: bool = False, replace: bool = True
    ) -> AbstractContextManager[FileWriter]:
        """A new file: complete and durable when the block ends well, absent otherwise.

        `rewrite_start` works only with `rewritable`, and on what the first buffer that is written
        has. Without `replace` raises ExistsError at the end when something has the name by then.
        """
        ...

    def commit(self, name: str, data: bytes, replace: bool) -> None:
        """Write a small file atomically; raises ExistsError when it exists, unless `replace`."""
        ...

    def modified(self, name: str) -> float:
        """When a file was last written: seconds since 1970, by the store's clock.

        Raises FileNotFoundError naming it.
        """
        ...

    def arrivals(self) -> dict[str, float]:
        """When the files directly in the folder last changed or were put here, in one listing.

        By name, otherwise as `modified`. A copy may have been modified as long ago as what it was
        made of; it arrived just now. "" is the folder itself, where there is such a thing.
        """
        ...

    def unfinished(self) -> list[Unfinished]:
        """Files whose writing has begun here, and not ended; some may be being written now."""
        ...

    def abort(self, unfinished: Unfinished) -> None:
        """Let go of one; whoever still writes it fails. No error when it is gone already."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file; no error when it is gone already."""
        ...

    def remove_if_empty(self) -> None:
        """Remove the folder itself, if it is one and nothing is in it."""
        ...

    def flush(self) -> None:
        """Files that were created are durable under their names."""
        ...

    def close(self) -> None:
        """Let go of what is open."""
        ...

    def __enter__(self) -> Store: ...

    def __exit__(self, *exc: object) -> None: ...


def open_store(url: str | os.PathLike[str], options: Options = None) -> Store:
    """The folder at a path or URL. It need not exist; nothing is created until a file is.

    `options` are the fsspec driver's; a local folder has none. Raises ArgumentError as `local_path`
    does, and StoreError where there is no driver or it refuses URL or options.
    """
    text, path = os.fspath(url), local_path(url)
    if path is not None:
        return LocalStore(path)
    try:
        return _bucket(text, dict(options or {}))
    except ImportError as error:
        protocol = text.partition("://")[0]
        raise NotACheckpointError(
            f"{url}: {error}; install the fsspec driver for {protocol}:// (docs/stores.md)"
        ) from error
    except Exception as error:
        raise StoreError(
            f"{url}: cannot be opened: {type(error).__name__}: {error}; check the URL, and what "
            "storage_options= or the driver's environment variables say (docs/stores.md)"
        ) from cause_without_secrets(error)


def local_path(url: str | os.PathLike[str]) -> str | None:
    """The path of a local folder or file; None for a URL that is a driver's.

    Raises ArgumentError for what can only be meant otherwise: no path at all, `~`, which is the
    shell's, a URL that lost a slash, and one with a `::` that chains nothing. Saved there, a
    checkpoint would be somewhere else than where it is looked for.

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
        raise ArgumentError(f"{text!r} names no folder; the one you are in is '.'")
    if path.partition("/")[0] == "~":
        raise ArgumentError(
            f"{text}: ~ is your home to a shell only: give os.path.expanduser({text!r}); "
            f"a folder of that name is ./{path}"
        )
    lost = _LOST_SLASH.match(text)
    if lost is not None and _is_protocol(lost[1]):
        rest = text[lost.end() - (lost[1] == "file") :]
        raise ArgumentError(
            f"{text}: a URL that lost a slash, as pathlib.Path makes them do: give it as text, "
            f"{lost[1]}://{rest}; a folder of that name is ./{text}"
        )
    return path


def _is_url(text: str) -> bool:
    """Whether this is a driver's; `::` chains URLs and names of drivers, and is else a name's own.

    Raises ArgumentError for a URL with another `::` in it, whose end a driver would pass over.
    """
    if "::" not in text:
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


def _bucket(url: str, options: dict[str, Any]) -> Store:
    import fsspec  # here, as what follows: a disk needs none of it

    from ckpt.stores.drivers import driver_of, settings_of
    from ckpt.stores.object_store import ObjectStore

    place = url if url.endswith("://") else url.rstrip("/")
    told = settings_of(url.partition("://")[0], options)
    file_system, root = fsspec.core.url_to_fs(place, **told)
    return ObjectStore(place, root, driver_of(file_system), options)


def absolute(url: str | os.PathLike[str]) -> str:
    """The same place, by a path or URL that holds whatever folder the process is in later."""
    text, path = os.fspath(url), local_path(url)
    if path is None:
        return text
    return f"{'file://' if text.startswith('file://') else ''}{os.path.abspath(path)}"


def one_spelling(url: str | os.PathLike[str]) -> str:
    """A path without links and dots, or a URL; without slashes at the end."""
    path = local_path(url)
    return os.fspath(url).rstrip("/") if path is None else os.path.realpath(path)


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """The folder and the name of the last part of a path or URL.

    >>> split_url("s3://bucket/run/model.safetensors")
    ('s3://bucket/run', 'model.safetensors')
    >>> split_url("model.safetensors")
    ('.', 'model.safetensors')
    >>> split_url("memory://model.safetensors")
    ('memory://', 'model.safetensors')
    """
    text = os.fspath(url).rstrip("/")
    folder, _, name = text.rpartition("/")
    if not folder:
        folder = "/" if text.startswith("/") else "."
    return (f"{folder}/" if folder.endswith(":/") and "://" in text else folder), name


def join_url(folder: str | os.PathLike[str], name: str) -> str:
    """The path or URL of what has this name in a folder.

    >>> join_url("s3://bucket/runs/", "step-1"), join_url("memory://", "step-1")
    ('s3://bucket/runs/step-1', 'memory://step-1')
    """
    text = os.fspath(folder)
    above = text.rstrip("/")
    return f"{text}{name}" if above.endswith(":") else f"{above}/{name}"


def is_file(url: str | os.PathLike[str], options: Options = None) -> bool:
    """True when the path or URL is one file, not a folder."""
    path = local_path(url)
    if path is not None:
        return Path(path).is_file()
    folder, name = split_url(url)
    with open_store(folder, options) as store:
        return store.exists(name)


def place_elsewhere(
    url: str | os.PathLike[str], options: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]] | None:
    """The URL and options by which another process on this machine reaches the same folder.

    None if none does: memory is this process's own, and so are drivers that the program registered
    itself, and options that are no JSON.
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
