"""Verifies every bit of a native checkpoint.

Rules:

1. Each file is read once, front to back. The digest in the manifest covers the header and the chunk
   table, and a record in the table covers each chunk: together all bytes of the file.
2. A damaged chunk is one problem, with file, tensor and bytes. A file with a damaged header or
   table is one problem that names its tensors, because its table cannot be trusted.
3. The files must then hold all elements of each tensor of the manifest.
4. Borrowed chunks are read in the folders of their bases and compared with this checkpoint's own
   records. Other bytes of a base are not checked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Event

import xxhash

from ckpt.checking.report import Findings, Problem
from formats.errors import FormatError
from formats.native.borrowed import Root, Run
from formats.native.manifest import MANIFEST, Manifest, ShardFile, load, read_manifest
from formats.native.reader import Shards
from formats.native.shard import OWN_ENTRIES, RECORD, Shard, first_chunks
from formats.storage import Pool, Reader, read_again
from sharding.errors import format_names
from sharding.layout import Box

BLOCK_BYTES = 8 << 20
"""Bytes of one read."""
WORKERS = 4
"""Files that are checked at the same time. Reading and hashing release the GIL."""
SHOWN_TENSORS = 3
"""A message names at most so many tensors of a damaged file."""

Progress = Callable[[int], None]


def check_native(
    reader: Reader, progress: Progress | None = None, data: bytes | None = None
) -> Findings:
    """Checks the checkpoint in a folder. The manifest must be intact.

    `data` is the manifest, if the folder does not have it yet.
    """
    data = read_manifest(reader) if data is None else data
    manifest = load(data, f"{reader.url}/{MANIFEST}")
    check = _Check(reader, manifest, progress)
    with Pool(WORKERS, "ckpt-verify") as pool:
        try:
            files = list(pool.map(check.file, manifest.files))
        except BaseException:
            check.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    damaged = {
        file.rank for file, checked in zip(manifest.files, files, strict=True) if checked.lost
    }
    problems = [problem for checked in files for problem in checked.problems]
    problems += check.tensors(damaged)
    return Findings(
        "every bit: the manifest, headers, chunk tables and chunks against their checksums",
        len(data) + sum(found.nbytes for found in files),
        tuple(problems),
    )


@dataclass(frozen=True, slots=True)
class _CheckedFile:
    """The result for one shard file."""

    nbytes: int
    """Bytes that were compared with a checksum."""
    problems: list[Problem]
    lost: bool = False
    """Whether the header or table is damaged, so that no tensor of the file can be found."""


@dataclass(frozen=True, slots=True)
class _StoredChunk:
    """Bytes `[lo, hi)` of a file, and the checksum with which they were written."""

    tensor: str
    lo: int
    hi: int
    digest: bytes


class _Check:
    """The check of one checkpoint; `file` may run in several threads."""

    def __init__(self, reader: Reader, manifest: Manifest, progress: Progress | None) -> None:
        self.stop = Event()
        self._reader = reader
        self._manifest = manifest
        self._shards = Shards(reader, manifest)
        self._progress = progress

    def file(self, file: ShardFile) -> _CheckedFile:
        """Checks the header, the table and every chunk of one file."""
        where = f"{self._reader.url}/{file.name}"
        try:
            shard = self._shards.shard(file.rank, file.name)
        except FormatError as error:
            message = f"{error} ({self._hurt(file)})"
            return _CheckedFile(0, [Problem(file.name, message, kind=error.kind)], lost=True)
        self._count(file.header_bytes + file.table_bytes)
        problems: list[Problem] = []
        block = memoryview(bytearray(BLOCK_BYTES))
        try:
            end = file.size - file.table_bytes
            problems += self._find_damage(file.name, end, iter_chunks(shard, where), block)
        except FormatError as error:  # the table contradicts the header, or the file was cut
            problems.append(Problem.of(error, file.name))
        nbytes = file.size
        for run, chunks in iter_borrowed(shard, where):
            try:
                name = self._shards.base_file(run.place, chunks[-1].hi - chunks[0].lo, where)
                problems += self._find_damage(name, chunks[-1].hi, chunks, block)
                nbytes += chunks[-1].hi - chunks[0].lo
            except FormatError as error:
                problems.append(Problem.of(error, file.name))
        for tensor, root in roots(shard, where):
            lo, hi = root.place.offset, root.place.offset + root.stored_bytes
            try:
                name = self._shards.base_file(root.place, root.stored_bytes, where)
                chunks = [_StoredChunk(tensor, lo, hi, root.digest)]
                problems += self._find_damage(name, hi, chunks, block)
                nbytes += hi - lo
            except FormatError as error:
                problems.append(Problem.of(error, file.name))
        return _CheckedFile(nbytes, problems)

    def tensors(self, lost: set[int]) -> Iterator[Problem]:
        """Yields a problem for each tensor that no file holds, except in files of `lost` ranks."""
        for name, stored in self._manifest.tensors.items():
            pieces = self._shards.pieces(name, stored)
            whole, found = Box.whole(stored.shape), 0
            for rank in stored.layout.holders(whole):
                boxes = [piece.box for piece in stored.layout.pieces(rank)]
                found += sum(box.numel for box in boxes)
                if rank in lost:
                    continue
                shard = self._shards.files.get(rank)
                try:
                    for _ in pieces.locate(boxes[0]):  # finds all pieces of the rank, or raises
                        pass
                except FormatError as error:
                    yield Problem.of(error, shard.name if shard else MANIFEST, name)
            if found != whole.numel:
                yield Problem(
                    MANIFEST,
                    f"{self._reader.url}/{MANIFEST}: {name}: {found} elements are stored, its "
                    f"shape {stored.shape} has {whole.numel}",
                    name,
                    kind="format",
                )

    def _find_damage(
        self, name: str, end: int, chunks: Iterable[_StoredChunk], block: memoryview
    ) -> Iterator[Problem]:
        """Yields a problem for each chunk of a file whose bytes have another checksum.

        No chunk ends behind byte `end`. The file is read front to back, into `block`.
        """
        where = f"{self._reader.url}/{name}"
        start = stop = 0
        for chunk in chunks:
            hasher, at = xxhash.xxh3_128(), chunk.lo
            while at < chunk.hi:
                if at >= stop:
                    if self.stop.is_set():
                        return
                    start, stop = at, min(at + len(block), end)
                    self._reader.read_into(name, start, block[: stop - start])
                    self._count(stop - start)
                upto = min(stop, chunk.hi)
                hasher.update(block[at - start : upto - start])
                at = upto
            if hasher.digest() != chunk.digest and not self._is_right(name, chunk, hasher.digest()):
                yield Problem(
                    name,
                    f"{where}: {chunk.tensor}: bytes {chunk.lo}:{chunk.hi} do not have the "
                    f"checksum {chunk.digest.hex()} they were written with: they were changed "
                    "since; restore the file from another copy",
                    chunk.tensor,
                    chunk.lo,
                    chunk.hi,
                )

    def _is_right(self, name: str, chunk: _StoredChunk, first: bytes) -> bool:
        """Whether a chunk with a wrong digest is right in the store, and was not on the way."""

        def digest() -> bytes:
            return xxhash.xxh3_128_digest(self._reader.read(name, chunk.lo, chunk.hi - chunk.lo))

        place = name, chunk.lo, chunk.hi
        return read_again(self._reader, place, first, digest, chunk.digest.__eq__) is not None

    def _hurt(self, file: ShardFile) -> str:
        """Returns the tensors with a part in a file, as text."""
        tensors = self._manifest.tensors.items()
        names = [name for name, stored in tensors if stored.layout.pieces(file.rank)]
        return f"it holds parts of {format_names(names, SHOWN_TENSORS) or 'no tensor'}"

    def _count(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress(nbytes)


def iter_chunks(shard: Shard, where: str) -> Iterator[_StoredChunk]:
    """Yields all chunks in an opened shard file, in the order of its bytes.

    Raises:
        FormatError: the table contradicts the header.
    """
    index = shard.index
    first = first_chunks(index, where)
    elsewhere = iter(index.runs)
    run = next(elsewhere, None)
    for entry in index.header.entries.values():
        if entry.name in OWN_ENTRIES:
            continue
        at = index.header.data_offset + entry.begin
        end = index.header.data_offset + entry.end
        number = first[entry.name]
        while at < end:
            while run is not None and run.first <= number:
                number, run = max(number, run.end), next(elsewhere, None)
            if number * RECORD.size >= len(index.table):
                raise FormatError(f"{where}: {entry.name}: no record for the chunk at byte {at}")
            digest, stored = RECORD.unpack_from(index.table, number * RECORD.size)
            most = min(index.chunk_bytes, end - at)
            if not 0 < stored <= most or (index.codec == "raw" and stored != most):
                raise FormatError(
                    f"{where}: {entry.name}: a chunk at byte {at} is recorded with {stored} bytes, "
                    f"{most} are there for it"
                )
            yield _StoredChunk(entry.name, at, at + stored, digest)
            at += stored
            number += 1


def iter_borrowed(shard: Shard, where: str) -> Iterator[tuple[Run, list[_StoredChunk]]]:
    """Yields each run of an opened shard file with its chunks, as bytes of the base's file."""
    tensor_of = _tensors_by_chunk(shard, where)
    for run in shard.index.runs:
        tensor = tensor_of(run.first)
        records = shard.index.table[run.first * RECORD.size : run.end * RECORD.size]
        chunks, at = [], run.place.offset
        for digest, stored in RECORD.iter_unpack(records):
            chunks.append(_StoredChunk(tensor, at, at + stored, digest))
            at += stored
        yield run, chunks


def roots(shard: Shard, where: str) -> Iterator[tuple[str, Root]]:
    """Yields the root of each delta chunk of an opened shard file, with the chunk's tensor."""
    tensor_of = _tensors_by_chunk(shard, where)
    for chunk, root in shard.index.deltas.items():
        yield tensor_of(chunk), root


def _tensors_by_chunk(shard: Shard, where: str) -> Callable[[int], str]:
    """Returns a function from the index of a chunk in the table to the name of its tensor."""
    starts = first_chunks(shard.index, where)
    names, firsts = list(starts), list(starts.values())
    return lambda chunk: names[bisect_right(firsts, chunk) - 1]
