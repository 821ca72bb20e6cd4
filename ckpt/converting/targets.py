"""Decides what a conversion may overwrite, and puts the result there in one atomic step.

Rules:

1. Without `overwrite` a conversion replaces no file and hides no checkpoint of another format. A
   file or folder at the target stays, also if it appears during the conversion. A disk guarantees
   this. A server with conditional requests guarantees it for files of one request; for other files
   the conversion looks just before it writes (docs/stores.md).
2. With `overwrite` a file replaces a file and a folder replaces a folder. Of a link, only the
   link is replaced. Pipes and devices are never replaced.
3. A conversion never removes a checkpoint other than the replaced one: not the source or its base,
   not a file that the manifest beside it names, not other checkpoints in a folder.
4. A folder of a format other than ckpt's is written under another name beside the target, and
   renamed when it is complete. An object store cannot rename: there the target must be empty, and
   the conversion writes into it directly.
5. The replaced file or folder is removed last. A link is removed as a link. Once the result is at
   its place, a failure is a warning.

[Note: journal]
The files of a kept folder are written beside the target, into a folder with a fixed name, so that a
conversion goes on where an interrupted one stopped. A journal beside both has a line for each
complete file: its name, size and digest. Rules:

J1. The first line identifies the conversion: the source's files with their digests or times of
    change, all options that decide bytes, and the plan of each file. Another one begins anew.
J2. A file counts as complete if its line is on the disk and the file has the digest now. It is read
    for that, and not written again.
J3. One process at a time works on a folder: it holds a lock on the journal until the result is in
    its place. A journal that has lost its name by then is that of a conversion that has ended.
J4. A failure leaves the folder and its complete files. The result appears as a whole, as always.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO
from warnings import warn

import xxhash

from ckpt.errors import ExistsError, NotDurableWarning, StoreError
from ckpt.opening.sources import Source, checkpoints_below
from ckpt.stores.local_files import explained_on_disk
from ckpt.stores.local_store import PART_SUFFIX, RENAME_EXCHANGE, rename_with
from ckpt.stores.store import (
    Options,
    Store,
    check_writable,
    is_file,
    join_url,
    local_path,
    one_spelling,
    open_store,
    split_url,
)
from ckpt.transfer.bases import base_files_beside, check_unused, manifest_in
from ckpt.transfer.commit import check_no_link, check_no_other
from formats.catalog import FilePlan, Late, OutgoingTensor
from formats.detect import DCP_METADATA, OF_WEIGHTS, is_shard
from formats.errors import FormatError
from formats.native.manifest import MANIFEST, load, read_manifest
from formats.storage import FileWriter, Writer
from sharding.errors import format_names

SHOWN_NAMES = 5
_WEIGHTS = re.compile(
    rf"(.+?)(-[0-9]{{5,}}-of-[0-9]{{5,}})?({'|'.join(map(re.escape, OF_WEIGHTS))})(\.index\.json)?",
    re.DOTALL,
)
"""The names of files of weights: a whole file, one of several shards, or their index."""
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISREG, "a file"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def check_file(source: Source, target: str, options: Options, overwrite: bool) -> None:
    """Raises ExistsError unless a conversion may write one file to `target`."""
    _check_is_not_source(source, target)
    spelling = one_spelling(target)
    for file, owner in _files_of(source).items():
        if spelling == file:
            raise ExistsError(f"{target} is a file of {owner}; convert to another place")
    path = local_path(target)
    if path is not None:
        kind = _kind(target, Path(path))
        if kind is None:
            return
        if kind == "a folder":
            raise ExistsError(
                f"{target} is a folder, and this format is one file; convert to a file in it"
            )
        if kind != "a file":
            raise ExistsError(f"{target} is {kind}, and is not replaced; convert to another place")
    elif not is_file(target, options):
        return
    if not overwrite:
        raise ExistsError(f"{target} exists; pass overwrite=True to replace it")
    _check_no_part_of_another(target, options)


def check_native(source: Source, target: str, options: Options, overwrite: bool) -> None:
    """Raises ExistsError unless a conversion may write a native checkpoint to `target`."""
    _check_is_not_source(source, target)
    path = local_path(target)
    kind = None if path is None else _kind(target, Path(path))
    if kind not in (None, "a folder"):
        raise ExistsError(
            f"{target} is {kind}, and ckpt's own format is a folder; choose another place, or a "
            "format that is a file (to=)"
        )
    with open_store(target, options) as store:
        check_writable(store)
        if not store.exists(MANIFEST):
            if not overwrite:
                entries = store.entries()
                check_no_other(store.url, entries)
                _check_is_no_run(store, entries)
            return
        if not overwrite:
            raise ExistsError(f"{target} holds a checkpoint; pass overwrite=True to replace it")
        check_no_link(target)
        check_unused(target, options)
        data = read_manifest(store)
    spelling = one_spelling(target)
    for file in _files_of(source):
        folder, name = split_url(file)
        if folder == spelling and _names(data, name):
            raise ExistsError(
                f"{target} holds {name}, a file of the source, which would be removed with the "
                "replaced checkpoint; convert to another place"
            )


def _check_is_no_run(store: Store, entries: Sequence[str]) -> None:
    """Raises ExistsError if a folder has checkpoints of ckpt's own format in its folders."""
    below = checkpoints_below(store, entries, only_native=True)
    if below is not None and below.is_in(store.url):
        raise ExistsError(
            f"{store.url} is a folder of checkpoints, such as {below.checkpoint}, and a checkpoint "
            "beside these folders would hide them; convert to a new folder in it, or pass "
            "overwrite=True to hide them"
        )


