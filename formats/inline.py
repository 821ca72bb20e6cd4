"""The extent of bytes that a reader has in memory, because the file has them only in another form.

numpy arrays in a pickle of torch.save are text in an encoding of their bytes, so no range of the
file has the bytes themselves. The reader of the pickle has decoded them. Chunks with these bytes
give them to the code that reads tensors, as the chunks of a compressed tensor do.

Each chunk reads one byte of the file for nothing: ranges of no bytes are not read.
"""

from __future__ import annotations

from formats.catalog import Chunk, Extent

CHUNK_BYTES = 1 << 20


class InlineChunks:
    """Chunks whose decoded bytes are in memory."""

    chunk_bytes = CHUNK_BYTES
    compressed = True

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return -(-len(self._data) // CHUNK_BYTES)

    def __getitem__(self, index: int) -> Chunk:
        raw_bytes = min(CHUNK_BYTES, len(self._data) - index * CHUNK_BYTES)
        return Chunk(index, 1, raw_bytes, b"", compressed=True)

    def wrong(self, first: int, stored: memoryview) -> None:
        """Returns None: a chunk has no checksum of its own."""

    def decode(self, index: int, stored: memoryview, width: int, target: memoryview) -> None:
        """Copies the bytes of a chunk into `target`."""
        lo = index * CHUNK_BYTES
        target[:] = self._data[lo : lo + len(target)]


def inline(file: str, data: bytes) -> Extent:
    """Returns an extent of `file`, from which the bytes come, that decodes to these bytes."""
    return Extent(file, 0, len(data), InlineChunks(data))
