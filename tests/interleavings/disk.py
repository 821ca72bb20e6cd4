"""A disk in memory, behind the system calls of `os`, each of which is a call of the scheduler.

Paths below `ROOT` are on this disk, all others on the real one: so the product's own store of local
folders runs on it, down to its system calls. Rules:

1. `link`, `rename`, `mkdir`, `unlink` and `open` with O_EXCL are atomic. A descriptor stays with
   its file, whatever becomes of the name.
2. A listing is no snapshot. Names come one by one, in an order of the disk's own; a name that
   appears behind the place that the listing has reached is missed, as POSIX allows.
3. Reads and writes by a descriptor are no calls: a file gets its name once it is complete.

`test_the_disk_in_memory_answers_as_a_real_one` compares it with a real disk.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from zlib import crc32

from tests.interleavings.scheduler import Call

ROOT = "/interleaved"
_FIRST_DESCRIPTOR = 1 << 24
_numbers = count(_FIRST_DESCRIPTOR)
"""Numbers of descriptors, of all disks: a store that is collected late closes none of another."""


@dataclass(eq=False)
class Node:
    """A file, a folder or a link."""

    kind: int
    number: int
    changed: float
    data: bytearray = field(default_factory=bytearray)
    target: str = ""
    links: int = 1


class Entry:
    """As `os.DirEntry`."""

    def __init__(self, disk: Disk, path: str, node: Node) -> None:
        self.path, self.name = path, path.rpartition("/")[2]
        self._disk, self._node = disk, node

    def _is(self, kind: int) -> bool:
        if self._node.kind != stat.S_IFLNK:
            return self._node.kind == kind
        try:
            return stat.S_IFMT(self._disk.stat(self.path).st_mode) == kind
        except FileNotFoundError:
            return False

    def is_file(self) -> bool:
        return self._is(stat.S_IFREG)

    def is_dir(self) -> bool:
        return self._is(stat.S_IFDIR)

    def stat(self) -> os.stat_result:
        return self._disk.stat(self.path)


class Listing:
    """The open listing of a folder (rule 2)."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk, self._folder = disk, folder
        self._reached: tuple[int, str] = (-1, "")

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __iter__(self) -> Iterator[Entry]:
        while True:
            self._disk.call("lists", self._folder, {f"{self._folder}/"})
            later = [
                (crc32(f"{self._disk.seed}{path}".encode()), path)
                for path in self._disk.nodes
                if path.rpartition("/")[0] == self._folder
            ]
            later = [each for each in later if each > self._reached]
            if not later:
                return
            self._reached = min(later)
            path = self._reached[1]
            yield Entry(self._disk, path, self._disk.nodes[path])


