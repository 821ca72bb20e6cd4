"""Cuts the blocks of a tensor into the chunks of a file, and gathers buffers into few writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future

import xxhash

from formats.errors import FormatError
from formats.native.shard import RECORD, ShardSummary
from formats.outgoing import OutgoingTensor
from formats.storage import Buffer, FileWriter
from formats.threads import Pool

WRITE_BYTES = 8 << 20
"""Bytes of one write."""
WRITE_BUFFERS = 512


def chunks_of(
    tensor: OutgoingTensor, nbytes: int, chunk_bytes: int, run_bytes: int = 0
) -> Iterator[tuple[memoryview, bool]]:
    """Yields the chunks of a stream, each with whether its block ends with it.

    A chunk inside one block is a view of it; a chunk across blocks is a copy. With `run_bytes`, as
    many whole chunks of a block as it holds come in one piece. Raises FormatError if the length of
    the stream differs from the tensor.
    """
    step = run_bytes or chunk_bytes
    total, held = 0, bytearray()
    for block in tensor.blocks():
        total += len(block)
        start = 0
        if held:
            start = min(len(block), chunk_bytes - len(held))
            held += block[:start]
            if len(held) < chunk_bytes:
                continue
            yield memoryview(held), start == len(block)
            held = bytearray()
        whole = start + (len(block) - start) // chunk_bytes * chunk_bytes
        is_last = total == nbytes
        stop = len(block) if is_last else whole
        for at in range(start, stop, step):
            end = min(at + step, stop)
            yield block[at:end], end == stop
        if not is_last:
            held += block[whole:]
    if total != nbytes:
        raise FormatError(
            f"{tensor.name}: its stream has {total} bytes, its shape and dtype {nbytes}"
        )
    if held:
        yield memoryview(held), True


class Gather:
    """Collects buffers and writes many of them in one call.

    With `overlap`, another thread writes a full batch while the caller prepares the next one:
    hashing and writing both release the GIL. A file of one batch needs no thread.
    """

    def __init__(self, file: FileWriter, overlap: bool = True) -> None:
        self._file = file
        self._overlap = overlap
        self._waiting: list[Buffer] = []
        self._waiting_bytes = 0
        self._thread: Pool | None = None
        self._writing: Future[None] | None = None
        self.total = 0

    def __enter__(self) -> Gather:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def add(self, buffer: Buffer) -> None:
        """Appends a buffer, which must not change until the next `flush` returns."""
        self._waiting.append(buffer)
        self._waiting_bytes += len(buffer)
        if self._waiting_bytes >= WRITE_BYTES or len(self._waiting) >= WRITE_BUFFERS:
            if not self._overlap:
                self._file.write(self._take_batch())
                return
            self._finish_write()
            if self._thread is None:
                self._thread = Pool(1, "ckpt-write")
            self._writing = self._thread.submit(self._file.write, self._take_batch())
            # Hashing of small chunks never releases the GIL: without a pause the other thread would
            # begin to write only when this one waits for it.
            time.sleep(0)

    def flush(self) -> None:
        """Writes all added buffers."""
        self._finish_write()
        if self._waiting:
            self._file.write(self._take_batch())

    def _take_batch(self) -> list[Buffer]:
        batch, self._waiting = self._waiting, []
        self.total += self._waiting_bytes
        self._waiting_bytes = 0
        return batch

    def _finish_write(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def record_of(stored: Buffer) -> bytes:
    """Returns the chunk table's record of a chunk."""
    return RECORD.pack(xxhash.xxh3_128_digest(stored), len(stored))


def finish(out: Gather, header: bytes, runs: bytes, records: list[bytes]) -> ShardSummary:
    """Writes the tables at the end of a file, and returns its facts."""
    table = runs + b"".join(records)
    out.add(table)
    out.flush()
    hasher = xxhash.xxh3_128(header)
    hasher.update(table)
    return ShardSummary(out.total, len(header), len(table), hasher.hexdigest())
