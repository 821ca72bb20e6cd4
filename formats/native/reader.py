"""A native checkpoint as a catalog: symbolic layouts from the manifest, offsets from the shards.

Opening reads the manifest only. A shard file's header and chunk table are read, once, when the
first piece in it is located; a reader that needs one rank's part opens one rank's file. Of a base,
only chunks are ever read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from math import prod

from formats.catalog import Catalog, FileRecord, StoredPiece, TensorRecord
from formats.errors import CorruptError, FormatError
from formats.limits import applied, current
from formats.native.borrowed import Place, beside
from formats.native.manifest import MANIFEST, Manifest, StoredTensor, digest_in, read_manifest
from formats.native.manifest_loader import load
from formats.native.opened_shard import Expected, Part, Shard
from formats.native.shard import open_shard
from formats.safetensors_header import Header
from formats.storage import LOCAL_READ_BYTES, Reader
from formats.threads import Pool
from sharding.layout import Box, Piece

OPENERS = 8
"""Files that are opened at once at a server, at most."""


def read(reader: Reader) -> Catalog:
    """The catalog of the checkpoint in a folder that has a `manifest.json`."""
    data = read_manifest(reader)
    manifest = load(data, f"{reader.url}/{MANIFEST}")
    shards = Shards(reader, manifest)
    return Catalog(
        format="ckpt",
        tensors={
            name: TensorRecord(
                name, stored.shape, stored.dtype, shards.pieces(name, stored), stored.layout
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
        """The files of bases whose size is what it was."""
        self._opened: dict[int, Shard] = {}
        self._headers: dict[tuple[bytes, int], Header] = {}
        self._first: dict[int, dict[str, int]] = {}
        """By the identity of a header: ranks with the same one have their chunks alike."""
        self._places: dict[int, Places] = {}
        self._locks = [threading.Lock() for _ in range(OPENERS)]
        """One file is opened once; others at the same time."""
        self._limits = current()

    def shard(self, rank: int, name: str) -> Shard:
        """The opened file of a rank; `name` is the tensor that asks, for the error."""
        shard = self._opened.get(rank)
        if shard is None:
            file = self.files.get(rank)
            if file is None:
                raise CorruptError(
                    f"{self._reader.url}/{MANIFEST}: {name} lies in the file of rank {rank}, "
                    "which is not listed"
                )
            with self._locks[rank % len(self._locks)]:
                shard = self._opened.get(rank)
                if shard is None:
                    with applied(self._limits):
                        index = open_shard(self._reader, file, self._headers)
                    shard = Shard(file, index, self._reader, self.base_file, self._first)
                    self._opened[rank] = shard
        return shard

    def open_together(self, ranks: Sequence[int], name: str) -> None:
        """The files of several ranks are open: at once where each waits for a server.

        A file that cannot be opened is left to `shard`, which says why.
        """
        if len(ranks) < 2 or self._reader.read_bytes <= LOCAL_READ_BYTES:
            return
        ranks = [rank for rank in ranks if rank not in self._opened and rank in self.files]
        if len(ranks) > 1:
            with Pool(min(OPENERS, len(ranks)), "ckpt-open") as pool:
                wait([pool.submit(self.shard, rank, name) for rank in ranks], None, FIRST_EXCEPTION)
                pool.shutdown(cancel_futures=True)

    def base_file(self, place: Place, nbytes: int, where: str) -> str:
        """The name, as this checkpoint's reader knows it, of the base's file a place is in.

        Raises CorruptError where the file is gone or has another size, FormatError where it does
        not have so many bytes there.
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
        """Where a tensor's elements lie."""
        places = self._places.get(id(stored))
        if places is None:
            places = self._places[id(stored)] = Places(stored)
        return NativePieces(self, name, places)


class Places:
    """Where a tensor's pieces lie, worked out from its layout once for all that are like it."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self._expected: dict[Expected, Expected] = {}
        self._found: dict[Box, tuple[tuple[int, Expected, tuple[Piece, ...]], ...]] = {}

    def of(self, box: Box) -> tuple[tuple[int, Expected, tuple[Piece, ...]], ...]:
        """The ranks that hold some of a box, what their files have, and the pieces in it."""
        found = self._found.get(box)
        if found is None:
            layout = self.stored.layout
            found = self._found[box] = tuple(
                (rank, self.expected(rank), tuple(p for p in layout.pieces(rank) if p.box & box))
                for rank in layout.holders(box)
            )
        return found

    def expected(self, rank: int) -> Expected:
        """What the file of a rank should have."""
        layout, dtype = self.stored.layout, self.stored.dtype
        lo, hi = layout.span(rank)
        shape = layout.local_shape(rank)
        shape = (hi - lo,) if hi - lo != prod(shape) else shape
        carried = dtype.carrier_shape(shape)
        found = Expected(dtype.carrier, carried, dtype.nbytes(shape), dtype.component_bytes)
        return self._expected.setdefault(found, found)


class NativePieces:
    """One tensor's pieces."""

    __slots__ = ("_name", "_places", "_shards")

    def __init__(self, shards: Shards, name: str, places: Places) -> None:
        self._shards = shards
        self._name = name
        self._places = places

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """The stored pieces that hold some of `box`."""
        shard, name = self._shards.shard, self._name
        header, alike, start = None, None, None
        places = self._places.of(box)
        if len(places) > 1:
            self._shards.open_together([place[0] for place in places], name)
        for rank, expected, pieces in places:
            opened = shard(rank, name)
            if not opened.index.runs:
                # As a rule the files of all ranks have one header, and it says the same of this.
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
        """Where the local storage of a rank lies."""
        expected = self._places.expected(rank)
        return self._shards.shard(rank, self._name).parts(self._name, expected)

    def _among(
        self, parts: list[Part], pieces: tuple[Piece, ...], box: Box
    ) -> Iterator[StoredPiece]:
        """Pieces of a rank's local storage, cut where that goes on in another file."""
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
