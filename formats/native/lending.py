"""What an earlier checkpoint lends to a save: the chunks that need not be written again.

Rules:

1. Only headers and chunk tables of the base are read, and only of the file that this rank wrote or
   would have written: with another division of a tensor, nothing of it is lent.
2. A lender is opened by every rank for itself and says the same of the base to each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from formats.errors import HostileError
from formats.native.borrowed import Lent, LentChunks, Place, bases_of, beside
from formats.native.manifest import MANIFEST, MAX_BASES, MAX_MANIFEST_BYTES, StoredTensor, load
from formats.native.reader import Part, Shards
from formats.native.shard import RECORD
from formats.storage import Reader


class Lender:
    """An opened base."""

    def __init__(self, reader: Reader, folder: str) -> None:
        """`reader` reads the base, `folder` is its name beside the checkpoint to be written.

        Raises FileNotFoundError where there is none, and the errors of a damaged manifest.
        """
        size = reader.size(MANIFEST)
        if size > MAX_MANIFEST_BYTES:
            raise HostileError(f"{reader.url}/{MANIFEST}: {size} bytes are too many")
        data = reader.read(MANIFEST, 0, size)
        self._manifest = load(data, f"{reader.url}/{MANIFEST}")
        self._shards = Shards(reader, self._manifest)
        self.mark = data[11:43].decode()
        """The digest of its manifest: 32 hex digits."""
        self.bases = bases_of(folder, self._manifest)
        """The bases of a checkpoint that borrows from it, by their numbers."""

    def to(self, rank: int, tensors: Mapping[str, StoredTensor]) -> Lent | None:
        """What it has of the parts that `rank` writes of these tensors; None where nothing."""
        same = [
            (name, stored)
            for name, stored in tensors.items()
            if self._manifest.tensors.get(name) == stored and stored.layout.span(rank) != (0, 0)
        ]
        if rank not in self._shards.files or not same:
            return None
        shard = self._shards.shard(rank, same[0][0])
        owners = {shard.file.name: (0, rank)}
        for number, base in enumerate(self.bases[1:], 1):
            owners |= {beside(base.folder, f.name): (number, f.rank) for f in base.files}
        lent = {
            name: _chunks(self._shards.pieces(name, stored).parts(rank), owners)
            for name, stored in same
        }
        return Lent(shard.index.chunk_bytes, shard.index.codec, lent, self.mark)


def _chunks(parts: Iterable[Part], owners: Mapping[str, tuple[int, int]]) -> LentChunks:
    """The chunks of one tensor; those of a base that has no number any more are nobody's."""
    records: list[bytes] = []
    places: list[Place] = []
    for part in parts:
        offset = part.extent.offset
        base, rank = owners.get(part.extent.file, (MAX_BASES, 0))
        for record in part.records():
            records.append(record if base < MAX_BASES else b"")
            places.append(Place(base, rank, offset))
            offset += RECORD.unpack(record)[1]
    return LentChunks(records, places)