class Disk:
    """The state of the disk, and its system calls."""

    def __init__(
        self,
        before: Callable[[Call], None],
        changed: Callable[[str, str], None],
        clock: Callable[[], float],
        seed: int = 0,
    ) -> None:
        """`before` waits for a call's turn; `changed` hears of each change, with its path."""
        self.nodes: dict[str, Node] = {}
        self.seed = seed
        """Decides the order of listings."""
        self._before, self._changed, self._clock = before, changed, clock
        self._open: dict[int, tuple[str, Node]] = {}
        self._inodes = count(1)
        self.nodes[ROOT] = self._new(stat.S_IFDIR)

    def files(self) -> dict[str, bytes]:
        """The contents of the files by path."""
        found = self.nodes.items()
        return {path: bytes(one.data) for path, one in found if one.kind == stat.S_IFREG}

    def call(
        self, name: str, place: str, reads: set[str] | None = None, writes: set[str] | None = None
    ) -> None:
        """Waits until the call may be made."""
        self._before(
            Call(name, place[len(ROOT) + 1 :], frozenset(reads or ()), frozenset(writes or ()))
        )

    def _new(self, kind: int) -> Node:
        return Node(kind, next(self._inodes), self._clock())

    def _node(self, path: str, follow: bool = True) -> tuple[str, Node]:
        """The path without links, and the node; raises as the system does."""
        for _ in range(8):
            folder = path.rpartition("/")[0]
            if folder != ROOT and path != ROOT:
                name = path.rpartition("/")[2]
                folder, above = self._node(folder)
                path = f"{folder}/{name}" if name != ".." else folder.rpartition("/")[0]
                if above.kind != stat.S_IFDIR:
                    raise _error(errno.ENOTDIR, path)
            found = self.nodes.get(path)
            if found is None:
                raise _error(errno.ENOENT, path)
            if found.kind != stat.S_IFLNK or not follow:
                return path, found
            path = os.path.normpath(os.path.join(path.rpartition("/")[0], found.target))
        raise _error(errno.ELOOP, path)

    def _place(self, path: str) -> str:
        """The path of a name that may be free, without links above it."""
        folder, _, name = path.rpartition("/")
        found, node = self._node(folder)
        if node.kind != stat.S_IFDIR:
            raise _error(errno.ENOTDIR, path)
        return f"{found}/{name}"

    def _reading(self, name: str, path: str) -> None:
        path = os.path.normpath(path) if "/../" in path else path
        self.call(name, path, {path, path.rpartition("/")[0]})

    def _changing(self, name: str, path: str, *more: str) -> None:
        """A call that makes or removes names."""
        folder = path.rpartition("/")[0]
        self.call(name, path, {folder}, {path, f"{folder}/", *more})

    def _put(self, verb: str, path: str, node: Node) -> None:
        node.changed = self._clock()
        self.nodes[path] = node
        self._changed(verb, path)

    def _drop(self, verb: str, path: str) -> None:
        node = self.nodes.pop(path)
        node.links -= 1
        node.changed = self._clock()
        self._changed(verb, path)

    # Calls by path.

    def stat(self, path: str, follow_symlinks: bool = True) -> os.stat_result:
        self._reading("stat", path)
        return self._status(self._node(path, follow_symlinks)[1])

    def lstat(self, path: str) -> os.stat_result:
        return self.stat(path, follow_symlinks=False)

    def readlink(self, path: str) -> str:
        self._reading("readlink", path)
        _, node = self._node(path, follow=False)
        if node.kind != stat.S_IFLNK:
            raise _error(errno.EINVAL, path)
        return node.target

    def scandir(self, path: str) -> Listing:
        self._reading("opens", path)
        found, node = self._node(path)
        if node.kind != stat.S_IFDIR:
            raise _error(errno.ENOTDIR, path)
        return Listing(self, found)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._changing("mkdir", path)
        path = self._place(path)
        if path in self.nodes:
            raise _error(errno.EEXIST, path)
        self._put("makes", path, self._new(stat.S_IFDIR))

    def rmdir(self, path: str) -> None:
        self._changing("rmdir", path, f"{path}/")
        path, node = self._node(path, follow=False)
        if node.kind != stat.S_IFDIR:
            raise _error(errno.ENOTDIR, path)
        if any(one.startswith(f"{path}/") for one in self.nodes):
            raise _error(errno.ENOTEMPTY, path)
        self._drop("removes", path)

    def unlink(self, path: str) -> None:
        self._changing("unlink", path)
        path, node = self._node(path, follow=False)
        if node.kind == stat.S_IFDIR:
            raise _error(errno.EISDIR, path)
        self._drop("removes", path)

    def link(self, source: str, target: str) -> None:
        self.call("link", target, {source}, {target, f"{target.rpartition('/')[0]}/"})
        _, node = self._node(source, follow=False)
        target = self._place(target)
        if target in self.nodes:
            raise _error(errno.EEXIST, target)
        if node.kind == stat.S_IFDIR:
            raise _error(errno.EPERM, target)
        node.links += 1
        self._put("makes", target, node)

    def rename(self, source: str, target: str) -> None:
        above = {path.rpartition("/")[0] for path in (source, target)}
        lists = {f"{folder}/" for folder in above}
        self.call("rename", target, above, {source, target, *lists})
        source, target = self._place(source), self._place(target)
        if source not in self.nodes:
            raise _error(errno.ENOENT, source)
        node, old = self.nodes[source], self.nodes.get(target)
        if target.startswith(f"{source}/"):
            raise _error(errno.EINVAL, target)
        if source.startswith(f"{target}/"):
            raise _error(errno.ENOTEMPTY, target)
        if old is node:
            return
        is_folder, is_over = node.kind == stat.S_IFDIR, old is not None and old.kind == stat.S_IFDIR
        if is_folder != is_over and old is not None:
            raise _error(errno.ENOTDIR if is_folder else errno.EISDIR, target)
        if any(path.startswith(f"{target}/") for path in self.nodes):
            raise _error(errno.ENOTEMPTY, target)
        for path in [path for path in self.nodes if path.startswith(f"{source}/")]:
            self.nodes[target + path[len(source) :]] = self.nodes.pop(path)
        del self.nodes[source]
        self._put("makes", target, node)

    def symlink(self, target: str, path: str) -> None:
        self._changing("symlink", path)
        path = self._place(path)
        if path in self.nodes:
            raise _error(errno.EEXIST, path)
        node = self._new(stat.S_IFLNK)
        node.target = target
        self._put("makes", path, node)

    # Calls by descriptor (rule 3).

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            self._changing("creates", path)
            path = self._place(path)
            if path in self.nodes:
                raise _error(errno.EEXIST, path)
            node = self._new(stat.S_IFREG)
            self._put("makes", path, node)
        else:
            self._reading("open", path)
            path, node = self._node(path, follow=not flags & os.O_NOFOLLOW)
            if flags & os.O_DIRECTORY and node.kind != stat.S_IFDIR:
                raise _error(errno.ENOTDIR, path)
            if node.kind == stat.S_IFLNK:
                raise _error(errno.ELOOP, path)
        descriptor = next(_numbers)
        self._open[descriptor] = path, node
        return descriptor

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def fstat(self, descriptor: int) -> os.stat_result:
        return self._status(self._open[descriptor][1])

    def fsync(self, descriptor: int) -> None:
        """All that is written is durable at once: `tests/faults/test_power_loss.py` has losses."""

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        path, node = self._open[descriptor]
        if node.kind == stat.S_IFDIR:
            raise _error(errno.EISDIR, path)
        return bytes(node.data[offset : offset + length])

    def preadv(self, descriptor: int, buffers: list[Any], offset: int) -> int:
        data, done = self._open[descriptor][1].data, 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            part = data[offset + done : offset + done + len(view)]
            view[: len(part)] = part
            done += len(part)
        return done

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        file, view = self._open[descriptor][1].data, memoryview(data).cast("B")
        file[offset : offset + len(view)] = view
        return len(view)

    def writev(self, descriptor: int, buffers: list[Any]) -> int:
        return sum(
            self.pwrite(descriptor, one, len(self._open[descriptor][1].data)) for one in buffers
        )

    def in_folder(self, name: str, descriptor: int) -> str:
        """The path of a name in an opened folder; of no file if the folder is gone."""
        path, node = self._open[descriptor]
        return f"{path}/{name}" if self.nodes.get(path) is node else f"{ROOT}/gone/{name}"

    def _status(self, node: Node) -> os.stat_result:
        size, at = len(node.data), int(node.changed)
        fields = (node.kind | 0o755, node.number, 1, node.links, 0, 0, size, at, at, at)
        exact = {"st_mtime": node.changed, "st_ctime": node.changed, "st_blocks": -(-size // 512)}
        return os.stat_result(fields, exact)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


BY_PATH = (
    *("stat", "lstat", "readlink", "scandir", "mkdir", "rmdir", "unlink", "link", "rename"),
    *("replace", "symlink", "open"),
)
BY_DESCRIPTOR = ("close", "fstat", "fsync", "pread", "preadv", "pwrite", "writev")


def system_calls(disk: Callable[[], Disk | None]) -> dict[str, Callable[..., Any]]:
    """Functions in the place of those of `os`, by name: calls below `ROOT` go to the disk."""

    def by_path(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
            here = disk()
            if here is not None and dir_fd is not None and dir_fd >= _FIRST_DESCRIPTOR:
                return getattr(here, name)(here.in_folder(path, dir_fd))
            text = path if type(path) is str else _text(path)
            # A link is first in the arguments of a call where its name is second.
            below = text if name != "symlink" else _text(args[0])
            if here is not None and type(below) is str and below.startswith(ROOT):
                if name == "open":
                    args = args[:1]
                own = getattr(here, "rename" if name == "replace" else name)
                return own(text.rstrip("/"), *(_text(one) for one in args), **options)
            if dir_fd is not None:
                options["dir_fd"] = dir_fd
            return real(path, *args, **options)

        return call

    def by_descriptor(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(descriptor: int, *args: Any) -> Any:
            if descriptor < _FIRST_DESCRIPTOR:
                return real(descriptor, *args)
            here = disk()
            return None if here is None else getattr(here, name)(descriptor, *args)

        return call

    found = {name: by_path(name) for name in BY_PATH}
    return found | {name: by_descriptor(name) for name in BY_DESCRIPTOR}


def _text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value
