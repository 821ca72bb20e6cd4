"""The driver of Google's storage: requests of gcsfs, with conditions where gcsfs has them.

gcsfs streams a file block by block. Google takes parts only in order, so a rewritable file is first
written to a local disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt.stores.capabilities import StoreCapabilities
from ckpt.stores.driver import ObjectInfo
from ckpt.stores.fsspec_driver import FsspecDriver, Stream
from ckpt.stores.retries import ErrorClass
from formats.storage import FileWriter

BLOCK_BYTES = 16 << 20
"""Bytes of one request, which are in memory until it is sent."""


class GcsDriver(FsspecDriver):
    """Sends requests through one gcsfs file system."""

    capabilities = StoreCapabilities(
        put_if_absent=None, atomic_replace=True, hides_unfinished=True, durable=True
    )

    def server(self) -> str:
        """Returns the address of the server."""
        return str(getattr(self._fs, "base", ""))

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        """Lists objects and prefixes directly below a prefix, but not the buckets themselves."""
        return super().list_folder(folder) if folder.strip("/") else []

    def put(self, path: str, data: memoryview, tag: str = "") -> str:
        """Writes an object in one request. There are no tags: gcsfs has no condition for them."""
        self._fs.pipe_file(path, bytes(data), mode="overwrite")
        return ""

    def put_if_absent(self, path: str, data: memoryview) -> str:
        """Writes an object in one request, with ifGenerationMatch=0."""
        self._fs.pipe_file(path, bytes(data), mode="create")
        return ""

    @contextmanager
    def stream(self, path: str) -> Iterator[FileWriter]:
        """Returns a writer that streams an object. An exception in the block discards it."""
        remote = self._fs.open(path, "wb", block_size=BLOCK_BYTES)
        try:
            yield Stream(remote)
        except BaseException:
            remote.discard()
            remote.closed = True  # otherwise the finaliser would publish the truncated object
            raise
        remote.close()

    def error_class(self, error: BaseException) -> ErrorClass:
        """Returns the class of an error of gcsfs, which has made retries of its own."""
        code: Any = getattr(error, "code", None)
        code = int(code) if str(code).isdecimal() else None
        if code == 401:
            return ErrorClass.STALE
        if code == 403:
            return ErrorClass.DENIED
        if code == 412:
            return ErrorClass.EXISTS
        if code == 404:
            return ErrorClass.MISSING
        if code is not None:
            return ErrorClass.PASSING if code in (408, 429) or code >= 500 else ErrorClass.LASTING
        return super().error_class(error)
