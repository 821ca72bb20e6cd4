"""A file on its way to a store of objects: in parts, several at once, from a few buffers.

Rules:

1. What is written is copied into a part; full parts are sent by threads, while the next is filled.
   Memory is the buffers: `part_bytes` times `buffers`.
2. Nothing is sent before a part is full. A file that is smaller than one is sent whole, in one
   request.
3. The first part of a rewritable file is kept and sent last: parts have numbers, so that their
   order is not that of their requests.
4. Any exception, of whatever kind, ends the upload: no part is sent any more, and those that were
   are taken back. A process that is killed leaves them (`Store.unfinished`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from mmap import mmap
from queue import SimpleQueue
from typing import Any

from ckpt.stores.driver import PartLimits
from formats.storage import Buffer
from formats.threads import Pool

PART_BYTES = 16 << 20
"""One part of a file, unless the memory budget is small."""
LATER_FACTOR = 8
"""The parts of the second half of all that a server allows are so much larger."""
MOST_BUFFERS = 8

Memory = mmap | bytes
"""A part in the making: mapped, so that a small file does not touch all of a large part."""


@dataclass(frozen=True, slots=True)
class UploadRequests:
    """The requests of one upload; each is tried until it goes well or is hopeless."""

    put: Callable[[memoryview], None]
    create_multipart: Callable[[], str]
    upload_part: Callable[[str, int, memoryview], Any]
    complete_multipart: Callable[[str, Sequence[Any], int], None]
    """With the bytes of the whole file."""
    abort_multipart: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PartSizes:
    """How a file is cut into parts, and how many of them are in memory."""

    part_bytes: int
    later_bytes: int
    first_later: int
    """The number of the first larger part."""
    buffers: int

    @classmethod
    def within(cls, budget: int, limits: PartLimits) -> PartSizes:
        """What a memory budget and a server allow.

        >>> PartSizes.within(64 << 20, PartLimits(5 << 20, 10_000)).buffers
        4
        """
        part = max(limits.least_bytes, min(PART_BYTES, budget // 4))
        buffers = max(2, min(MOST_BUFFERS, budget // part))
        return cls(part, part * LATER_FACTOR, limits.most // 2, buffers)

    def part(self, number: int) -> int:
        """The bytes of a part, numbered from 1."""
        return self.part_bytes if number < self.first_later else self.later_bytes


class Upload:
    """One file: written from one thread, sent by others."""

    def __init__(
        self,
        requests: UploadRequests,
        part_sizes: PartSizes,
        rewritable: bool,
        stopped: threading.Event,
    ) -> None:
        """`stopped` is set by `cancel`; requests that wait to be tried again look at it."""
        self._requests = requests
        self._part_sizes = part_sizes
        self._rewritable = rewritable
        self._stopped = stopped
        self._number = 1
        self._buffer: Memory = b""
        self._filled = 0
        self._total = 0
        self._first: memoryview | None = None
        """The first part of a rewritable file, once it is full."""
        self._upload_id: str | None = None
        self._made = 0
        self._free: SimpleQueue[Memory] = SimpleQueue()
        self._pool: Pool | None = None
        self._sent: dict[int, Future[Any]] = {}

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Append the buffers. Raises what a part failed with that was sent before."""
        for buffer in buffers:
            data = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
            if self._rewritable and not self._total:
                self._begin_part(max(len(data), self._part_sizes.part(1)))  # its start in one part
            while len(data):
                if self._filled == len(self._buffer):
                    self._end_part()
                    self._begin_part(self._part_sizes.part(self._number))
                count = min(len(data), len(self._buffer) - self._filled)
                memoryview(self._buffer)[self._filled : self._filled + count] = data[:count]
                self._filled += count
                self._total += count
                data = data[count:]

    def rewrite_start(self, data: Buffer) -> None:
        """Replace the first bytes, at most as many as the first buffer had or a part has."""
        first = self._first
        if first is None and self._number == 1:
            first = memoryview(self._buffer)[: self._filled]
        if not self._rewritable or first is None:
            raise OSError(
                "what was sent cannot be changed; to change its start, create it rewritable"
            )
        if len(data) > len(first):
            raise OSError(f"{len(data)} bytes are more than the {len(first)} that are kept")
        first[: len(data)] = data

    def finish(self) -> None:
        """The file is complete and there."""
        last = memoryview(self._buffer)[: self._filled]
        if self._upload_id is None and self._first is None:
            self._requests.put(last)
            return
        if len(last):
            self._send(self._number, last, None)
        if self._first is not None:
            self._send(1, self._first, None)
        tags = [self._sent[number].result() for number in sorted(self._sent)]
        assert self._upload_id is not None
        self._requests.complete_multipart(self._upload_id, tags, self._total)
        self._shut_down()

    def cancel(self) -> None:
        """Nothing of the file is left, as far as the server can be reached."""
        self._stopped.set()
        self._shut_down()
        if self._upload_id is not None:
            self._requests.abort_multipart(self._upload_id)

    def _begin_part(self, nbytes: int) -> None:
        if self._made < self._part_sizes.buffers:
            self._made += 1
            self._buffer = mmap(-1, nbytes)
        else:
            self._buffer = self._free.get()
            self._raise_failed()
            if len(self._buffer) != nbytes:
                self._buffer = mmap(-1, nbytes)
        self._filled = 0

    def _end_part(self) -> None:
        if not self._filled:  # there is none yet
            return
        part = memoryview(self._buffer)
        if self._rewritable and self._number == 1:
            self._first = part
        else:
            self._send(self._number, part, self._buffer)
        self._number += 1

    def _send(self, number: int, part: memoryview, buffer: Memory | None) -> None:
        if self._upload_id is None:
            self._upload_id = self._requests.create_multipart()
        if self._pool is None:
            self._pool = Pool(self._part_sizes.buffers, "ckpt-upload")
        upload_id = self._upload_id

        def send() -> Any:
            try:
                return self._requests.upload_part(upload_id, number, part)
            finally:
                if buffer is not None:
                    self._free.put(buffer)

        self._sent[number] = self._pool.submit(send)

    def _raise_failed(self) -> None:
        for future in self._sent.values():
            if future.done():
                future.result()

    def _shut_down(self) -> None:
        if self._pool is not None:
            wait([future for future in self._sent.values() if not future.cancel()])
            self._pool.shutdown()