def check_folder(source: Source, target: str, options: Options, overwrite: bool) -> None:
    """Raises ExistsError unless a conversion may write a folder of another format to `target`."""
    _check_is_not_source(source, target)
    spelling = one_spelling(target)
    if any(
        file.startswith(f"{spelling}/") for file in (one_spelling(source.url), *_files_of(source))
    ):
        raise ExistsError(
            f"{target} holds the source {source.url}, or a part of it, and would be replaced as a "
            "whole; convert to another place"
        )
    check_replaceable(target, options, overwrite)


def check_replaceable(target: str, options: Options, overwrite: bool) -> None:
    """Raises ExistsError unless a folder of another format may replace `target`."""
    path = local_path(target)
    if path is None:
        with open_store(target, options) as store:
            if store.names() or store.folders():
                raise ExistsError(f"{target} is not empty; choose another folder of the bucket")
        return
    local = folder_path(path)
    kind = _kind(target, local)
    if kind is None:
        return
    if kind != "a folder":
        raise ExistsError(f"{target} is {kind}, and this format is a folder; choose another place")
    if os.path.ismount(local):
        raise ExistsError(f"{target} is a mount point; convert to a folder in it")
    if local.is_symlink():
        if not overwrite:
            raise ExistsError(
                f"{target} is a link to a folder; give that folder itself, or pass overwrite=True "
                "to replace the link"
            )
        return  # the folder behind the link stays
    if not overwrite and any(local.iterdir()):
        raise ExistsError(f"{target} is not empty; pass overwrite=True to replace it")
    if (local / MANIFEST).is_file():
        check_unused(target, options)
    _check_holds_no_other(target, local)


def folder_path(path: str) -> Path:
    """Returns the path of a folder with a name that can be renamed, unlike `.` and `..`.

    >>> folder_path("runs/hf/").as_posix(), folder_path("/runs/..").as_posix()
    ('runs/hf', '/')
    """
    folder = Path(path)
    return Path(os.path.realpath(path)) if folder.name in ("", "..") else folder


