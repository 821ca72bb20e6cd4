"""How much a format reads of a folder, and in how many reads."""

from __future__ import annotations

from formats.storage import Reader


class Counting:
    """A folder that notes the length of every read."""

    def __init__(self, reader: Reader) -> None:
        self.url, self.names, self.size = reader.url, reader.names, reader.size
        self.read_bytes = reader.read_bytes
        self._reader = reader
        self.reads: list[int] = []

    def read_whole(self, name: str, limit: int) -> bytes:
        data = self._reader.read_whole(name, limit)
        self.reads.append(len(data))
        return data

    def read_end(self, name: str, size: int, length: int) -> bytes:
        self.reads.append(length)
        return self._reader.read_end(name, size, length)

    def read(self, name: str, offset: int, length: int) -> bytes:
        self.reads.append(length)
        return self._reader.read(name, offset, length)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        self.reads.append(sum(map(len, targets)))
        self._reader.read_into(name, offset, *targets)
