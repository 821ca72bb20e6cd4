"""Reads a native checkpoint as a catalog: layouts from the manifest, offsets from the shards.

`read` reads only the manifest. The header and the chunk table of a shard file are read once, when
the first piece in it is located: a reader of one rank's part opens one rank's file. A load reads
only chunks of a base.

A save finds the chunks that it can borrow (`Lender`): each rank opens the base itself and reads
only the header and the chunk table of its own file there, and all find the same. A tensor with
another stored layout lends nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, replace
from itertools import repeat
from math import prod
from typing import TypeAlias

from formats.catalog import Catalog, FileRecord, StoredPiece, TensorRecord
from formats.errors import CorruptError, FormatError
from formats.limits import BASES, apply_limits, current
from formats.native.borrowed import Lent, LentChunks, Place, Root, bases_of, beside
from formats.native.manifest import MANIFEST, Manifest, StoredTensor, digest_in, load, read_manifest
from formats.native.shard import RECORD, Expected, Part, Shard, open_shard, read_root
from formats.safetensors.file import Header
from formats.storage import LOCAL_READ_BYTES, Pool, Reader
from sharding.layout import Box, Piece, Shape, row_major

OPENERS = 8
"""The largest number of files that are opened at the same time on a server."""


def read(reader: Reader) -> Catalog:
    """Reads the catalog of the checkpoint in a folder with a `manifest.json`.

    Raises FileNotFoundError if there is none, and the errors of `formats.native.manifest.load`.
    """
    data = read_manifest(reader)
    manifest = load(data, f"{reader.url}/{MANIFEST}")
    shards = Shards(reader, manifest)
    all_strides = manifest.strides
    return Catalog(
        format="ckpt",
        tensors={
            name: TensorRecord(
                name,
                stored.shape,
                stored.dtype,
                shards.pieces(name, stored),
                stored.layout,
                # A manifest with strides lists all that are not row-major.
                all_strides.get(name, row_major(stored.shape)) if all_strides else None,
            )
            for name, stored in manifest.tensors.items()
        },
        tree=manifest.tree,
        files=(
            FileRecord(MANIFEST, len(data), digest_in(data)),
            *(FileRecord(file.name, file.size, file.digest) for file in manifest.files),
        ),
        aliases=manifest.aliases,
        metadata=manifest.writer,
        bases=tuple(base.folder for base in manifest.bases if base is not None),
        optimizers=manifest.optimizers,
        versions=manifest.versions,
    )


class Shards:
    """The shard files of one checkpoint, each opened at most once, and those of its bases."""

    def __init__(self, reader: Reader, manifest: Manifest) -> None:
        self._reader = reader
        self.files = {file.rank: file for file in manifest.files}
        self._bases = [
            None if base is None else (base.folder, {file.rank: file for file in base.files})
            for base in manifest.bases
        ]
        self._sound: set[str] = set()
        """The files of bases whose size was checked."""
        self._opened: dict[int, Shard] = {}
        self._headers: dict[tuple[bytes, int], Header] = {}
        self._first: dict[int, dict[str, int]] = {}
        """By the identity of a header: ranks with one header have equal chunk indices."""
        self._places: dict[int, Places] = {}
        self._locks = [threading.Lock() for _ in range(OPENERS)]
        """Each file is opened once, and several files at the same time."""
        self._limits = current()

    def shard(self, rank: int, name: str) -> Shard:
        """Returns the opened file of a rank. `name` is the tensor for an error."""
        shard = self._opened.get(rank)
        if shard is None:
            file = self.files.get(rank)
            if file is None:
                raise CorruptError(
                    f"{self._reader.url}/{MANIFEST}: {name} lies in the file of rank {rank}, "
                    "which is not listed; restore it from another copy"
                )
            with self._locks[rank % len(self._locks)]:
                shard = self._opened.get(rank)
                if shard is None:
                    with apply_limits(self._limits):
                        index = open_shard(self._reader, file, self._headers)
                    shard = Shard(file, index, self._reader, self.base_file, self._first)
                    self._opened[rank] = shard
        return shard

    def open_together(self, ranks: Sequence[int], name: str) -> None:
        """Opens the files of several ranks at the same time, on a server.

        Raises the error of the first one that cannot be opened.
        """
        if len(ranks) < 2 or self._reader.read_bytes <= LOCAL_READ_BYTES:
            return
        ranks = [rank for rank in ranks if rank not in self._opened and rank in self.files]
        if len(ranks) > 1:
            with Pool(min(OPENERS, len(ranks)), "ckpt-open") as pool:
                opening = [pool.submit(self.shard, rank, name) for rank in ranks]
                wait(opening, None, FIRST_EXCEPTION)
                pool.shutdown(cancel_futures=True)
            for opened in opening:
                if not opened.cancelled():
                    opened.result()

    def base_file(self, place: Place, nbytes: int, where: str) -> str:
        """Returns the name, for this checkpoint's reader, of the base's file of a place.

        Raises:
            CorruptError: the file is missing or has another size.
            FormatError: the file does not have so many bytes there, or is not listed.
        """
        base = self._bases[place.base] if place.base < len(self._bases) else None
        file = base[1].get(place.rank) if base is not None else None
        if base is None or file is None:
            raise FormatError(
                f"{where}: some of its chunks lie in the file of rank {place.rank} of base "
                f"{place.base}, which the manifest does not list"
            )
        if place.offset + nbytes > file.size:
            raise FormatError(
                f"{where}: it borrows bytes {place.offset}:{place.offset + nbytes} of "
                f"{base[0]}/{file.name}, which has {file.size}"
            )
        name = beside(base[0], file.name)
        if name not in self._sound:
            try:
                size = self._reader.size(name)
            except FileNotFoundError as error:
                raise CorruptError(
                    f"{where}: it borrows from {base[0]}/{file.name}, in the folder beside this "
                    "one, and that file is missing: put it back"
                ) from error
            if size != file.size:
                raise CorruptError(
                    f"{where}: it borrows from {base[0]}/{file.name}, which has {size} bytes and "
                    f"had {file.size}: restore that file from another copy"
                )
            self._sound.add(name)
        return name

    def pieces(self, name: str, stored: StoredTensor) -> NativePieces:
        places = self._places.get(id(stored))
        if places is None:
            places = self._places[id(stored)] = Places(stored)
        return NativePieces(self, name, places)


_Held: TypeAlias = tuple[int, Expected, tuple[Piece, ...]]


class Places:
    """The places of pieces by their layout, computed once for all tensors of one layout."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self._expected: dict[Expected, Expected] = {}
        self._found: dict[tuple[Shape, Shape], tuple[_Held, ...]] = {}

    def of(self, box: Box) -> tuple[_Held, ...]:
        """Returns the ranks that hold parts of a box, with the expected parts and the pieces."""
        found = self._found.get((box.lo, box.hi))  # a box takes longer to hash
        if found is None:
            layout = self.stored.layout
            found = self._found[box.lo, box.hi] = tuple(
                (rank, self.expected_of(rank), tuple(p for p in layout.pieces(rank) if p.box & box))
                for rank in layout.holders(box)
            )
        return found

    def expected_of(self, rank: int) -> Expected:
        """Returns the part that the file of a rank must have."""
        layout, dtype = self.stored.layout, self.stored.dtype
        lo, hi = layout.span(rank)
        shape = layout.local_shape(rank)
        shape = (hi - lo,) if hi - lo != prod(shape) else shape
        carried = dtype.carrier_shape(shape)
        found = Expected(dtype.carrier, carried, dtype.nbytes(shape), dtype.component_bytes)
        return self._expected.setdefault(found, found)


