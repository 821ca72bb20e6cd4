"""Conversions to folders that go on where an interrupted one stopped.

The files of a folder are written beside the target, into a folder with a fixed name. A journal
beside both has a line for each complete file: its name, size and digest. Rules:

1. The first line identifies the conversion: the source's files with their digests or times of
   change, all options that decide bytes, and the plan of each file. Another conversion begins anew.
2. A file counts as complete if its line is on the disk and the file has the digest now. It is read
   for that, and not written again.
3. One process at a time works on a folder: it holds a lock on the journal until the result is in
   its place. A journal that has lost its name by then is that of a conversion that has ended.
4. A failure leaves the folder and its complete files. The result appears as a whole, as always.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import xxhash

from ckpt.converting.targets import remove
from ckpt.errors import ExistsError
from ckpt.opening.sources import Source
from ckpt.stores.local_files import explained_on_disk
from formats.catalog import FilePlan, Late, OutgoingTensor
from formats.storage import FileWriter, Writer

READ_BYTES = 1 << 20
_Content = tuple[int, str]
"""The size and the digest of a file."""


def identity_of(sources: Sequence[Source], options: object, plans: Sequence[FilePlan]) -> str:
    """Returns a digest of a conversion (rule 1). `options` has a `repr` with all of its values."""
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
    """The complete files of a folder. See the rules above."""

    def __init__(self, folder: Path, file: IO[str], done: Mapping[str, _Content]) -> None:
        self._folder = folder
        self._file = file
        self.done = done
        """The complete files of an earlier attempt."""

    @classmethod
    @contextmanager
    def open(cls, folder: Path, identity: str) -> Iterator[Journal]:
        """Opens or begins the journal of a folder, and removes files that are not complete.

        The folder takes its place within the block. The journal is gone if the block succeeds.

        Raises:
            ExistsError: another process converts into the folder.
        """
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
                kept = {name.partition("/")[0] for name in done}
                for other in folder.iterdir():
                    if other.name not in kept:
                        remove(other)
                file.seek(0)
                file.truncate()
            journal = cls(folder, file, done)
            journal._append([identity])
            for name, content in done.items():
                journal._append([name, *content])
            yield journal
            with suppress(OSError):  # the result is at its place
                path.unlink()

    def writer(self, writer: Writer) -> Writer:
        """Returns a writer whose complete files get a line in the journal."""
        return _JournalWriter(self, writer)

    def incomplete(self, plans: Sequence[FilePlan]) -> list[FilePlan]:
        """Returns the files that are not complete."""
        return [plan for plan in plans if plan.name not in self.done]

    def add(self, name: str) -> None:
        """Notes a file that is complete and on the disk."""
        with explained_on_disk("reading", str(self._folder / name)):
            content = _size_and_digest(self._folder / name)
        self._append([name, *content])

    def _append(self, line: list[object]) -> None:
        with explained_on_disk("writing", self._file.name):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


class _JournalWriter:
    """A folder's writer that tells the journal of complete files."""

    def __init__(self, journal: Journal, writer: Writer) -> None:
        self.url = writer.url
        self._journal = journal
        self._writer = writer

    @contextmanager
    def create(self, name: str) -> Iterator[FileWriter]:
        """Creates a file; the journal names it once it is complete."""
        with self._writer.create(name) as file:
            yield file
        self._journal.add(name)


def _is_locked(file: IO[str]) -> bool:
    """Locks a file, and returns whether it could."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _has_name(file: IO[str], path: Path) -> bool:
    """Whether an open file is still that of a path (rule 3)."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _complete(folder: Path, file: IO[str], identity: str) -> dict[str, _Content]:
    """Returns the files that the journal names and that have their digests (rule 2)."""
    file.seek(0)
    lines = [_parse(line) for line in file.read().splitlines()]
    if not lines or lines[0] != [identity]:
        return {}
    found: dict[str, _Content] = {}
    for line in lines[1:]:
        if not isinstance(line, list) or len(line) != 3 or os.sep in str(line[0]):
            break  # the end of an append that was cut
        path = folder / str(line[0])
        content = _size_and_digest(path) if path.is_file() else None
        if content is not None and [*content] == line[1:]:
            found[path.name] = content
    return found


def _parse(line: str) -> object:
    try:
        found: object = json.loads(line)
    except ValueError:
        return None
    return found


def _size_and_digest(path: Path) -> _Content:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
            size += len(data)
    return size, digest.hexdigest()
