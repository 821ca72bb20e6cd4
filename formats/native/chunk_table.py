"""The chunks of one tensor in one file: compares their checksums and decodes them."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from formats.catalog import Chunk
from formats.errors import CorruptError, FormatError
from formats.native.borrowed import Root
from formats.native.shard import RECORD, ShardIndex
from formats.storage import Reader


class ChunkTable:
    """The chunks of one tensor in one file, unpacked on demand."""

    __slots__ = (
        "_fetch",
        "_file",
        "_first",
        "_name",
        "_offset",
        "_raw_bytes",
        "_roots",
        "_starts",
        "_stored_bytes",
        "_table",
        "chunk_bytes",
        "compressed",
    )

    def __init__(
        self,
        index: ShardIndex,
        first: int,
        offset: int,
        stored_bytes: int,
        raw_bytes: int,
        file: str,
        name: str,
        fetch: Callable[[Root, int, memoryview], None],
    ) -> None:
        self._file = file
        self._roots = index.deltas
        self._fetch = fetch
        self._name = name
        self.chunk_bytes = index.chunk_bytes
        self.compressed = index.codec != "raw"
        self._table = index.table
        self._first = first
        self._offset = offset
        self._stored_bytes = stored_bytes
        self._raw_bytes = raw_bytes
        self._starts: list[int] | None = None

    def __len__(self) -> int:
        return -(-self._raw_bytes // self.chunk_bytes)

    def __getitem__(self, index: int) -> Chunk:
        digest, stored = RECORD.unpack_from(self._table, (self._first + index) * RECORD.size)
        at = index * self.chunk_bytes
        raw = min(self.chunk_bytes, self._raw_bytes - at)
        if self.compressed:
            at = self._stored_starts()[index]
        elif stored != raw:
            raise self._lie(index, stored, raw)
        if not 0 < stored <= raw:
            raise self._lie(index, stored, raw)
        return Chunk(self._offset + at, stored, raw, digest, stored < raw)

    def wrong(self, first: int, stored: memoryview) -> int | None:
        """Returns the first chunk with another digest, as `Chunks.wrong` does."""
        if self.compressed:
            return self._wrong_compressed(first, stored)
        table, digest, size = self._table, xxhash.xxh3_128_digest, self.chunk_bytes
        record = (self._first + first) * RECORD.size
        for at in range(0, len(stored), size):
            data = stored[at : at + size]
            if digest(data) + len(data).to_bytes(4, "little") != table[record : record + 20]:
                return first + at // size
            record += RECORD.size
        return None

    def decode(self, index: int, stored: memoryview, width: int, target: memoryview) -> None:
        """Fills `target` with the raw bytes of a chunk, as `Chunks.decode` does."""
        if len(stored) == len(target):
            target[:] = stored
            return
        from formats.native.codec import decompress, differ  # numpy

        decompress(stored, width, target, self._where)
        root = self._roots.get(self._first + index)
        if root is not None:
            before = memoryview(bytearray(len(target)))
            self._fetch(root, width, before)
            differ(target, before, target)

    def _wrong_compressed(self, first: int, stored: memoryview) -> int | None:
        at = 0
        while at < len(stored):
            chunk = self[first]
            if xxhash.xxh3_128_digest(stored[at : at + chunk.stored_bytes]) != chunk.digest:
                return first
            at, first = at + chunk.stored_bytes, first + 1
        return None

    @property
    def _where(self) -> str:
        return f"{self._file}: {self._name}"

    def _lie(self, index: int, stored: int, raw: int) -> FormatError:
        return FormatError(
            f"{self._where}: chunk {index} of {raw} bytes is recorded with {stored} stored bytes"
        )

    def check(self) -> None:
        """Raises FormatError unless the compressed chunks fill their entry exactly."""
        starts = self._stored_starts()
        if len(starts) != len(self) + 1 or starts[-1] != self._stored_bytes:
            raise FormatError(
                f"{self._where}: its chunks take {starts[-1]} bytes, its entry has "
                f"{self._stored_bytes}"
            )

    def _stored_starts(self) -> list[int]:
        if self._starts is None:
            starts = [0]
            for index in range(len(self)):
                at = (self._first + index) * RECORD.size
                if at + RECORD.size > len(self._table):
                    break
                stored = RECORD.unpack_from(self._table, at)[1]
                starts.append(starts[-1] + min(stored, self.chunk_bytes))
            self._starts = starts
        return self._starts


def read_root(reader: Reader, file: str, root: Root, width: int, target: memoryview) -> None:
    """Fills `target` with the raw bytes of a root in a file of the reader.

    Raises:
        CorruptError: the stored bytes have another checksum.
        FormatError: the size of the root is not possible.
    """
    where = f"{reader.url}/{file}"
    end = root.place.offset + root.stored_bytes
    if not 0 < root.stored_bytes <= len(target):
        raise FormatError(
            f"{where}: a chunk of {len(target)} bytes has {root.stored_bytes} stored bytes"
        )
    stored = reader.read(file, root.place.offset, root.stored_bytes)
    if xxhash.xxh3_128_digest(stored) != root.digest:
        raise CorruptError(
            f"{where}: bytes {root.place.offset}:{end} do not have the checksum "
            f"{root.digest.hex()} of a delta's root: they were changed since; restore the file "
            "from another copy"
        )
    if len(stored) == len(target):
        target[:] = stored
    else:
        from formats.native.codec import decompress  # numpy

        decompress(stored, width, target, where)
