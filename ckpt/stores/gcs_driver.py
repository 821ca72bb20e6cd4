"""Google's storage: gcsfs' requests, with conditions where its interface has them.

A file is streamed by gcsfs, one block after another, as Google takes it: parts cannot be sent out
of order, so a rewritable file is collected on a local disk first.
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
"""What is sent at once, in memory until then."""


class GcsDriver(FsspecDriver):
    """The requests, through one gcsfs file system."""

    capabilities = StoreCapabilities(
        put_if_absent=None, atomic_replace=True, hides_unfinished=True, durable=True
    )

    def server(self) -> str:
        """The address that requests go to."""
        return str(getattr(self._fs, "base", ""))

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        """What is directly below a prefix; the list of buckets is no folder of checkpoints."""
        return super().list_folder(folder) if folder.strip("/") else []

    def put(self, path: str, data: memoryview) -> None:
        """An object in one request."""
        self._fs.pipe_file(path, bytes(data), mode="overwrite")

    def put_if_absent(self, path: str, data: memoryview) -> None:
        """An object in one request, with ifGenerationMatch=0."""
        self._fs.pipe_file(path, bytes(data), mode="create")

    @contextmanager
    def stream(self, path: str) -> Iterator[FileWriter]:
        """An object, streamed; nothing of it is left when the block raises."""
        remote = self._fs.open(path, "wb", block_size=BLOCK_BYTES)
        try:
            yield Stream(remote)
        except BaseException:
            remote.discard()
            remote.closed = True  # or its finaliser would publish what there is
            raise
        remote.close()

    def error_class(self, error: BaseException) -> ErrorClass:
        """What gcsfs' errors mean; it has tried some of them several times itself."""
        code: Any = getattr(error, "code", None)
        code = int(code) if str(code).isdecimal() else None
        if code in (401, 403):
            return ErrorClass.DENIED
        if code == 412:
            return ErrorClass.EXISTS
        if code == 404:
            return ErrorClass.MISSING
        if code is not None:
            return ErrorClass.PASSING if code in (408, 429) or code >= 500 else ErrorClass.LASTING
        return super().error_class(error)
