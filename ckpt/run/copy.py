"""Copies checkpoints of ckpt's own format as they are, one or all of a run, to another place.

Rules:

1. A copy has the same files with the same bytes. Its manifest is written last, after all bytes were
   read back and compared with their checksums.
2. A checkpoint that another one borrows from is copied before it.
3. A copy that was interrupted is repeated: checkpoints that are there with the same manifest stay,
   and so do complete files of an unfinished copy. Files that are half as old as left-overs are
   copied again: `ckpt.gc` may be about to remove them.
4. Nothing is replaced. Another checkpoint at a target is an error before its bytes are read.
5. Pins are copied. The owner of a run and its index are not: the copy belongs to no job yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt.checking.verify import check_native
from ckpt.errors import ArgumentError, CkptError, ExistsError, NotACheckpointError, StoreError
from ckpt.loading.newest import list_checkpoints
from ckpt.opening.sources import advice_at
from ckpt.plan.copy_plan import CopySource
from ckpt.stores.store import Options, Store, check_writable, join_url, one_spelling, open_store
from ckpt.transfer.commit import GRACE_SECONDS, check_no_other
from ckpt.transfer.copy_files import FileCopier
from ckpt.transfer.facts import is_pin
from formats.catalog import Extent, FilePlan, OutgoingTensor, PieceTable, StoredPiece, TensorRecord
from formats.dtypes import dtype_named
from formats.errors import CorruptError
from formats.native.manifest import MANIFEST, Manifest, ShardFile, load, read_manifest
from sharding.errors import without_secrets
from sharding.layout import Box, Piece

PIN_BYTES = 1 << 16
"""The most bytes of a file that pins a step."""


@dataclass(frozen=True, slots=True)
class Copied:
    """One checkpoint of a copy."""

    name: str
    """Its folder in the run; empty for a single checkpoint."""
    url: str
    """The place of the copy."""
    files: int
    nbytes: int
    """The size of its files."""
    copied_bytes: int
    """The bytes that this call has copied; 0 if the checkpoint was there."""


def copy(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    progress: Callable[[int], None] | None = None,
    storage_options: Options = None,
    dst_storage_options: Options = None,
) -> Iterator[Copied]:
    """Copies a checkpoint, or all of a folder, and yields each of them when its copy is whole.

    One process calls this. `progress` is called with numbers of bytes as they are copied.

    Raises:
        NotACheckpointError: there is neither a checkpoint nor a folder of checkpoints at `src`.
        ExistsError: another checkpoint is at a target.
        ArgumentError: a single checkpoint borrows from another one, or `dst` is `src`.
        CorruptError: bytes of a checkpoint are not as they were written; its copy does not appear.
        StoreError: a disk or object store failed; a repeated call goes on.
    """
    source, target = os.fspath(src), os.fspath(dst)
    dst_options = storage_options if dst_storage_options is None else dst_storage_options
    if one_spelling(source) == one_spelling(target):
        raise ArgumentError(
            f"{without_secrets(source)}: this is source and target; give another target"
        )
    places = _Places(source, target, storage_options, dst_options, progress)
    with open_store(source, storage_options) as store:
        is_one = store.exists(MANIFEST)
    if is_one:
        yield places.copy("")
        return
    names = [
        checkpoint.name for checkpoint in reversed(list_checkpoints(source, storage_options).newest)
    ]
    if not names:
        with open_store(source, storage_options) as store:
            advice = advice_at(store, store.entries())
        raise NotACheckpointError(f"{store.url}: no checkpoint of ckpt's own format{advice}")
    for name in places.bases_first(names):
        yield places.copy(name)
    places.copy_pins()


def nbytes_of(src: str, options: Options) -> int | None:
    """Returns the size of the files of all checkpoints to copy; None if it cannot be told."""
    total = 0
    try:
        with open_store(src, options) as store:
            names = [""] if store.exists(MANIFEST) else store.folders()
        for name in names:
            with open_store(join_url(src, name) if name else src, options) as store:
                if MANIFEST in (sizes := store.sizes()):
                    total += sum(sizes.values())
    except (CkptError, OSError):
        return None
    return total


@dataclass(frozen=True, slots=True)
class _Places:
    """The folder that is copied, and that of the copy."""

    source: str
    target: str
    options: Options
    target_options: Options
    progress: Callable[[int], None] | None

    def bases_first(self, names: Sequence[str]) -> Iterator[str]:
        """Yields the names in their order, each after those that it borrows from."""
        wanted, done = set(names), set[str]()
        for first in names:
            waiting = [first]
            while waiting:
                name = waiting[-1]
                with open_store(join_url(self.source, name), self.options) as store:
                    bases = _bases(load(read_manifest(store), f"{store.url}/{MANIFEST}"))
                before = [base for base in bases if base in wanted and base not in done]
                if before and not set(before) & set(waiting):
                    waiting += before
                    continue
                waiting.pop()
                if name not in done:
                    done.add(name)
                    yield name

    def copy(self, name: str) -> Copied:
        """Copies one checkpoint of the folder, or the one that the folder is."""
        here = join_url(self.source, name) if name else self.source
        place = join_url(self.target, name) if name else self.target
        with open_store(here, self.options) as source, open_store(place, self.target_options) as to:
            check_writable(to)
            data = read_manifest(source)
            manifest = load(data, f"{source.url}/{MANIFEST}")
            if not name and _bases(manifest):
                raise ArgumentError(
                    f"{source.url} borrows chunks from {', '.join(_bases(manifest))} beside it and "
                    "cannot be read alone: copy the folder of both, or convert it"
                )
            nbytes = len(data) + sum(file.size for file in manifest.files)
            result = Copied(name, place, len(manifest.files), nbytes, 0)
            if to.exists(MANIFEST):
                if read_manifest(to) == data:
                    return result
                raise ExistsError(f"{to.url} holds another checkpoint; copy to another place")
            copied = _copy(source, to, data, manifest, self.progress)
        return Copied(name, place, result.files, nbytes, copied)

    def copy_pins(self) -> None:
        """Copies the files that pin steps."""
        with (
            open_store(self.source, self.options) as source,
            open_store(self.target, self.target_options) as target,
        ):
            known = set(target.names())
            for name in source.names():
                if is_pin(name) and name not in known:
                    target.commit(name, source.read_whole(name, PIN_BYTES), True)


def _bases(manifest: Manifest) -> list[str]:
    return [base.folder for base in manifest.bases if base is not None]


def _copy(
    source: Store,
    target: Store,
    data: bytes,
    manifest: Manifest,
    progress: Callable[[int], None] | None,
) -> int:
    """Copies the files of a checkpoint, checks them and writes the manifest; returns the bytes."""
    began, sizes = time.monotonic(), target.sizes()
    check_no_other(target.url, sizes)
    arrived = target.arrivals() if sizes else {}
    missing = [file for file in manifest.files if not _is_whole(file, sizes, arrived)]
    records = {file.name: _record(file) for file in missing}
    plans = [
        FilePlan(name, [OutgoingTensor(name, record.shape, record.dtype)])
        for name, record in records.items()
    ]

    def source_of(name: str) -> CopySource:
        return CopySource(records[name], records[name].dtype)

    FileCopier(source, source_of, False, progress).write(target, plans)
    problems = check_native(target, data=data).problems
    if problems:
        names = [file.name for file in manifest.files if file.name in target.sizes()]
        target.delete_all(names)
        raise CorruptError(
            f"{problems[0].message}; the copy of {source.url} was not committed, and its files are "
            "removed: `ckpt verify` of the source tells whether the damage is there"
        )
    if time.monotonic() - began > GRACE_SECONDS / 2:
        raise StoreError(
            f"{target.url}: the copy took more than {GRACE_SECONDS / 7200:g} hours, after which "
            "its files may count as left-overs; nothing was committed: copy it again"
        )
    target.commit(MANIFEST, data, False)
    return sum(file.size for file in missing) + len(data)


def _is_whole(file: ShardFile, sizes: Mapping[str, int], arrived: Mapping[str, float]) -> bool:
    """Whether an unfinished copy has left this file, and no `ckpt.gc` removes it soon."""
    is_young = time.time() - arrived.get(file.name, 0.0) < GRACE_SECONDS / 2
    return sizes.get(file.name) == file.size and is_young


def _record(file: ShardFile) -> TensorRecord:
    """Returns a file as a tensor of bytes, which the planned copies read."""
    piece = Piece(Box((0,), (file.size,)), 0, (1,))
    table = PieceTable([StoredPiece(piece, Extent(file.name, 0, file.size))])
    return TensorRecord(file.name, (file.size,), dtype_named("U8", file.name), table)
