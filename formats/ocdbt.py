"""Reads databases of TensorStore's OCDBT: where the value of each key lies.

    manifest.ocdbt     the place of the newest tree's root
    d/4f9c...          nodes of the tree, and values, each somewhere in one of such files

Rules:

1. A manifest or node is a magic number, its length, version 0, a compression, a body, and CRC-32C.
2. A node of height 0 has keys with values: short ones within the node, others as a range of a file.
   A node above has nodes of one height less. Keys lose the prefix that a node above has.
3. Files are named by their path from the folder of the database. A node's own folder (`base`) goes
   before the paths in it: a database of several processes refers to those of each.
4. No number of a file sizes memory before it is compared with a limit: `index_bytes` is the most
   bytes of all nodes, decompressed, with their keys, and `json_values` the most entries.

The layout is that of tensorstore's documentation of its kvstore `ocdbt`, "Storage format".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from formats.errors import CorruptError, FormatError, HostileError
from formats.limits import check, current
from formats.storage import Reader

MANIFEST = "manifest.ocdbt"
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_MISSING = (1 << 64) - 1
"""The offset and length of the root of a tree without keys."""


class Value(NamedTuple):
    """The place of a value."""

    file: str
    offset: int
    nbytes: int
    data: bytes | None = None
    """The value itself, if it lies in a node, which begins at `offset`."""


class _File(NamedTuple):
    path: str
    base: str
    """The part of the path that goes before the paths in its nodes (rule 3)."""


def values_in(reader: Reader) -> dict[str, Value]:
    """Returns the place of each value by its key.

    Raises:
        CorruptError: the manifest or a node is damaged or missing.
        FormatError: the database is of another version.
        HostileError: it names files outside of its folder, or has more nodes than `index_bytes`.
    """
    content = reader.read_whole(MANIFEST, current().index_bytes)
    body = _body(content, _MANIFEST_MAGIC, MANIFEST, 0)
    body.take(16)
    if body.number():
        raise _unknown(MANIFEST, "with manifests by number")
    body.numbers(2)
    body.take(1)
    if body.number():
        body.take(4)
    files = body.files("")
    count = body.number()
    body.numbers(count)
    heights = body.take(count)
    places = list(zip(body.numbers(count), body.numbers(count), body.numbers(count), strict=True))
    if not places or _MISSING in places[-1]:
        return {}
    tree = _Tree(reader)
    number, offset, nbytes = places[-1]
    return dict(tree.values(body.file(files, number), offset, nbytes, heights[-1], b""))


class _Tree:
    """The nodes of a tree, as far as they were read."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._nbytes, self._values = reader, 0, 0

    def values(
        self, file: _File, offset: int, nbytes: int, height: int, prefix: bytes
    ) -> Iterator[tuple[str, Value]]:
        """Yields the keys below a node, with the places of their values."""
        where = f"{file.path} at {offset}"
        check("index_bytes", nbytes, where)
        content = self._reader.read(file.path, offset, nbytes)
        node = _body(content, _NODE_MAGIC, where, self._nbytes)
        self._nbytes += len(node.data)
        if node.take(1)[0] != height:
            raise node.wrong("its height is not that of the node above")
        files, count = node.files(file.base), node.number()
        self._values += count
        check("json_values", self._values, where)
        if not count:
            raise node.wrong("it has no entries")
        shared, own = [0, *node.numbers(count - 1)], node.numbers(count)
        below = node.numbers(count) if height else []
        keys = [prefix + key for key in node.joined(shared, own)]
        self._nbytes += sum(map(len, keys))
        if height:
            places = [node.numbers(count) for _ in range(3)]
            for key, common, number, at, size in zip(keys, below, *places, strict=True):
                part = key[: len(prefix) + common]
                yield from self.values(node.file(files, number), at, size, height - 1, part)
            return
        lengths, kinds = node.numbers(count), node.numbers(count)
        apart = sum(map(bool, kinds))
        numbers, offsets = iter(node.numbers(apart)), iter(node.numbers(apart))
        for key, length, kind in zip(keys, lengths, kinds, strict=True):
            name = key.decode(errors="replace")
            if kind:
                yield name, Value(node.file(files, next(numbers)).path, next(offsets), length)
            else:
                yield name, Value(file.path, offset, length, node.take(length))


