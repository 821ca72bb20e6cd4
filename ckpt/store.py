"""Where checkpoints live: the one file that knows fsspec.

`open_store(url)` gives a folder to read ranges from and stream files into. A path, or a `file://`
URL, is a local folder and goes through the operating system (`ckpt.local_store`); any other URL
goes through the fsspec driver of its protocol.

What the commit protocol needs of a store is `commit`: a small file written atomically, and without
`replace` only when it is absent. Local disks promise it by `link`; drivers that offer no exclusive
create get a check before the write, which two jobs saving to one path at the same instant could
slip through.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from ckpt.errors import ExistsError, NotACheckpointError
from ckpt.local_store import LocalStore
from ckpt.promises import Promises, Unfinished
from formats.errors import CorruptError
from formats.storage import BESIDE, REMOTE_READ_BYTES, Buffer, FileWriter, Reader, check_limit

Options = Mapping[str, Any] | None
"""What a driver is told beside the URL: addresses, credentials. Never to be shown or logged."""


class Store(Reader, Protocol):
    """A folder on a disk or in a bucket. Close it, or use it in a `with`."""

    options: Mapping[str, Any]
    """What it was opened with, for stores beside it. Never to be shown: it may hold secrets."""
    promises: Promises
    """What may be relied on here."""

    def sizes(self) -> dict[str, int]:
        """The bytes of the files directly in the folder, by name, in one listing."""
        ...

    def folders(self) -> list[str]:
        """The folders directly in the folder, sorted."""
        ...

    def exists(self, name: str) -> bool:
        """True when the folder has this file."""
        ...

    def create(self, name: str, rewritable: bool = False) -> AbstractContextManager[FileWriter]:
        """A new file: complete and durable when the block ends well, absent otherwise.

        `rewrite_start` works only with `rewritable`.
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

    `options` are the fsspec driver's; a local folder has none.
    """
    text = os.fspath(url)
    if "://" not in text and "::" not in text:
        return LocalStore(text)
    if text.startswith("file://"):
        return LocalStore(text.removeprefix("file://"))
    return FsspecStore(text, options)


def absolute(url: str | os.PathLike[str]) -> str:
    """The same place, by a path or URL that holds whatever folder the process is in later."""
    text = os.fspath(url)
    if text.startswith("file://"):
        return "file://" + os.path.abspath(text.removeprefix("file://"))
    return text if "://" in text or "::" in text else os.path.abspath(text)


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


def is_file(url: str | os.PathLike[str], options: Options = None) -> bool:
    """True when the path or URL is one file, not a folder."""
    text = os.fspath(url)
    if "://" not in text or text.startswith("file://"):
        return Path(text.removeprefix("file://")).is_file()
    folder, name = split_url(text)
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
    if text.startswith("file://") or ("://" not in text and "::" not in text):
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


class FsspecStore:
    """A folder in anything fsspec has a driver for."""

    def __init__(self, url: str, options: Options = None) -> None:
        import fsspec

        self.url = url if url.endswith("://") else url.rstrip("/")
        self.read_bytes = REMOTE_READ_BYTES
        self.options: Mapping[str, Any] = dict(options or {})
        self.promises = Promises(
            put_if_absent=False, atomic_replace=False, hides_unfinished=False, durable=False
        )
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **self.options)
        except ImportError as error:
            protocol = self.url.partition("://")[0]
            raise NotACheckpointError(
                f"{url}: {error}; install the fsspec driver for {protocol}://"
            ) from error

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        """The files directly in the folder, sorted; none when there is no such folder."""
        return list(self.sizes())

    def sizes(self) -> dict[str, int]:
        """The bytes of the files directly in the folder, by name, in one listing."""
        return {name: int(entry["size"] or 0) for name, entry in self._listing("file").items()}

    def folders(self) -> list[str]:
        """The folders directly in the folder, sorted."""
        return list(self._listing("directory"))

    def exists(self, name: str) -> bool:
        """True when the folder has this file."""
        return bool(self._fs.isfile(self._path(name)))

    def size(self, name: str) -> int:
        """Bytes in a file."""
        return int(self._fs.size(self._path(name)))

    def modified(self, name: str) -> float:
        """When a file was last written; now, where the driver does not say: it is never old."""
        try:
            return float(self._fs.modified(self._path(name)).timestamp())
        except NotImplementedError:
            return time.time()

    def unfinished(self) -> list[Unfinished]:
        """None: fsspec has no word for them."""
        return []

    def abort(self, unfinished: Unfinished) -> None:
        """Nothing to do: `unfinished` lists none."""

    def read_whole(self, name: str, limit: int) -> bytes:
        """All bytes of a file."""
        check_limit(f"{self.url}/{name}", self.size(name), limit)
        return bytes(self._fs.cat_file(self._path(name)))

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Exactly these bytes of a file."""
        if length == 0:
            return b""
        data = bytes(self._fs.cat_file(self._path(name), start=offset, end=offset + length))
        if len(data) != length:
            raise CorruptError(
                f"{self.url}/{name}: bytes {offset}:{offset + length} are wanted, "
                f"the file ends at {self.size(name)}: it was truncated"
            )
        return data

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """Fill the buffers, end to end, from `offset` on, in one request."""
        data = memoryview(self.read(name, offset, sum(target.nbytes for target in targets)))
        for target in targets:
            if target.nbytes:
                target.cast("B")[:] = data[: target.nbytes]
                data = data[target.nbytes :]

    @contextmanager
    def create(self, name: str, rewritable: bool = False) -> Iterator[FileWriter]:
        """A new file. A rewritable one is first written to a temporary local file."""
        if rewritable:
            with tempfile.TemporaryFile() as local:
                yield RewritableUpload(local)
                local.seek(0)
                with self._uploading(name) as remote:
                    shutil.copyfileobj(local, remote, 8 << 20)
        else:
            with self._uploading(name) as remote:
                yield Upload(remote)

    def commit(self, name: str, data: bytes, replace: bool) -> None:
        """Write a small file in one request, on condition of its absence unless `replace`."""
        path = self._path(name)
        self._fs.makedirs(self._root, exist_ok=True)
        if replace:
            self._fs.pipe_file(path, data)
            return
        if self._fs.isfile(path):
            raise ExistsError(f"{self.url}/{name} exists already")
        try:
            self._fs.pipe_file(path, data, mode="create")
        except FileExistsError as error:
            raise ExistsError(f"{self.url}/{name} exists already") from error

    def delete(self, name: str) -> None:
        """Remove a file; no error when it is gone already."""
        if self.exists(name):
            self._fs.rm_file(self._path(name))

    def remove_if_empty(self) -> None:
        """Remove the folder where there are such things; to object stores it is only a prefix."""
        with suppress(OSError, NotImplementedError):
            if not self._fs.ls(self._root, detail=False, refresh=True):
                self._fs.rmdir(self._root)

    def flush(self) -> None:
        """Nothing to do: a driver's file is stored when it is closed."""

    def close(self) -> None:
        """Nothing is kept open: drivers pool their own connections."""

    def __enter__(self) -> FsspecStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _uploading(self, name: str) -> Iterator[IO[bytes]]:
        self._fs.makedirs(self._root, exist_ok=True)
        remote = self._fs.open(self._path(name), "wb")
        try:
            yield remote
        except BaseException:
            # Closing would publish the truncated file; drivers that can, forget it instead.
            discard = getattr(remote, "discard", None)
            if discard is not None:
                discard()
                with suppress(AttributeError):  # or its finaliser would close it after all
                    setattr(remote, "closed", True)  # noqa: B010
            raise
        remote.close()

    def _listing(self, kind: str) -> dict[str, dict[str, Any]]:
        self._fs.invalidate_cache(self._root)  # other processes write here too
        try:
            entries: list[dict[str, Any]] = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {
            entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry
            for entry in entries
            if entry["type"] == kind and entry["name"].rstrip("/") != self._root.rstrip("/")
        }
        return dict(sorted(found.items()))

    def _path(self, name: str) -> str:
        root = self._root.rstrip("/")
        while name.startswith(BESIDE):  # to an object store dots are letters
            root, name = root.rpartition("/")[0], name.removeprefix(BESIDE)
        return f"{root}/{name}"


class Upload:
    """Streams to an fsspec file."""

    def __init__(self, remote: IO[bytes]) -> None:
        self._remote = remote

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Append the buffers; the driver copies what it does not send at once."""
        for buffer in buffers:
            self._remote.write(buffer)

    def rewrite_start(self, data: Buffer) -> None:
        """Refused: what was sent is sent. Create the file with `rewritable=True`."""
        raise OSError("a streamed upload cannot change its first bytes; create it rewritable")


class RewritableUpload(Upload):
    """Collects a file locally before it is uploaded."""

    def rewrite_start(self, data: Buffer) -> None:
        """Replace the first bytes of the file."""
        end = self._remote.tell()
        self._remote.seek(0)
        self._remote.write(data)
        self._remote.seek(end)
