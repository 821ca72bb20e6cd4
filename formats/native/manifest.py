"""The manifest: the file whose presence makes a checkpoint exist.

Rules (docs/format.md is normative):

1. The file is one JSON object. Its first key is `digest`: 32 hex digits, the xxh3_128 of the bytes
   of the same object without this key. A reader finds any changed bit.
2. The size is O(tensors + files): layouts are symbolic and shared, and the headers of the files
   have the offsets.
3. Names never leave the folder: a file name has no separators and does not begin with a dot. Only
   borrowed chunks lie elsewhere: in checkpoints beside this one, with plain folder names too.
4. The version is 1, 2 with borrowed chunks, and 3 with typed values in the state: an older reader
   refuses exactly the manifests that it would misread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from formats.catalog import TensorRef, Tree
from formats.dtypes import DType
from formats.errors import TooLargeError
from formats.limits import check, current
from formats.native.tree import Json, encode
from formats.storage import Reader
from sharding.layout import Layout, Mesh, Placement

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

    def tensor(name: str, ref: TensorRef) -> Json:
        if name != ref.name:
            return {"$alias": ref.name}
        stored = manifest.tensors[name]
        mesh = meshes.setdefault(stored.layout.mesh, len(meshes))
        layout = layouts.setdefault((mesh, stored.layout.placements), len(layouts))
        return {"$tensor": [stored.dtype.name, list(stored.shape), layout]}

    state = _compact(encode(manifest.tree, tensor))
    bases: list[Json] = [None if base is None else _base_json(base) for base in manifest.bases]
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
            **({"strides": _strides_json(manifest.strides)} if manifest.strides else {}),
            **({"optimizers": dict(manifest.optimizers)} if manifest.optimizers else {}),
            **({"versions": _versions_json(manifest.versions)} if manifest.versions else {}),
        }
    )
    body = body[:-1] + b',"state":' + state + b"}"
    digest = xxhash.xxh3_128_hexdigest(body).encode("ascii")
    return DIGEST_KEY + digest + b'",' + body[1:]


def read_manifest(reader: Reader, name: str = MANIFEST) -> bytes:
    """Reads the bytes of a manifest in one request. Raises FileNotFoundError if there is none."""
    try:
        return reader.read_whole(name, current().manifest_bytes)
    except TooLargeError as error:
        check("manifest_bytes", error.nbytes, f"{reader.url}/{name}")
        raise


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


def _versions_json(versions: Mapping[str, Mapping[str, int]]) -> Json:
    return {path: dict(numbers) for path, numbers in versions.items()}


def _strides_json(strides: Mapping[str, tuple[int, ...]]) -> Json:
    return {name: list(steps) for name, steps in strides.items()}


def _base_json(base: Base) -> Json:
    return [base.folder, [[file.name, file.rank, file.size] for file in base.files]]