class _Body:
    """The decompressed content of a manifest or node, read from its start on."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self._where, self._at = data, where, 0

    def wrong(self, problem: str) -> CorruptError:
        return CorruptError(f"{self._where}: {problem}; restore the checkpoint from another copy")

    def take(self, nbytes: int) -> bytes:
        found = self.data[self._at : self._at + nbytes]
        if len(found) != nbytes:
            raise self.wrong(f"it ends after {len(self.data)} bytes, and {nbytes} more are named")
        self._at += nbytes
        return found

    @property
    def rest(self) -> bytes:
        """The bytes that were not read."""
        return self.data[self._at :]

    def number(self) -> int:
        """Returns the next number: 7 bits a byte, the lowest first."""
        number = shift = 0
        while True:
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7
            if shift > 63:
                raise self.wrong("a number has more than 64 bits")

    def numbers(self, count: int) -> list[int]:
        """Returns the next numbers, of which each has at least a byte."""
        if count > len(self.data) - self._at:
            raise self.wrong(f"it names {count} entries, for which it is too short")
        return [self.number() for _ in range(count)]

    def joined(self, shared: list[int], own: list[int]) -> Iterator[bytes]:
        """Yields texts of which each begins with `shared` bytes of the one before it."""
        text, nbytes = b"", 0
        for common, more in zip(shared, own, strict=True):
            text = text[:common] + self.take(more)
            nbytes += len(text)
            check("index_bytes", nbytes, self._where)
            yield text

    def files(self, base: str) -> list[_File]:
        """Returns a table of files, whose paths begin with `base` (rule 3)."""
        count = self.number()
        shared = [0, *self.numbers(count - 1)] if count else []
        own, bases = self.numbers(count), self.numbers(count)
        found = []
        for raw, length in zip(self.joined(shared, own), bases, strict=True):
            path, own_base = (part.decode(errors="replace") for part in (raw, raw[:length]))
            found.append(_File(base + path, base + own_base))
        return found

    def file(self, files: list[_File], number: int) -> _File:
        if number >= len(files):
            raise self.wrong(f"it names file {number} of {len(files)}")
        path = files[number].path  # a tree without keys names the file ""
        if not path.isprintable() or {"", ".", ".."} & {*path.split("/")} or "\\" in path:
            raise HostileError(f"{self._where}: {path!r:.200} is no file of the database")
        return files[number]


def _body(encoded: bytes, magic: int, where: str, before: int) -> _Body:
    """Returns the content of a manifest or node (rule 1); `before` are the bytes of others."""
    damaged = _Body(encoded, where)
    head = damaged.take(12)
    length = struct.unpack("<Q", head[4:])[0]
    if struct.unpack(">I", head[:4])[0] != magic or length != len(encoded):
        raise damaged.wrong(f"its first bytes are of no such node with {len(encoded)} bytes")
    (wanted,) = struct.unpack("<I", encoded[-4:])
    if crc32c(encoded[:-4]) != wanted:
        raise damaged.wrong("its bytes have another checksum")
    version, compression = damaged.number(), damaged.number()
    if version or compression > 1:
        raise _unknown(where, f"of version {version} and compression {compression}")
    rest = damaged.rest[:-4]
    return _Body(_decompressed(rest, where, before) if compression else rest, where)


def _unknown(where: str, kind: str) -> FormatError:
    return FormatError(
        f"{where}: databases of OCDBT {kind} cannot be read: load the checkpoint with Orbax, and "
        "save it with PyTreeCheckpointHandler(use_ocdbt=False)"
    )


def _decompressed(frame: bytes, where: str, before: int) -> bytes:
    """Returns the content of a zstd frame (rule 4)."""
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(frame) as stream:
            data: bytes = stream.read(max(1, current().index_bytes - before + 1))
    except zstandard.ZstdError as error:
        raise CorruptError(f"{where}: zstd: {error}; restore it from another copy") from error
    check("index_bytes", before + len(data), where)
    return data


def _table() -> Iterator[int]:
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        yield number


_CRC32C = tuple(_table())


def crc32c(data: bytes) -> int:
    """Returns the checksum CRC-32C.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    found, table = 0xFFFFFFFF, _CRC32C
    for byte in data:
        found = found >> 8 ^ table[(found ^ byte) & 0xFF]
    return found ^ 0xFFFFFFFF