def checkpoints_among(names: Iterable[str]) -> tuple[str, ...]:
    """Returns one file name of each checkpoint that the files of a folder seem to form.

    >>> checkpoints_among(["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
    ('model-00001-of-00002.safetensors',)
    >>> checkpoints_among(["config.json", "manifest.json", "optimizer.pt"])
    ('manifest.json', 'optimizer.pt')
    """
    first_names: dict[object, str] = {}
    for name in sorted(names):
        weights = _WEIGHTS.fullmatch(name)
        if name == MANIFEST or is_shard(name):
            first_names.setdefault(MANIFEST, name)
        elif name == DCP_METADATA or name.endswith(".distcp"):
            first_names.setdefault(DCP_METADATA, name)
        elif weights is not None:
            first_names.setdefault((weights[1], weights[3]), name)
    return tuple(first_names.values())


def _check_holds_no_other(target: str, local: Path) -> None:
    """Raises ExistsError if a folder holds several checkpoints (rule 3)."""
    others: list[str] = []
    for folder, _, names in os.walk(local, onerror=_raise):
        checkpoints = checkpoints_among(names)
        is_own = Path(folder) == local
        if not is_own or len(checkpoints) > 1:
            others += [os.path.relpath(os.path.join(folder, name), local) for name in checkpoints]
    if others:
        raise ExistsError(
            f"{target} holds {format_names(others, SHOWN_NAMES)}, more than the one "
            "checkpoint that "
            "overwrite replaces, and would be removed as a whole; move the files away, or convert "
            "to another place",
            names=others,
        )


def _raise(error: OSError) -> None:
    raise error


def _check_is_not_source(source: Source, target: str) -> None:
    own = {one_spelling(source.url)}
    if source.catalog.format == "ckpt":  # by its manifest, perhaps
        own.add(one_spelling(source.store.url))
    if one_spelling(target) in own:
        raise ExistsError(f"{target} is the source itself; convert to another place")


def _files_of(source: Source) -> dict[str, str]:
    """Returns the files that the source consists of, in one spelling, and the owner of each."""
    folder, catalog = source.store.url, source.catalog
    owners = {one_spelling(join_url(folder, file.name)): "the source" for file in catalog.files}
    if catalog.bases:
        beside = split_url(one_spelling(folder))[0]
        for base in load(read_manifest(source.store)).bases:
            if base is not None:
                lender = join_url(beside, base.folder)
                for file in base.files:
                    place = one_spelling(join_url(lender, file.name))
                    owners[place] = f"{lender}, which the source borrows from"
    return owners


def _check_no_part_of_another(target: str, options: Options) -> None:
    """Raises ExistsError if a file belongs to a native checkpoint, or to a base of one (rule 3)."""
    folder, name = split_url(target)
    folder = one_spelling(folder)
    with open_store(folder, options) as store:
        data = manifest_in(store)
    if data and (name == MANIFEST or _names(data, name)):
        raise ExistsError(
            f"{target} belongs to the checkpoint {folder}, whose manifest names it; convert to "
            "another place, or replace that checkpoint as a whole: to='ckpt'"
        )
    if is_shard(name):
        needed, own = base_files_beside(folder, options)
        if needed.cover(own, name):
            raise ExistsError(
                f"a checkpoint beside {folder} borrows from {target}; convert to another place"
            )


def _names(manifest: bytes, name: str) -> bool:
    """Whether a manifest names a file beside it. In a damaged one, any mention of it counts."""
    try:
        return any(file.name == name for file in load(manifest).files)
    except FormatError:
        return json.dumps(name).encode() in manifest


def _kind(target: str, path: Path) -> str | None:
    """Returns the kind of file at a path, behind links; None if there is none.

    Raises:
        ExistsError: the path is a broken link, or lies in a file.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise ExistsError(
            f"{target}: a part of this path is a file; convert to another place"
        ) from error
    if stat.S_ISLNK(status.st_mode):
        try:
            status = path.stat()
        except OSError as error:
            raise ExistsError(
                f"{target} is a broken link, to {os.readlink(path)}; remove it, or convert to "
                "another place"
            ) from error
    return next((kind for test, kind in _KINDS if test(status.st_mode)), "a device")


_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""The errors of a rename onto a path that is not an empty folder."""


