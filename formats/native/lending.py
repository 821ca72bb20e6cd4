"""Finds the chunks of a base that a save can borrow.

Rules:

1. A rank reads only the header and the chunk table of its own rank's file of the base. A tensor
   with another stored layout lends nothing.
2. Each rank opens the base itself, and all find the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from formats.limits import BASES
from formats.native.borrowed import Lent, LentChunks, Place, Root, bases_of, beside
from formats.native.chunk_table import read_root
from formats.native.manifest import MANIFEST, StoredTensor, digest_in, read_manifest
from formats.native.manifest_loader import load
from formats.native.opened_shard import Part, Shard
from formats.native.reader import Shards
from formats.native.shard import RECORD
from formats.storage import Reader


class Lender:
    """An opened base."""

    def __init__(self, reader: Reader, folder: str) -> None:
        """`reader` reads the base; `folder` is its name beside the new checkpoint.

        Raises FileNotFoundError if there is no manifest, and the errors of a damaged one.
        """
        data = read_manifest(reader)
        self._reader = reader
        self._manifest = load(data, f"{reader.url}/{MANIFEST}")
        self._shards = Shards(reader, self._manifest)
        self.manifest_digest = digest_in(data)
        """The digest of its manifest: 32 hex digits."""
        self.bases = bases_of(folder, self._manifest)
        """The bases of a checkpoint that borrows from this one, by their indices."""
        self._names = {
            (number, file.rank): beside(base.folder, file.name) if number else file.name
            for number, base in enumerate(self.bases)
            for file in base.files
        }
        """The names of all their files for the reader of the base."""

    def to(self, rank: int, tensors: Mapping[str, StoredTensor]) -> Lent | None:
        """Returns the chunks for the parts of these tensors that `rank` writes; None if none."""
        same = [
            (name, stored)
            for name, stored in tensors.items()
            if self._manifest.tensors.get(name) == stored and stored.layout.span(rank) != (0, 0)
        ]
        if rank not in self._shards.files or not same:
            return None
        shard = self._shards.shard(rank, same[0][0])
        owners = {name: owner for owner, name in self._names.items()}
        lent = {
            name: _chunks(self._shards.pieces(name, stored).parts(rank), shard, owners)
            for name, stored in same
        }
        index = shard.index
        return Lent(index.chunk_bytes, index.codec, lent, self.manifest_digest, self._fetch)

    def _fetch(self, root: Root, width: int, target: memoryview) -> None:
        file = self._names[root.place.base, root.place.rank]
        read_root(self._reader, file, root, width, target)


def _chunks(
    parts: Iterable[Part], shard: Shard, owners: Mapping[str, tuple[int, int]]
) -> LentChunks:
    """Returns the chunks of one tensor. A chunk in a base beyond `BASES` cannot be borrowed."""
    records: list[bytes] = []
    places: list[Place] = []
    roots: list[Root | None] = []
    nobody = (BASES, 0)
    for part in parts:
        offset = part.extent.offset
        owner = owners.get(part.extent.file, nobody)
        for index, record in enumerate(part.records(), part.first):
            digest, stored = RECORD.unpack(record)
            delta = shard.index.deltas.get(index)
            place = Place(*owner, offset)
            root: Root | None = Root(place, digest, stored)
            if delta is not None:
                there = Place(*owners.get(shard.root_file(delta), nobody), delta.place.offset)
                root = replace(delta, place=there)
            if root is not None and root.place.base >= BASES:
                root = None
            records.append(record if delta is None and root is not None else b"")
            places.append(place)
            roots.append(root)
            offset += stored
    return LentChunks(records, places, roots)
