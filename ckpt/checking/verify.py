"""Verifies a stored checkpoint without a model, a process group or torch.

Rules:

1. Damage is a result, not an exception. The report lists all problems, and a damaged file does not
   stop the check of the others. Only a place that cannot be checked at all raises an error.
2. The report tells which parts the format lets a reader check: without checksums only structure and
   sizes.
3. Memory is bounded: headers, chunk tables and one block of `BLOCK_BYTES` per thread.
4. torch's own formats and numpy's are checked by the CRC-32 that zip stores for each record. A file
   of torch.save or numpy is one zip; a DCP folder has one small zip for each of its items. Bytes
   outside of the records (padding, DCP's `.metadata`) have no checksum. No pickle is executed.

[Note: native checkpoints]
Every bit of a native checkpoint is verified.

1. Each file is read once, front to back. The digest in the manifest covers the header and the chunk
   table, and a record in the table covers each chunk: together all bytes of the file.
2. A damaged chunk is one problem, with file, tensor and bytes. A file with a damaged header or
   table is one problem that names its tensors, because its table cannot be trusted.
3. The files must then hold all elements of each tensor of the manifest.
4. Borrowed chunks are read in the folders of their bases and compared with this checkpoint's own
   records. Other bytes of a base are not checked.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

import xxhash

from ckpt.checking.report import Findings, Problem, Report
from ckpt.opening.sources import Source, name_folder, open_source, unless_replaced
from ckpt.stores.store import Options, Store, is_file, local_path, open_store, split_url
from ckpt.transfer.read import RangeReader
from ckpt.transfer.record_sums import RecordSums
from formats.catalog import Catalog, Extent
from formats.detect import DCP_METADATA, folder_format
from formats.errors import FormatError, UnsupportedError
from formats.joined import Subfolder
from formats.limits import check
from formats.native.borrowed import Place
from formats.native.manifest import MANIFEST, Manifest, ShardFile, load, read_manifest
from formats.native.reader import Shards
from formats.native.shard import OWN_ENTRIES, RECORD, Shard, first_chunks
from formats.safetensors.file import Header, read_header
from formats.storage import Pool, Reader, read_again
from sharding.errors import format_names
from sharding.layout import Box

if TYPE_CHECKING:
    from formats.zip_records import Archive, Compressed

__all__ = ["Problem", "Report", "verify"]

SAFETENSORS = ".safetensors"
FILES = frozenset(
    ("safetensors", "torch", "torchscript", "torch-legacy", "pickle", "npz", "npy", "gguf")
)
"""Formats of which a checkpoint is one file."""
SHOWN_NAMES = 20
Progress = Callable[[int], None] | None


def verify(
    url: str | os.PathLike[str],
    progress: Callable[[int], None] | None = None,
    *,
    storage_options: Options = None,
) -> Report:
    """Returns a report of all problems of the checkpoint at a path or URL, of any format.

    One process calls this. The check of a native checkpoint covers every byte.

    Args:
        progress: called with numbers of bytes as they are checked, by several threads.
        storage_options: options of the fsspec driver.

    Raises:
        NotACheckpointError: no checkpoint is at `url`.
        UnsupportedError: this version cannot read the checkpoint.
        ReplacedError: the checkpoint was replaced each time that it was checked.
        StoreError: the disk or object store failed.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(folder, {"w": torch.ones(2)})
    ...     ckpt.verify(folder).sound
    True
    """
    text = os.fspath(url)
    return unless_replaced(lambda: _verify(text, progress, storage_options))


def _verify(text: str, progress: Callable[[int], None] | None, options: Options) -> Report:
    try:
        with open_source(text, options) as source:
            files = len(source.catalog.files)
            findings = _of_catalog(source.store, source.catalog, progress)
            notes = (*source.catalog.notes, *findings.notes, *_strays(source))
            return Report(
                url=text,
                format=source.catalog.format,
                files=files,
                bytes_checked=findings.bytes_checked,
                checked=findings.checked,
                problems=findings.problems,
                notes=notes,
                tensors=len(source.catalog.tensors),
            )
    except UnsupportedError:
        raise
    except FormatError as error:
        return _unreadable(text, error, options)


def _of_catalog(reader: Reader, catalog: Catalog, progress: Progress) -> Findings:
    """Checks a catalog by its format; one of several parts, each part by its own format."""
    if catalog.format == "ckpt":
        return check_native(reader, progress)
    if catalog.parts:
        return _of_parts(
            [(part, _below(reader, folder, part, progress)) for folder, part in catalog.parts]
        )
    if catalog.format in ("torch", "torchscript", "npz"):
        return check_zip(reader, catalog, progress)
    if catalog.format == "torch-legacy":
        return check_counts(catalog)
    if catalog.format == "dcp":
        return check_dcp(reader, catalog, progress)
    if catalog.format == "json":
        return Findings("every value")
    # `open_source` has checked every rule of the headers, and the index against the files.
    checked = "structure and sizes only: this format has no checksums"
    return Findings(checked, problems=tuple(library_problems(reader, catalog)))


def library_problems(reader: Reader, catalog: Catalog) -> Iterator[Problem]:
    """Yields a problem for each local safetensors file that its library does not read as we do.

    The library is the reference for the format. It maps whole files, so none of an object store.
    """
    folder = local_path(reader.url)
    if folder is not None and catalog.format in ("safetensors", "huggingface"):
        for name in [file.name for file in catalog.files]:
            if catalog.format == "safetensors" or name.endswith(SAFETENSORS):
                path = os.path.join(folder, name)
                if difference := library_difference(read_header(reader, name), path):
                    difference = (
                        f"{path}: the safetensors library {difference}; convert it to a new file"
                    )
                    yield Problem(name, difference)


def library_difference(header: Header, path: str) -> str:
    """Returns in which way the library sees another file than `header`; empty if it does not."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:  # OSError: removed meanwhile, or no descriptor left
        return f"refuses it: {error}"
    theirs = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]
    ours = [(entry.name, entry.dtype, entry.shape) for entry in header.entries.values()]
    if others := sorted({name for name, *_ in set(ours) ^ set(theirs)}):
        return f"sees other tensors: {format_names(others, SHOWN_NAMES)}"
    # Types and shapes in one order give the bytes. Empty tensors may stand anywhere in it.
    orders = [[name for name, _, shape in seen if all(shape)] for seen in (ours, theirs)]
    is_equal = orders[0] == orders[1] and header.metadata == metadata
    return "" if is_equal else "sees another order or other metadata"


