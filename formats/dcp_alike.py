"""Opens items of DCP that are alike without parsing each of their zips.

torch writes one zip for each chunk of a tensor. The zips of chunks with one shape and dtype differ
in the data, in a random identifier, and in the checksums of both. The first such zip is parsed. The
next ones are compared with it, byte by byte, and only the checksum of the data is taken from them.
An item with any other difference is parsed as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from formats.catalog import Extent
from formats.pickle_records import StoredTensor
from formats.storage import LOCAL_READ_BYTES, Reader
from formats.zip_records import Archive

IDENTIFIER = ".data/serialization_id"
MOST_BYTES = 64 << 10
"""The largest number of bytes around the data of an item that are compared."""
KNOWN_ITEMS = 1 << 10
"""The largest number of items that are kept. A model has few shapes."""


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A parsed item: the bytes before and after its data."""

    head: bytes
    tail: bytes
    """With zeros in the place of the bytes that differ."""
    differing: tuple[slice, ...]
    """The places in the tail of the checksums and the identifier."""
    checksum_at: int
    """The place in the tail of the data's CRC-32."""
    data_bytes: int
    tensor: StoredTensor


class AlikeItems:
    """Parsed items by their sizes. Safe to use from several threads."""

    def __init__(self) -> None:
        self._parsed: dict[int, _Parsed] = {}

    def find(self, reader: Reader, item: Extent) -> tuple[Extent, StoredTensor] | None:
        """Returns the data and the tensor of an item; None if no parsed one is like it."""
        known = self._parsed.get(item.nbytes)
        if known is None or reader.read_bytes > LOCAL_READ_BYTES:  # each read is a request
            return None
        after = item.offset + item.nbytes - len(known.tail)
        tail = reader.read(item.file, after, len(known.tail))
        if (
            blanked(tail, known.differing) != known.tail
            or reader.read(item.file, item.offset, len(known.head)) != known.head
        ):
            return None
        checksum = int.from_bytes(tail[known.checksum_at : known.checksum_at + 4], "little")
        at = item.offset + len(known.head)
        return Extent(item.file, at, known.data_bytes, crc32=checksum or None), known.tensor

    def add(self, item: Extent, archive: Archive, data: Extent, tensor: StoredTensor) -> None:
        """Keeps a parsed item for those that are like it."""
        if len(self._parsed) >= KNOWN_ITEMS or item.nbytes - data.nbytes > MOST_BYTES:
            return
        head = archive.bytes_at(item.offset, data.offset - item.offset)
        end = data.offset + data.nbytes
        tail = archive.bytes_at(end, item.offset + item.nbytes - end)
        own = data.crc32.to_bytes(4, "little") if data.crc32 else b""
        if not own or own not in tail:
            return
        differing = _places(tail, own)
        if IDENTIFIER in archive:
            found = archive.extent(IDENTIFIER)
            if not end <= found.offset <= item.offset + item.nbytes - found.nbytes:
                return
            differing.append(slice(found.offset - end, found.offset - end + found.nbytes))
            differing += _places(tail, (found.crc32 or 0).to_bytes(4, "little"))
        places = tuple(differing)
        self._parsed[item.nbytes] = _Parsed(
            head, blanked(tail, places), places, tail.rindex(own), data.nbytes, tensor
        )


def blanked(data: bytes, places: tuple[slice, ...]) -> bytes:
    r"""Returns data with zeros at some places.

    >>> blanked(b"abcdef", (slice(1, 3),))
    b'a\x00\x00def'
    """
    found = bytearray(data)
    for place in places:
        found[place] = bytes(place.stop - place.start)
    return bytes(found)


def _places(data: bytes, wanted: bytes) -> list[slice]:
    """Returns the places of all occurrences of some bytes."""
    places, at = [], data.find(wanted)
    while at >= 0:
        places.append(slice(at, at + len(wanted)))
        at = data.find(wanted, at + len(wanted))
    return places