@dataclass(frozen=True, slots=True, eq=False)
class NativePieces:
    """The stored pieces of one tensor."""

    _shards: Shards
    _name: str
    _places: Places

    def locate(self, box: Box, but: int | None = None) -> Iterator[StoredPiece]:
        """Returns the stored pieces that overlap `box`, except those of one rank."""
        places = self._places.of(box)
        if but is not None:
            places = tuple(place for place in places if place[0] != but)
        if len(places) == 1:  # nearly every tensor of a rank that has the part of one
            rank, expected, pieces = places[0]
            opened = self._shards.shard(rank, self._name)
            if not opened.index.runs:
                extent = opened.extent(self._name, expected)
                return map(StoredPiece, pieces, repeat(extent))
        return self._locate(places, box)

    def _locate(self, places: tuple[_Held, ...], box: Box) -> Iterator[StoredPiece]:
        shard, name = self._shards.shard, self._name
        header, alike, start = None, None, None
        if len(places) > 1:
            self._shards.open_together([place[0] for place in places], name)
        for rank, expected, pieces in places:
            opened = shard(rank, name)
            if not opened.index.runs:
                # The files of all ranks usually have one header, with one start for this tensor.
                if start is None or opened.index.header is not header or expected is not alike:
                    start = opened.start(name, expected)
                    header, alike = opened.index.header, expected
                extent = opened.extent(name, expected, start)
                if opened.index.codec != "raw":
                    start = None
                for piece in pieces:
                    yield StoredPiece(piece, extent)
            else:
                yield from self._among(opened.parts(name, expected), pieces, box)

    def __iter__(self) -> Iterator[StoredPiece]:
        return self.locate(Box.whole(self._places.stored.shape))

    def parts(self, rank: int) -> list[Part]:
        """Returns the parts of a rank's local storage."""
        expected = self._places.expected_of(rank)
        return self._shards.shard(rank, self._name).parts(self._name, expected)

    def _among(
        self, parts: list[Part], pieces: tuple[Piece, ...], box: Box
    ) -> Iterator[StoredPiece]:
        """Yields pieces of a rank's local storage, cut at the borders of its files."""
        itemsize = self._places.stored.dtype.itemsize
        for piece in pieces:
            if len(parts) == 1:
                yield StoredPiece(piece, parts[0].extent)
                continue
            for part in parts:
                first = part.begins // itemsize
                end = first + part.extent.nbytes // itemsize
                for some in piece.within(first, end):
                    if some.box & box:
                        there = Piece(some.box, some.at - first, some.strides)
                        yield StoredPiece(there, part.extent)


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