def _below(reader: Reader, folder: str, part: Catalog, progress: Progress) -> Findings:
    """Checks a part in a sub-folder, or in the folder itself. Problems name the sub-folder."""
    if not folder:
        return _of_catalog(reader, part, progress)
    findings = _of_catalog(Subfolder(reader, folder), part, progress)
    moved = [replace(problem, file=f"{folder}/{problem.file}") for problem in findings.problems]
    return replace(findings, problems=tuple(moved))


def _of_parts(found: Sequence[tuple[Catalog, Findings]]) -> Findings:
    checked = dict.fromkeys(f"{part.format}: {each.checked}" for part, each in found)
    return Findings(
        "; ".join(checked),
        sum(each.bytes_checked for _, each in found),
        tuple(problem for _, each in found for problem in each.problems),
        tuple(dict.fromkeys(note for _, each in found for note in each.notes)),
    )


def _strays(source: Source) -> tuple[str, ...]:
    """Returns notes that name each entry of a folder at which the check did not look."""
    catalog = source.catalog
    if catalog.format in FILES:
        return ()  # the checkpoint is one file; its folder may hold any other files
    own = {file.name for file in catalog.files}
    folders = sorted({name.rpartition("/")[0] for name in own if "/" in name})
    entries = source.store.entries()
    for folder in folders:
        entries += [f"{folder}/{name}" for name in source.store.entries(folder)]
    own |= {name for name in entries if any(note.startswith(f"{name} ") for note in catalog.notes)}
    strays = [name for name in entries if name not in own and name.rstrip("/") not in folders]
    if catalog.format in ("ckpt", "dcp"):
        foreign = [name for name in strays if not name.endswith("/")]
    else:
        # Such a folder also has a configuration and a tokenizer.
        foreign = [name for name in strays if name.endswith(SAFETENSORS)]
    others = [name for name in strays if name not in foreign]
    line = f"not checked: {format_names(others, SHOWN_NAMES)}"
    return (
        *(f"{name} is in the folder and not a part of the checkpoint" for name in foreign),
        *((line,) if others else ()),
    )


def _unreadable(url: str, error: FormatError, options: Options) -> Report:
    """Returns the report for a checkpoint whose description cannot be read."""
    checked = "only its description, which cannot be read"
    if is_file(url, options):
        name = split_url(url)[1]
        ending = name.rpartition(".")[2]
        kind = "ckpt" if name == MANIFEST else ending if ending in FILES else "torch"
        return Report(url=url, format=kind, checked=checked, problems=(Problem.of(error, name),))
    with open_store(url, options) as store:
        names = store.names()
        for name, kind in ((MANIFEST, "ckpt"), (DCP_METADATA, "dcp")):
            if name in names:
                problem = Problem.of(error, name)
                return Report(url=url, format=kind, checked=checked, problems=(problem,))
        folder_kind = folder_format(store.entries())
        kind = "huggingface" if folder_kind is None else folder_kind.name
        # The headers of all files are checked, although the first damaged one ended `open_source`.
        problems = _header_problems(store, names) or (Problem.of(error, url),)
        return Report(url=url, format=kind, checked=checked, problems=problems)


