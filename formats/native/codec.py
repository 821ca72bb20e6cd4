"""How one chunk is compressed: a byte shuffle, then one zstd frame.

The shuffle puts the bytes of equal significance together: of n elements of k bytes, first the n
lowest bytes, then the n next ones. Floating-point weights hardly compress without it: bf16 1.28,
with it 1.46 and faster, because the exponents, which repeat, stand side by side.
A chunk that shrinks by less than 1/32 is stored as it is; whoever reads sees from the stored size
which it was. `Effort` spares the chunks of a tensor that does not shrink most of the trying.

zstandard is imported by the first chunk that needs it: states that are not compressed do without.
Contexts and scratch memory are kept for each thread: made anew for every chunk, they and the page
faults of fresh memory took a third of the time.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from formats.errors import CorruptError

if TYPE_CHECKING:
    from zstandard import ZstdCompressor, ZstdDecompressor

LEVEL = 1
"""Higher levels are slower and, after the shuffle, no smaller."""
WORTH = 32
"""A chunk is stored compressed when it shrinks by more than one part in this many."""
MISSES = 3
"""After this many chunks in a row that did not shrink, a tensor's next ones are only sampled."""
SAMPLE_EVERY = 16
"""Then one chunk in this many is tried."""
BLOCK_ELEMENTS = 1 << 15
"""Elements that are put together at once when a chunk is unshuffled: they stay in the cache."""


class _Thread(threading.local):
    """What a thread keeps from chunk to chunk."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, dtype=np.uint8)

    @cached_property
    def compressor(self) -> ZstdCompressor:
        from zstandard import ZstdCompressionParameters, ZstdCompressor

        parameters = ZstdCompressionParameters.from_level(
            LEVEL, window_log=17, min_match=7, hash_log=6, chain_log=6, write_content_size=True
        )
        return ZstdCompressor(compression_params=parameters)

    @cached_property
    def decompressor(self) -> ZstdDecompressor:
        from zstandard import ZstdDecompressor

        return ZstdDecompressor()

    def scratch(self, nbytes: int) -> np.ndarray:
        """Memory that the next call on this thread is given again."""
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, dtype=np.uint8)
        return self._scratch[:nbytes]


_thread = _Thread()


class Effort:
    """Which chunks of one tensor are worth trying, by how those before them went."""

    def __init__(self) -> None:
        self._misses = 0
        self._passed_over = 0

    def tries_next(self) -> bool:
        """Whether to try the next chunk; after `MISSES` misses one in `SAMPLE_EVERY`."""
        if self._misses < MISSES:
            return True
        self._passed_over = (self._passed_over + 1) % SAMPLE_EVERY
        return self._passed_over == 0

    def note(self, shrank: bool) -> None:
        """How a chunk that was tried went; one that shrank has the next ones tried again."""
        self._misses = 0 if shrank else self._misses + 1


def compress(raw: memoryview, width: int) -> bytes | None:
    """The frame of a chunk of elements of `width` bytes, or None when it is better kept raw."""
    frame = _thread.compressor.compress(_shuffle(raw, width))
    return frame if len(frame) < len(raw) - len(raw) // WORTH else None


def decompress(frame: bytes | memoryview, width: int, target: memoryview, where: str) -> None:
    """Fill `target` with a chunk, whose raw bytes it has room for. `where` names it in errors.

    A frame that claims another size is refused before anything is decoded.
    """
    import zstandard

    try:
        claimed = zstandard.frame_content_size(frame)
        if claimed != len(target):
            raise CorruptError(
                f"{where}: a zstd frame of {claimed} bytes stands where {len(target)} belong"
            )
        data = _thread.decompressor.decompress(
            frame, max_output_size=len(target), allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptError(f"{where}: zstd: {error}") from error
    _unshuffle(data, width, target)


def differ(raw: memoryview, other: memoryview, target: memoryview) -> None:
    """Fill `target`, which may be one of the two, with what two chunks differ in: their XOR."""
    a, b, out = (np.frombuffer(data, dtype=np.uint8) for data in (raw, other, target))
    np.bitwise_xor(a, b, out=out)


def _shuffle(raw: memoryview, width: int) -> memoryview:
    """The planes of a chunk, in this thread's scratch memory."""
    if width == 1:
        return raw
    elements = np.frombuffer(raw, dtype=f"<u{width}")
    planes = _thread.scratch(len(raw)).reshape(width, -1)
    for byte in range(width):
        # Shifting whole elements vectorises; picking every width-th byte does not.
        np.right_shift(elements, 8 * byte, out=planes[byte], casting="unsafe")
    return planes.reshape(-1).data


def _unshuffle(data: bytes, width: int, target: memoryview) -> None:
    if width == 1:
        target[:] = data
        return
    planes = np.frombuffer(data, dtype=np.uint8).reshape(width, -1)
    elements = np.frombuffer(target, dtype=f"<u{width}")
    for lo in range(0, len(elements), BLOCK_ELEMENTS):
        block, part = elements[lo : lo + BLOCK_ELEMENTS], planes[:, lo : lo + BLOCK_ELEMENTS]
        block[...] = part[-1]
        for plane in part[-2::-1]:
            np.left_shift(block, 8, out=block)
            np.bitwise_or(block, plane, out=block)
