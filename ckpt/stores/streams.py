"""Writes a file by the stream of a driver that has no uploads in parts.

Rules:

1. No request is sent again: the bytes that a stream has sent are gone.
2. A rewritable file is first written to a temporary local file, and then sent as a whole.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

from ckpt.stores.driver import StreamDriver
from formats.storage import Buffer, FileWriter

COPY_BYTES = 8 << 20
Send = Callable[[Callable[[], Any]], Any]
"""Runs one call of a driver, and turns its errors into those of the store."""


@contextmanager
def streamed(driver: StreamDriver, path: str, rewritable: bool, send: Send) -> Iterator[FileWriter]:
    """Returns a writer of a file that is complete when the block ends without an exception."""
    if not rewritable:
        with _sent(driver, path, send) as remote:
            yield remote
        return
    with tempfile.TemporaryFile() as local:
        yield _Local(local)
        local.seek(0)
        with _sent(driver, path, send) as remote:
            while block := local.read(COPY_BYTES):
                remote.write([block])


@contextmanager
def _sent(driver: StreamDriver, path: str, send: Send) -> Iterator[FileWriter]:
    stream = driver.stream(path)
    remote = send(stream.__enter__)
    try:
        yield _Sent(remote, send)
    except BaseException:
        stream.__exit__(*sys.exc_info())
        raise
    send(lambda: stream.__exit__(None, None, None))


class _Sent:
    """Streams a file."""

    def __init__(self, stream: FileWriter, send: Send) -> None:
        self._stream = stream
        self._send = send
        self.rewrite_start = stream.rewrite_start

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Appends the buffers."""
        for buffer in buffers:
            self._send(partial(self._stream.write, [buffer]))


class _Local:
    """Writes a file to a local disk before its upload."""

    def __init__(self, local: IO[bytes]) -> None:
        self._local = local

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Appends the buffers."""
        for buffer in buffers:
            self._local.write(buffer)

    def rewrite_start(self, data: Buffer) -> None:
        """Replaces the first bytes of the file."""
        end = self._local.tell()
        self._local.seek(0)
        self._local.write(data)
        self._local.seek(end)