class NewFiles:
    """A store that creates files and replaces none (rule 1)."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self._store = store

    def create(self, name: str) -> AbstractContextManager[FileWriter]:
        """Creates a new file. Raises ExistsError if the file exists."""
        return self._store.create(name, replace=False)


@contextmanager
def file_writer(target: str, store: Store, overwrite: bool) -> Iterator[Writer]:
    """Returns a writer for one file, `target` (rule 1).

    Raises:
        ExistsError: without `overwrite`, the file has appeared meanwhile.
    """
    if overwrite:
        yield store
    else:
        with _name_target(target):
            yield NewFiles(store)
    _is_durable(store, target)


def _is_durable(store: Store, target: str) -> bool:
    """Makes the names in a folder durable. Returns whether it could, or warns of a result there."""
    try:
        store.flush()
    except StoreError as error:
        message = f"{target} is complete, but a loss of power may undo that: {error}"
        warn(NotDurableWarning(message), stacklevel=3)
        return False
    return True


@contextmanager
def folder_writer(
    target: str, options: Options, overwrite: bool, kept: bool = False
) -> Iterator[Writer]:
    """Returns a writer for a folder that becomes `target` if the block succeeds (rule 2).

    With `kept`, the folder has a fixed name until then, and stays if the block fails. Only a folder
    on a disk can be kept.

    Raises:
        ExistsError: a file or folder has appeared at `target` meanwhile that may not be replaced.
    """
    path = local_path(target)
    if path is None:
        with open_store(target, options) as store, _name_target(target):
            yield NewFiles(store)
        return
    local = folder_path(path)
    with explained_on_disk("creating the folder for", target):
        local.parent.mkdir(parents=True, exist_ok=True)
    fresh = partial_folder(path) if kept else _beside(local, secrets.token_hex(4))
    old = fresh.with_suffix(".old")
    try:
        with open_store(str(fresh)) as store:
            yield store
            with explained_on_disk("creating", target):
                fresh.mkdir(exist_ok=True)  # without any file the result is an empty folder
            store.flush()
        with explained_on_disk("naming", target):
            if not _take_place(fresh, local):
                if not overwrite:
                    raise ExistsError(_has_come(target))
                check_replaceable(target, options, overwrite)
                _replace(fresh, local, old)
        with open_store(str(local.parent)) as parent:
            if _is_durable(parent, target):
                for rest in (fresh, old):
                    with suppress(OSError):  # left-overs, for `ckpt gc`
                        remove(rest)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(local):
            old.rename(local)
        if not kept:
            with suppress(OSError):  # the first error tells more
                remove(fresh)
        raise


def partial_folder(path: str) -> Path:
    """Returns the folder with a fixed name, whose files `folder_writer` keeps for a later call."""
    return _beside(folder_path(path), "resumed")


def _beside(local: Path, attempt: str) -> Path:
    return local.parent / f".{local.name}.{attempt}{PART_SUFFIX}"


@contextmanager
def _name_target(target: str) -> Iterator[None]:
    """Turns the ExistsError of a file into that of the conversion."""
    try:
        yield
    except ExistsError as error:
        raise ExistsError(_has_come(target)) from error


def _has_come(target: str) -> str:
    return (
        f"{target}: a file or folder has appeared there since the conversion began, and was not "
        "replaced: convert to another place, or pass overwrite=True to replace it"
    )


def _take_place(fresh: Path, local: Path) -> bool:
    """Renames a folder. Returns whether the name was free, or that of an empty folder."""
    written = fresh.stat()
    try:
        fresh.rename(local)
    except OSError as error:
        with suppress(OSError):  # a network file system may have done it without an answer
            if os.path.samestat(local.lstat(), written):
                return True
        if error.errno not in _IN_THE_WAY:
            raise
        return False
    return True


def _replace(fresh: Path, local: Path, old: Path) -> None:
    """Renames a folder to an existing name. The replaced one is then called `fresh` or `old`."""
    # Two renames leave a moment without a folder of the name.
    if not rename_with(RENAME_EXCHANGE, fresh, local):
        local.rename(old)
        fresh.rename(local)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


READ_BYTES = 1 << 20
_Content = tuple[int, str]
"""The size and the digest of a file."""


def identity_of(sources: Sequence[Source], options: object, plans: Sequence[FilePlan]) -> str:
    """Returns a digest of a conversion (rule J1). `options` has a `repr` with all of its values."""
    digest = xxhash.xxh3_128(repr(options).encode())
    for source in sources:
        digest.update(f"{source.url} {source.catalog.format}".encode())
        for file in source.catalog.files:
            changed = file.digest or source.store.modified(file.name)
            digest.update(repr((file.name, file.size, changed)).encode())
    for plan in plans:
        digest.update(plan.name.encode())
        for part in plan.parts:
            if isinstance(part, bytes):
                digest.update(part)
            elif isinstance(part, OutgoingTensor):
                digest.update(repr((part.name, part.dtype.name, part.shape)).encode())
            elif isinstance(part, Late):
                digest.update(repr(part.nbytes).encode())
    return digest.hexdigest()


class Journal:
    """The writer of a folder that notes its complete files. See [Note: journal]."""

    def __init__(self, writer: Writer, file: IO[str], done: Mapping[str, _Content]) -> None:
        self.url, self._writer, self._file = writer.url, writer, file
        self.done = done
        """The complete files of an earlier attempt."""

    @classmethod
    @contextmanager
    def open(
        cls, target: str, options: Options, overwrite: bool, identity: str
    ) -> Iterator[Journal]:
        """Opens or begins the journal of a folder, and removes files that are not complete.

        The folder takes its place, and the journal is gone, if the block succeeds.

        Raises:
            ExistsError: another process converts into the folder, or as `folder_writer`.
        """
        folder = partial_folder(local_path(target) or "")
        path = folder.with_suffix(".journal")
        with ExitStack() as stack:
            with explained_on_disk("opening the journal of this conversion,", str(path)):
                folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("a+", encoding="utf-8"))
                if not _is_locked(file) or not _has_name(file, path):
                    raise ExistsError(
                        f"{folder}: another process resumes this conversion; wait until that "
                        "process ends, or stop it"
                    )
                done = _complete(folder, file, identity)
                complete = {name.partition("/")[0] for name in done}
                for other in folder.iterdir():
                    if other.name not in complete:
                        remove(other)
                file.seek(0)
                file.truncate()
            with folder_writer(target, options, overwrite, kept=True) as writer:
                journal = cls(writer, file, done)
                journal._append([identity])
                for name, content in done.items():
                    journal._append([name, *content])
                yield journal
            with suppress(OSError):  # the result is at its place
                path.unlink()

    def incomplete(self, plans: Sequence[FilePlan]) -> list[FilePlan]:
        return [plan for plan in plans if plan.name not in self.done]

    @contextmanager
    def create(self, name: str) -> Iterator[FileWriter]:
        """Creates a file by the writer; the journal names it once it is complete."""
        with self._writer.create(name) as file:
            yield file
        path = Path(self.url, name)
        with explained_on_disk("reading", str(path)):
            content = _size_and_digest(path)
        self._append([name, *content])

    def _append(self, line: list[object]) -> None:
        with explained_on_disk("writing", self._file.name):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _has_name(file: IO[str], path: Path) -> bool:
    """Whether an open file is still that of a path (rule J3)."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _complete(folder: Path, file: IO[str], identity: str) -> dict[str, _Content]:
    """Returns the files that the journal names and that have their digests (rule J2)."""
    file.seek(0)
    lines = [_parse(line) for line in file.read().splitlines()]
    if not lines or lines[0] != [identity]:
        return {}
    complete: dict[str, _Content] = {}
    for line in lines[1:]:
        if not isinstance(line, list) or len(line) != 3 or os.sep in str(line[0]):
            break  # the end of an append that was cut
        path = folder / str(line[0])
        content = _size_and_digest(path) if path.is_file() else None
        if content is not None and [*content] == line[1:]:
            complete[path.name] = content
    return complete


def _parse(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _size_and_digest(path: Path) -> _Content:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
            size += len(data)
    return size, digest.hexdigest()
