"""Any file system that fsspec has: what its interface promises, and no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from errno import EROFS
from typing import IO, Any

from ckpt.stores.capabilities import StoreCapabilities, Unfinished
from ckpt.stores.driver import ObjectInfo, PastEndError, ShortAnswerError
from ckpt.stores.retries import ErrorClass
from formats.storage import Buffer, FileWriter
from sharding.url_secrets import without_secrets

READ_ONLY = {"http", "https"}
"""Protocols whose drivers would post files somewhere, or say that they lack a method."""
_TIMES = ("mtime", "last_modified", "LastModified", "updated", "created")
"""What drivers call the time of a file."""


class FsspecDriver:
    """The requests, as calls of the file system."""

    capabilities = StoreCapabilities(
        put_if_absent=False, atomic_replace=False, hides_unfinished=False, durable=False
    )
    holds_answers = True

    def __init__(self, file_system: Any) -> None:
        self._fs = file_system

    def server(self) -> str:
        """Not asked for: nothing of its promises is to be found out."""
        return ""

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        """What is directly in a folder."""
        self._fs.invalidate_cache(folder)  # other processes write here too
        own = folder.rstrip("/")
        return [
            _found(entry)
            for entry in self._fs.ls(folder, detail=True)
            if entry["name"].rstrip("/") != own
        ]

    def head(self, path: str) -> ObjectInfo:
        """One file."""
        self._fs.invalidate_cache(path.rpartition("/")[0])
        entry = self._fs.info(path)
        if entry["type"] != "file":
            raise FileNotFoundError(path)
        return _found(entry)

    def get_range(self, path: str, offset: int, targets: Sequence[memoryview]) -> int | None:
        """A range in one request."""
        length = sum(target.nbytes for target in targets)
        data = memoryview(self._fs.cat_file(path, start=offset, end=offset + length))
        if len(data) > length:
            raise OSError(
                f"the server answered a request for bytes {offset}:{offset + length} with "
                f"{len(data)}: it knows no ranges, and cannot be read from"
            )
        if len(data) < length:
            size = self._size(path)
            raise (
                PastEndError(size)
                if size < offset + length
                else ShortAnswerError(f"the answer ended after {len(data)} of {length} bytes")
            )
        for target in targets:
            target[:] = data[: len(target)]
            data = data[len(target) :]
        return None

    def get(self, path: str, limit: int) -> bytes | int:
        """All bytes of a file, if they are few."""
        size = self._size(path)
        return size if size > limit else bytes(self._fs.cat_file(path))

    def put(self, path: str, data: memoryview) -> None:
        """A file in one call."""
        self._check_can_write(path)
        self._make_folder(path)
        self._fs.pipe_file(path, bytes(data))

    def put_if_absent(self, path: str, data: memoryview) -> None:
        """A file in one call, on condition of its absence where the file system knows that."""
        self._check_can_write(path)
        self._make_folder(path)
        # fsspec's own way of saying that a file system knows no such condition; others do not know
        # the argument. `capabilities` does not claim it: a commit looks for the file before.
        with suppress(NotImplementedError, TypeError):
            self._fs.pipe_file(path, bytes(data), mode="create")
            return
        self._fs.pipe_file(path, bytes(data))

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """Nothing to do: `list_multipart` lists none."""

    def list_multipart(self, folder: str) -> list[Unfinished]:
        """None: fsspec has no word for them."""
        return []

    @contextmanager
    def stream(self, path: str) -> Iterator[FileWriter]:
        """A file, streamed."""
        self._check_can_write(path)
        self._make_folder(path)
        remote = self._fs.open(path, "wb")
        try:
            yield Stream(remote)
        except BaseException:
            # Closing would publish the truncated file; drivers that can, forget it instead.
            discard = getattr(remote, "discard", None)
            if discard is not None:
                with suppress(Exception):  # the error on its way says more
                    discard()
                with suppress(AttributeError):  # or its finaliser would close it after all
                    setattr(remote, "closed", True)  # noqa: B010
            raise
        remote.close()

    def delete(self, path: str) -> None:
        """The file is gone."""
        self._check_can_write(path)
        self._fs.rm_file(path)

    def delete_folder(self, folder: str) -> None:
        """The folder is gone where there are such things and it is empty."""
        # fsspec's way of saying that a file system has no folders; OSError is a folder that is not
        # there or has been filled meanwhile. An empty folder that stays does no harm.
        with suppress(OSError, NotImplementedError):
            if not self._fs.ls(folder, detail=False, refresh=True):
                self._fs.rmdir(folder)

    def error_class(self, error: BaseException) -> ErrorClass:
        """What an error means, as far as its class says it."""
        if isinstance(error, PastEndError):
            return ErrorClass.PAST_END
        if isinstance(error, FileExistsError):
            return ErrorClass.EXISTS
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return ErrorClass.MISSING
        if isinstance(error, PermissionError):
            return ErrorClass.DENIED
        status = getattr(error, "status", getattr(error, "status_code", None))  # aiohttp's, Azure's
        if status in (401, 403):
            return ErrorClass.DENIED
        if status == 416:
            return ErrorClass.PAST_END
        if isinstance(status, int):
            is_passing = status in (408, 429) or status >= 500
            return ErrorClass.PASSING if is_passing else ErrorClass.LASTING
        if isinstance(
            error, ConnectionError | TimeoutError | asyncio.TimeoutError | ShortAnswerError
        ):
            return ErrorClass.PASSING
        is_broken = type(error).__module__.partition(".")[0] == "aiohttp"
        return ErrorClass.PASSING if is_broken else ErrorClass.LASTING

    def _size(self, path: str) -> int:
        """Bytes in a file; none where the server does not say."""
        return self.head(path).nbytes or 0

    def _check_can_write(self, path: str) -> None:
        if READ_ONLY & {self._fs.protocol, *self._fs.protocol}:
            raise OSError(EROFS, "what is reached by HTTP can only be read", without_secrets(path))

    def _make_folder(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)


class Stream:
    """Streams to an fsspec file."""

    def __init__(self, remote: IO[bytes]) -> None:
        self._remote = remote

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Append the buffers; the driver copies what it does not send at once."""
        for buffer in buffers:
            self._remote.write(buffer)

    def rewrite_start(self, data: Buffer) -> None:
        """Refused: what was sent is sent."""
        raise OSError("a streamed upload cannot change its first bytes; create it rewritable")


def _found(entry: dict[str, Any]) -> ObjectInfo:
    name = entry["name"].rstrip("/").rpartition("/")[2]
    size = entry.get("size")
    return ObjectInfo(
        name, entry["type"] == "file", None if size is None else int(size), _time_of(entry)
    )


def _time_of(entry: dict[str, Any]) -> float:
    """When a file was last written; now where the driver does not say: it is never old."""
    for key in _TIMES:
        found = entry.get(key)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
        if isinstance(found, str):
            with suppress(ValueError):
                return datetime.fromisoformat(found.replace("Z", "+00:00")).timestamp()
    return time.time()
