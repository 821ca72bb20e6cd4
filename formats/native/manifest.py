"""The manifest: the file whose presence makes a checkpoint exist.

Rules (docs/format.md is normative, its section 11 for the checks of a reader):

1. The file is one JSON object. Its first key is `digest`: 32 hex digits, the xxh3_128 of the bytes
   of the same object without this key. A reader finds any changed bit.
2. The size is O(tensors + files): layouts are symbolic and shared, and the headers of the files
   have the offsets.
3. Names never leave the folder: a file name has no separators and does not begin with a dot. Only
   borrowed chunks lie elsewhere: in checkpoints beside this one, with plain folder names too.
4. The version is 1, 2 with borrowed chunks, and 3 with typed values in the state: an older reader
   refuses exactly the manifests that it would misread.
5. A reader checks every part of the JSON. A number above one of `formats.limits` is a HostileError,
   an invalid part a FormatError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeGuard, cast

import xxhash

from formats.catalog import TensorRef, Tree
from formats.dtypes import DType, dtype_named
from formats.errors import CorruptError, FormatError, HostileError, TooLargeError, UnsupportedError
from formats.limits import (
    ALL_SPLITS,
    AXES,
    BASES,
    DIMENSIONS,
    FEW_SPLITS,
    RANKS,
    SIZE,
    SPLITS,
    Names,
    check,
    current,
    decode_object,
)
from formats.native.tree import Json, decode, encode
from formats.storage import Reader, read_again
from sharding.layout import (
    FlatShard,
    Layout,
    Mesh,
    Only,
    Placement,
    Replicate,
    Shard,
    Split,
    StridedShard,
    is_dense,
)

MANIFEST = "manifest.json"
VERSION = 1
BORROWING_VERSION = 2
"""The version of a checkpoint with bases."""
TYPED_VERSION = 3
"""The version of a checkpoint with typed values in its state, and perhaps with bases."""
DIGEST_KEY = b'{"digest":"'


class ShardFile(NamedTuple):
    """One file of one rank."""

    name: str
    rank: int
    """The rank, in the meshes of layouts, whose local storage the file holds."""
    size: int
    """The bytes of the file."""
    header_bytes: int
    """The bytes before the tensor data: the length prefix and the JSON header."""
    table_bytes: int
    """The bytes of the tables at the end of the file."""
    digest: str
    """xxh3_128, in hex, of the header bytes followed by the chunk table."""


@dataclass(frozen=True, slots=True)
class Base:
    """An earlier checkpoint in a folder beside this one, whose files hold chunks of this one."""

    folder: str
    files: tuple[BaseFile, ...]


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file of a base, with the facts that must not have changed."""

    name: str
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in the manifest."""

    shape: tuple[int, ...]
    dtype: DType
    layout: Layout
    """The piece of the tensor in each rank's file; no element is stored twice."""


SAVE_SECONDS = "save_seconds"
"""The writer's key for the time from the call of a save to its commit, by rank 0's clock."""
STAGED_SECONDS = "staged_seconds"
"""The same for the time until rank 0 had copied the state, in a background save."""
NONFINITE = "nonfinite"
"""The same for the count of numbers that are NaN or infinite, if the save has counted them."""
WRITER_KEYS = ("ckpt", "torch", "world_size", "time", SAVE_SECONDS, STAGED_SECONDS, NONFINITE)
"""The keys of the writer. Other keys under `writer` are the user's metadata."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest: all that a reader needs before it opens a shard file."""

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    tree: Tree
    files: Sequence[ShardFile]
    writer: Mapping[str, str] = field(default_factory=dict)
    bases: Sequence[Base | None] = ()
    """By their indices in shard files; None for a base that holds no chunk any more."""
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The strides in memory of each whole tensor that was not row-major."""
    optimizers: Mapping[str, str | None] = field(default_factory=dict)
    """The key path of each optimizer, and the module of its parameters' names, as in `Catalog`."""
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The versions of modules' states, as in `Catalog`."""