def _header_problems(store: Store, names: list[str]) -> tuple[Problem, ...]:
    problems = []
    for name in [name for name in names if name.endswith(SAFETENSORS)]:
        try:
            with name_folder(store.url, name):
                read_header(store, name)
        except FormatError as error:
            problems.append(Problem.of(error, name))
    return tuple(problems)


def check_zip(reader: Reader, catalog: Catalog, progress: Progress = None) -> Findings:
    """Checks a file of torch.save, TorchScript or numpy that could be opened."""
    (file,) = catalog.files
    zips = _RecordCheck(reader, progress, is_torch=catalog.format != "npz")
    owners: dict[int, str] = {}
    for name, record in catalog.tensors.items():
        try:
            for stored in record.pieces:
                owners.setdefault(stored.extent.offset, name)
        except FormatError as error:
            zips.problems.append(Problem.of(error, file.name, name))
    starts = sorted(owners)

    def owner(extent: Extent) -> str | None:
        """Returns the tensor that begins in a record: in a .npz file behind a header."""
        at = bisect_left(starts, extent.offset)
        inside = at < len(starts) and starts[at] < extent.offset + max(1, extent.nbytes)
        return owners[starts[at]] if inside else None

    zips.archive(file.name, 0, file.size, owner)
    return zips.findings("structure, and the CRC-32 of every record")


def check_counts(catalog: Catalog) -> Findings:
    """Checks a file of torch.save before 1.6: the number of elements before each storage."""
    (file,) = catalog.files
    problems: dict[str, Problem] = {}
    for name, record in catalog.tensors.items():
        try:
            for _ in record.pieces:
                pass
        except FormatError as error:
            problems.setdefault(str(error), Problem.of(error, file.name, name))
    return Findings(
        "structure, sizes, and the number of elements before each storage: this format has no "
        "checksums",
        problems=tuple(problems.values()),
    )


def check_dcp(reader: Reader, catalog: Catalog, progress: Progress = None) -> Findings:
    """Checks a DCP folder whose metadata could be read."""
    from formats.dcp.reader import Items  # start-up: most checkpoints have no pickle and no zip
    from formats.pickles.machine import load as load_pickle
    from formats.pickles.records import Metadata

    check = _RecordCheck(reader, progress)
    metadata = load_pickle(reader.read(DCP_METADATA, 0, reader.size(DCP_METADATA)), DCP_METADATA)
    # The catalog's reader has checked that the items tile their files.
    items = Items(reader, metadata.storage_data if isinstance(metadata, Metadata) else None)
    zips = {extent: name for name, extent in items.zips()}
    for item in sorted(zips, key=lambda item: (item.file, item.offset)):
        check.archive(item.file, item.offset, item.nbytes, partial(_name_of, zips[item]))
    damaged = {problem.tensor for problem in check.problems}
    for name, record in catalog.tensors.items():
        if name in damaged:
            continue
        try:
            for _ in record.pieces:  # opens each item and compares it with the metadata
                pass
        except FormatError as error:
            check.problems.append(Problem.of(error, DCP_METADATA, name))
    without = "; tensors in safetensors have none" if items.raw else ""
    return check.findings(
        f"structure, sizes, and the CRC-32 of every item{without}; {DCP_METADATA} has no checksum"
    )


def _name_of(name: str, extent: Extent) -> str:
    """Returns the owner of a record in an item's zip: the item."""
    return name


class _RecordCheck:
    """Collects the problems of one checkpoint's zips."""

    def __init__(self, reader: Reader, progress: Progress, *, is_torch: bool = True) -> None:
        self._is_torch = is_torch
        self.problems: list[Problem] = []
        self._reader = reader
        self._progress = progress
        self._checked_bytes = 0
        self._unchecked_records = 0
        self._sums = RecordSums("all")
        self._engine = RangeReader(reader, self._sums)

    def archive(
        self, file: str, offset: int, length: int, owner: Callable[[Extent], str | None]
    ) -> None:
        """Checks each record of a zip. `owner` returns the tensor of the record at an extent."""
        from formats.zip_records import Archive  # start-up, as above

        whole = Extent(file, offset, length)
        try:
            archive = Archive(self._reader, file, offset, length, is_torch=self._is_torch)
        except FormatError as error:
            self.problems.append(Problem.of(error, file, owner(whole)))
            return
        for name in archive.names:
            self._record(archive, name, owner, whole)

    def findings(self, checked: str) -> Findings:
        """Returns the result, in the form that all formats share."""
        unchecked = self._unchecked_records
        notes = (f"{unchecked} records were written without a checksum",) if unchecked else ()
        return Findings(checked, self._checked_bytes, tuple(self.problems), notes)

    def _inflate(self, place: Compressed) -> None:
        """Decodes a compressed record, which compares its CRC-32."""
        check("chunk_bytes", place.raw_bytes, f"{place.file}: the compressed {place.name}")
        stored = place.reader.read(place.file, place.offset, place.stored_bytes)
        place.decode(memoryview(stored))
        self._checked_bytes += place.stored_bytes
        if self._progress is not None:
            self._progress(place.stored_bytes)

    def _record(
        self, archive: Archive, name: str, owner: Callable[[Extent], str | None], whole: Extent
    ) -> None:
        try:
            extent = archive.place(name)
            if not isinstance(extent, Extent):
                self._inflate(extent)
                return
        except FormatError as error:
            self.problems.append(Problem.of(error, whole.file, owner(whole)))
            return
        if extent.crc32 is None and extent.nbytes:  # torch was set to compute no CRC-32
            self._unchecked_records += 1
            return
        tensor, lo, hi = owner(extent), extent.offset, extent.offset + extent.nbytes
        self._sums.open(tensor or name, extent)
        try:
            self._engine.finish(self._progress)
        except FormatError as error:
            self.problems.append(Problem(extent.file, str(error), tensor, lo, hi, kind=error.kind))
        else:
            self._checked_bytes += extent.nbytes