def dump(manifest: Manifest) -> bytes:
    """Returns the bytes of `manifest.json`. Equal manifests have equal bytes."""
    meshes: dict[Mesh, int] = {}
    layouts: dict[tuple[int, tuple[Placement, ...]], int] = {}
    nodes: dict[int, Json] = {}  # by the identity of a description, which many tensors share

    def tensor(name: str, ref: TensorRef) -> Json:
        if name != ref.name:
            return {"$alias": ref.name}
        stored = manifest.tensors[name]
        node = nodes.get(id(stored))
        if node is None:
            mesh = meshes.setdefault(stored.layout.mesh, len(meshes))
            layout = layouts.setdefault((mesh, stored.layout.placements), len(layouts))
            node = {"$tensor": [stored.dtype.name, list(stored.shape), layout]}
            nodes[id(stored)] = node
        return node

    state = _compact(encode(manifest.tree, tensor))
    bases: list[Json] = [
        None if base is None else [base.folder, [[f.name, f.rank, f.size] for f in base.files]]
        for base in manifest.bases
    ]
    strides: dict[str, Json] = {name: list(steps) for name, steps in manifest.strides.items()}
    versions: dict[str, Json] = {path: dict(numbers) for path, numbers in manifest.versions.items()}
    body = _compact(
        {
            "format": "ckpt",
            "version": _version(state, bases),
            "writer": dict(manifest.writer),
            **({"bases": bases} if bases else {}),
            "meshes": [_mesh_json(mesh) for mesh in meshes],
            "layouts": [[mesh, [str(p) for p in placements]] for mesh, placements in layouts],
            "files": [
                [f.name, f.rank, f.size, f.header_bytes, f.table_bytes, f.digest]
                for f in manifest.files
            ],
            **({"strides": strides} if strides else {}),
            **({"optimizers": dict(manifest.optimizers)} if manifest.optimizers else {}),
            **({"versions": versions} if versions else {}),
        }
    )
    return with_digest(body[:-1] + b',"state":' + state + b"}")


def read_manifest(reader: Reader, name: str = MANIFEST) -> bytes:
    """Reads the bytes of a manifest in one request. Raises FileNotFoundError if there is none."""
    try:
        data = reader.read_whole(name, current().manifest_bytes)
        if is_intact(data):
            return data
        place = name, 0, len(data)
        whole = partial(reader.read_whole, name, current().manifest_bytes)
        return read_again(reader, place, data, whole, is_intact) or data
    except TooLargeError as error:
        check("manifest_bytes", error.nbytes, f"{reader.url}/{name}")
        raise


def with_digest(body: bytes) -> bytes:
    """Returns a JSON object without spaces, with its digest as the first key (rule 1)."""
    return DIGEST_KEY + xxhash.xxh3_128_hexdigest(body).encode() + b'",' + body[1:]


def is_intact(data: bytes) -> bool:
    """Whether these bytes are a manifest with the digest with which it begins."""
    start = len(DIGEST_KEY) + 32
    if data[: len(DIGEST_KEY)] != DIGEST_KEY or data[start : start + 2] != b'",':
        return False
    hasher = xxhash.xxh3_128(b"{")
    hasher.update(memoryview(data)[start + 2 :])
    return hasher.hexdigest().encode("ascii") == data[len(DIGEST_KEY) : start]


def digest_in(data: bytes) -> str:
    """Returns the digest at the start of a manifest's bytes; each checkpoint has its own."""
    return data[len(DIGEST_KEY) : len(DIGEST_KEY) + 32].decode("ascii")


def _version(state: bytes, bases: list[Json]) -> int:
    if b'{"$typed":' in state:  # inside a string, a quotation mark has a backslash before it
        return TYPED_VERSION
    return BORROWING_VERSION if bases else VERSION


def _compact(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _mesh_json(mesh: Mesh) -> Json:
    entry: dict[str, Json] = {
        "names": list(mesh.names),
        "sizes": list(mesh.sizes),
        "offset": mesh.offset,
        "strides": list(mesh.strides),
    }
    if mesh.table:
        entry["table"] = list(mesh.table)
    return entry


_HEX = re.compile(rb"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
_NO_FOLDER_NAME = re.compile(r"[/\\\x00-\x1f\x7f]|.{256}")
_PLACEMENT = re.compile(r"(R|split)|(S|SS|F|only)\((\d{1,19})(?:,(\d{1,19}))?\)")


def load(data: bytes, file: str = MANIFEST, stored: bool = True) -> Manifest:
    """Returns the manifest in these bytes. `file` is its name in messages.

    `stored` is False only for the summaries that ranks exchange: their layouts have replicas, and
    the tensor of an alias may be in another summary.

    Raises:
        CorruptError: a bit was changed.
        UnsupportedError: a later version of ckpt wrote the manifest.
        HostileError, FormatError: the manifest breaks a rule that all writers keep.
    """
    body = checked_body(data, file)
    try:
        content = cast("dict[str, Json]", decode_object(body, file, lone=True))
        return Loader(file, content, len(data), stored).manifest()
    except RecursionError as error:
        raise HostileError(f"{file}: nests too deep") from error


def file_names(data: bytes, file: str = MANIFEST) -> list[str]:
    """Returns the names of a manifest's shard files, without a look at its tensors.

    Raises as `load` does.
    """
    found = leading_entries(checked_body(data, file).decode("utf-8", "replace"))
    rows, version = found.get("files"), found.get("version")
    is_known = found.get("format") == "ckpt" and version in range(VERSION, TYPED_VERSION + 1)
    if not is_known or not is_table(rows):
        return [shard.name for shard in load(data, file).files]
    return [check_file_name(row[0], file) for row in rows]


def leading_entries(text: str) -> dict[str, Any]:
    """Returns the first entries of a JSON object without spaces, up to its files, or a cut."""
    decoder, entries, at = json.JSONDecoder(), dict[str, Any](), 1
    try:
        while text[at - 1] in "{," and "files" not in entries:
            key, at = decoder.raw_decode(text, at)
            if text[at] != ":" or not isinstance(key, str):
                break
            value, at = decoder.raw_decode(text, at + 1)
            entries[key] = value
            at += 1
    except (ValueError, IndexError, RecursionError):
        pass
    return entries


def is_table(rows: object) -> TypeGuard[list[list[Any]]]:
    """Whether the entry `files` of a manifest is a list of rows that begin with a name."""
    return isinstance(rows, list) and all(
        isinstance(row, list) and row and isinstance(row[0], str) for row in rows
    )


def checked_body(data: bytes, file: str) -> bytes:
    """Returns an object of `with_digest` without its digest. Raises CorruptError if it differs."""
    start = len(DIGEST_KEY) + 32
    digest = data[len(DIGEST_KEY) : start]
    if (
        data[: len(DIGEST_KEY)] != DIGEST_KEY
        or not _HEX.fullmatch(digest)
        or data[start : start + 2] != b'",'
    ):
        raise CorruptError(
            f"{file}: does not begin with its digest: it is of another program, or damaged; "
            "restore it from another copy"
        )
    body = b"{" + data[start + 2 :]
    if xxhash.xxh3_128_hexdigest(body).encode("ascii") != digest:
        raise CorruptError(
            f"{file}: its {len(data)} bytes do not have the digest {digest.decode()} they claim: "
            "it was changed after it was written; restore it from another copy"
        )
    return body


def check_file_name(name: object, file: str) -> str:
    """Returns a file name of a manifest. Raises HostileError if it could leave the folder."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise HostileError(f"{file}: {str(name)[:80]!r} is not a plain file name")
    return name


def check_folder_name(name: object, file: str) -> str:
    """Returns the name of a folder beside this one. Raises HostileError for any other path."""
    if not isinstance(name, str) or name in ("", ".", "..") or _NO_FOLDER_NAME.search(name):
        raise HostileError(f"{file}: {str(name)[:80]!r} is not the plain name of a folder")
    return name


def _splits(placements: tuple[Placement, ...]) -> int:
    """Returns the number of chunks into which dimensions are cut before they are cut over ranks."""
    return prod(p.split for p in placements if isinstance(p, StridedShard))


class Loader:
    """Checks every part of a manifest's JSON."""

    def __init__(self, file: str, content: dict[str, Json], nbytes: int, stored: bool) -> None:
        """`nbytes` is the length of the manifest with this content."""
        self._file = file
        self._names = Names(file, nbytes)
        self._splits: list[int] = []
        """The `_splits` of each layout."""
        self._splits_left = ALL_SPLITS
        self._stored = stored
        self._content = content

    def manifest(self) -> Manifest:
        """Returns the manifest. Raises as `load` does."""
        if self._content.get("format") != "ckpt":
            raise FormatError(
                f"{self._file}: format is {self._content.get('format')!r}, not 'ckpt'"
            )
        version = self._integer(self._content.get("version"), "version")
        if not VERSION <= version <= TYPED_VERSION:
            raise UnsupportedError(
                f"{self._file}: written in version {version} of the format; this ckpt reads "
                f"versions {VERSION} to {TYPED_VERSION}: install a newer ckpt"
            )
        may_borrow = version == TYPED_VERSION and "bases" in self._content
        bases = self._bases() if version == BORROWING_VERSION or may_borrow else ()
        meshes = [self._mesh(mesh) for mesh in self._list(self._content.get("meshes"), "meshes")]
        layouts = [
            self._placements(entry, meshes)
            for entry in self._list(self._content.get("layouts"), "layouts")
        ]
        self._splits = [_splits(placements) for _, placements in layouts]
        files = self._shard_files(self._list(self._content.get("files"), "files"))
        tensors: dict[str, StoredTensor] = {}
        aliases: dict[str, str] = {}
        alike: dict[str, StoredTensor] = {}
        tree, entries = decode(self._content.get("state"), self._names)
        for name, tag, value in entries:
            self._names.tensor(len(name))
            if name in tensors or name in aliases:
                raise HostileError(f"{self._file}: two entries have the name {name!r}")
            if tag == "$alias":
                if not isinstance(value, str):
                    raise FormatError(f"{self._file}: {name}: an alias names another tensor")
                aliases[name] = value
                continue
            written = repr(value)
            stored = alike.get(written)
            if stored is None:  # most tensors of a model have the entry of another
                stored = alike[written] = self._tensor(name, value, layouts, len(files))
            tensors[name] = stored
        for name, target in aliases.items():
            if target not in tensors and self._stored:
                raise FormatError(
                    f"{self._file}: {name} is an alias of {target!r}, which is missing"
                )
        writer = self._dict(self._content.get("writer"), "writer")
        texts = {k: str(v) for k, v in writer.items()}
        strides = {
            name: self._tensor_strides(name, tensors.get(name), steps)
            for name, steps in self._dict(self._content.get("strides", {}), "strides").items()
        }
        optimizers: dict[str, str | None] = {}
        for path, module in self._dict(self._content.get("optimizers", {}), "optimizers").items():
            if module is not None and not isinstance(module, str):
                raise FormatError(f"{self._file}: the module of the optimizer {path!r} is no text")
            optimizers[path] = module
        versions = {
            path: {
                name: self._integer(number, f"the version of {path}.{name}")
                for name, number in self._dict(found, f"the versions of {path}").items()
            }
            for path, found in self._dict(self._content.get("versions", {}), "versions").items()
        }
        return Manifest(tensors, aliases, tree, files, texts, bases, strides, optimizers, versions)

    def _tensor_strides(
        self, name: str, stored: StoredTensor | None, steps: Json
    ) -> tuple[int, ...]:
        """Returns the strides of a tensor: memory with gaps or overlaps could have any size."""
        found = self._integers(steps, f"the strides of {name}")
        if stored is None or not is_dense(stored.shape, found):
            raise FormatError(f"{self._file}: no tensor {name!r} has the strides {found[:8]}")
        return found

    def _bases(self) -> tuple[Base | None, ...]:
        bases = self._list(self._content.get("bases"), "bases")
        if len(bases) > BASES:
            raise HostileError(f"{self._file}: {len(bases)} bases; none has more than {BASES}")
        return tuple(None if value is None else self._base(value) for value in bases)

    def _base(self, value: Json) -> Base:
        entry = self._list(value, "a base")
        if len(entry) != 2:
            raise FormatError(f"{self._file}: a base is [folder, files]")
        folder = check_folder_name(entry[0], self._file)
        files: dict[int, BaseFile] = {}
        for item in self._list(entry[1], f"the files of {folder}"):
            found = self._list(item, f"a file of {folder}")
            if len(found) != 3:
                raise FormatError(f"{self._file}: a file of a base is [name, rank, bytes]")
            name = check_file_name(found[0], self._file)
            rank, size = (self._integer(number, f"of {folder}/{name}") for number in found[1:])
            if files.setdefault(rank, BaseFile(name, rank, size)).name != name:
                raise HostileError(f"{self._file}: two files of {folder} are of rank {rank}")
        return Base(folder, tuple(files.values()))

    def _tensor(
        self, name: str, value: Json, layouts: list[tuple[Mesh, tuple[Placement, ...]]], files: int
    ) -> StoredTensor:
        entry = self._list(value, name)
        if len(entry) != 3:
            raise FormatError(f"{self._file}: {name}: a $tensor is [dtype, shape, layout]")
        dtype = dtype_named(str(entry[0]), f"{self._file}: {name}")
        shape = self._integers(entry[1], f"the shape of {name}")
        if len(shape) > DIMENSIONS or dtype.itemsize * prod(filter(None, shape)) > SIZE:
            raise HostileError(f"{self._file}: {name}: no tensor has the shape {shape[:8]}...")
        index = self._integer(entry[2], f"the layout of {name}")
        if index >= len(layouts):
            raise FormatError(f"{self._file}: {name}: there is no layout {index}")
        mesh, placements = layouts[index]
        splits = self._splits[index]
        if splits > FEW_SPLITS:
            self._splits_left -= splits
            if self._splits_left < 0:
                raise HostileError(f"{self._file}: {name}: too many tensors are cut so finely")
        try:
            layout = Layout(shape, mesh, placements)
        except ValueError as error:
            raise FormatError(f"{self._file}: {name}: {error}") from error
        if self._stored and mesh.size > files:
            self._check_spread(name, layout, files)
        return StoredTensor(shape, dtype, layout)

    def _check_spread(self, name: str, layout: Layout, files: int) -> None:
        """Raises HostileError if more ranks hold a part than have a file: an absurd number."""
        at = tuple(p.index if isinstance(p, Only) else 0 for p in layout.placements)
        # Coordinate 0 of each axis that cuts a dimension has the largest part.
        most, parts = prod(layout.local_shape(layout.mesh.rank(at))), 1
        for placement, size in zip(layout.placements, layout.mesh.sizes, strict=True):
            if isinstance(placement, FlatShard):
                most = min(most, placement.stride)
            elif isinstance(placement, Split):
                parts *= size
        if layout.numel > files * -(-most // parts):
            raise HostileError(
                f"{self._file}: {name} is spread over more ranks ({layout}) than the {files} that "
                "have a file"
            )

    def _mesh(self, value: Json) -> Mesh:
        entry = self._dict(value, "a mesh")
        names = tuple(str(name) for name in self._list(entry.get("names"), "a mesh's names"))
        sizes = self._integers(entry.get("sizes"), "a mesh's sizes")
        offset = self._integer(entry.get("offset"), "a mesh's offset")
        strides = self._strides(entry.get("strides"))
        table = self._integers(entry.get("table", []), "a mesh's table")
        if len(sizes) > AXES or prod(sizes) > RANKS:
            raise HostileError(f"{self._file}: no mesh has the sizes {sizes[:AXES]}")
        try:
            return Mesh(names, sizes, offset, strides, table)
        except ValueError as error:
            raise FormatError(f"{self._file}: {error}") from error

    def _placements(self, value: Json, meshes: list[Mesh]) -> tuple[Mesh, tuple[Placement, ...]]:
        entry = self._list(value, "a layout")
        if len(entry) != 2:
            raise FormatError(f"{self._file}: a layout is [mesh, placements]")
        index = self._integer(entry[0], "a layout's mesh")
        if index >= len(meshes):
            raise FormatError(f"{self._file}: there is no mesh {index}")
        mesh = meshes[index]
        placements = tuple(self._placement(p) for p in self._list(entry[1], "placements"))
        if _splits(placements) > SPLITS:
            raise HostileError(f"{self._file}: no tensor is cut as {[str(p) for p in placements]}")
        for placement, size in zip(placements, mesh.sizes, strict=False):
            if self._stored and isinstance(placement, Replicate) and size > 1:
                raise FormatError(
                    f"{self._file}: a stored layout replicates over {size} ranks: each element is "
                    "stored once (split or only)"
                )
        return mesh, placements

    def _placement(self, value: Json) -> Placement:
        match = _PLACEMENT.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            word, kind, first, second = match.groups()
            if word is not None:
                return Replicate() if word == "R" else Split()
            if kind in ("S", "only") and second is None:
                return Shard(int(first)) if kind == "S" else Only(int(first))
            if kind in ("SS", "F") and second is not None:
                a, b = int(first), int(second)
                return StridedShard(a, b) if kind == "SS" else FlatShard(a, b)
        raise FormatError(f"{self._file}: {str(value)[:80]!r} is not a placement")

    def _shard_files(self, rows: list[Json]) -> list[ShardFile]:
        files = [self._shard_file(row) for row in rows]
        for what, values in (("file", {f.name for f in files}), ("rank", {f.rank for f in files})):
            if len(values) != len(files):
                raise HostileError(f"{self._file}: a {what} occurs twice in the list of files")
        return files

    def _shard_file(self, row: Json) -> ShardFile:
        entry = self._list(row, "a file")
        if len(entry) != 6 or not isinstance(entry[5], str):
            raise FormatError(
                f"{self._file}: a file is [name, rank, bytes, header bytes, table bytes, digest]"
            )
        name = check_file_name(entry[0], self._file)
        what = f"of {name}"
        rank, size, header, table = [self._integer(number, what) for number in entry[1:5]]
        if header + table > size:
            raise FormatError(f"{self._file}: {name}: header and table are larger than the file")
        return ShardFile(name, rank, size, header, table, entry[5])

    def _dict(self, value: Json, what: str) -> dict[str, Json]:
        if not isinstance(value, dict):
            raise FormatError(f"{self._file}: {what} is not an object")
        return value

    def _list(self, value: Json, what: str) -> list[Json]:
        if not isinstance(value, list):
            raise FormatError(f"{self._file}: {what} is not an array")
        return value

    def _integer(self, value: Json, what: str) -> int:
        if type(value) is not int or not 0 <= value <= SIZE:
            raise FormatError(f"{self._file}: {what} is {str(value)[:80]!r}, not a size")
        return value

    def _strides(self, value: Json) -> tuple[int, ...]:
        """Returns the steps between ranks, which may be negative: a mesh may run backwards."""
        steps = self._list(value, "a mesh's strides")
        for step in steps:
            self._integer(-step if type(step) is int and step < 0 else step, "a mesh's stride")
        return tuple(step for step in steps if isinstance(step, int))

    def _integers(self, value: Json, what: str) -> tuple[int, ...]:
        return tuple(self._integer(item, what) for item in self._list(value, what))