BLOCK_BYTES = 8 << 20
"""Bytes of one read."""
WORKERS = 4
"""Files that are checked at the same time. Reading and hashing release the GIL."""
SHOWN_TENSORS = 3
"""A message names at most so many tensors of a damaged file."""


def check_native(reader: Reader, progress: Progress = None, data: bytes | None = None) -> Findings:
    """Checks the checkpoint in a folder. The manifest must be intact.

    `data` is the manifest, if the folder does not have it yet.
    """
    data = read_manifest(reader) if data is None else data
    manifest = load(data, f"{reader.url}/{MANIFEST}")
    check = _NativeCheck(reader, manifest, progress)
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


class _NativeCheck:
    """The check of one checkpoint; `file` may run in several threads."""

    def __init__(self, reader: Reader, manifest: Manifest, progress: Progress) -> None:
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
            tensors = self._manifest.tensors.items()
            hurt = [name for name, stored in tensors if stored.layout.pieces(file.rank)]
            names = format_names(hurt, SHOWN_TENSORS) or "no tensor"
            message = f"{error} (it holds parts of {names})"
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
        for place, chunks in iter_borrowed(shard, where):
            try:
                name = self._shards.base_file(place, chunks[-1].hi - chunks[0].lo, where)
                problems += self._find_damage(name, chunks[-1].hi, chunks, block)
                nbytes += chunks[-1].hi - chunks[0].lo
            except FormatError as error:
                problems.append(Problem.of(error, file.name))
        return _CheckedFile(nbytes, problems)

    def tensors(self, lost: set[int]) -> Iterator[Problem]:
        """Yields a problem for each tensor that no file holds, except in files of `lost` ranks."""
        for name, stored in self._manifest.tensors.items():
            pieces = self._shards.pieces(name, stored)
            whole, numel = Box.whole(stored.shape), 0
            for rank in stored.layout.holders(whole):
                boxes = [piece.box for piece in stored.layout.pieces(rank)]
                numel += sum(box.numel for box in boxes)
                if rank in lost:
                    continue
                shard = self._shards.files.get(rank)
                try:
                    for _ in pieces.locate(boxes[0]):  # finds all pieces of the rank, or raises
                        pass
                except FormatError as error:
                    yield Problem.of(error, shard.name if shard else MANIFEST, name)
            if numel != whole.numel:
                yield Problem(
                    MANIFEST,
                    f"{self._reader.url}/{MANIFEST}: {name}: {numel} elements are stored, its "
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


def iter_borrowed(shard: Shard, where: str) -> Iterator[tuple[Place, list[_StoredChunk]]]:
    """Yields the chunks that an opened shard file borrows, as bytes of files of its bases.

    These are the chunks of each run, and for each delta chunk its root.
    """
    starts = first_chunks(shard.index, where)
    names, firsts = list(starts), list(starts.values())

    def tensor_of(chunk: int) -> str:
        return names[bisect_right(firsts, chunk) - 1]

    for run in shard.index.runs:
        tensor = tensor_of(run.first)
        records = shard.index.table[run.first * RECORD.size : run.end * RECORD.size]
        chunks, at = [], run.place.offset
        for digest, stored in RECORD.iter_unpack(records):
            chunks.append(_StoredChunk(tensor, at, at + stored, digest))
            at += stored
        yield run.place, chunks
    for chunk, root in shard.index.deltas.items():
        at = root.place.offset
        yield root.place, [_StoredChunk(tensor_of(chunk), at, at + root.stored_bytes, root.digest)]
