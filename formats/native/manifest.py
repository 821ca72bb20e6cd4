"""The manifest: the one file whose presence makes a checkpoint exist.

Rules (docs/format.md is normative):

1. The file is one JSON object whose first key is `digest`: 32 hex digits, the xxh3_128 of the same
   object without that key, exactly as it stands in the file. Any changed bit is found.
2. Its size is O(tensors + files): layouts are symbolic and shared, offsets stand in the files'
   own headers.
3. Names in it never leave the folder: a file name has no separators and does not begin with a dot.
   Only chunks that are borrowed lie elsewhere: in checkpoints beside this one, whose folder names
   keep the same rule.
4. A manifest is of version 1 unless chunks are borrowed (2) or the state has typed values (3): an
   older reader refuses what it would misread, and nothing else.
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
"""The version of a checkpoint with bases; the same but for them."""
TYPED_VERSION = 3
"""The version of a checkpoint with typed values in its state, and perhaps with bases."""
DIGEST_KEY = b'{"digest":"'


class ShardFile(NamedTuple):
    """One file of one rank."""

    name: str
    rank: int
    """The rank of the layouts' meshes whose local storage the file holds."""
    size: int
    """Bytes in the file."""
    header_bytes: int
    """Bytes before the tensor data: the length prefix and the JSON header."""
    table_bytes: int
    """Bytes of the chunk table, which ends the file."""
    digest: str
    """xxh3_128, in hex, of the header bytes followed by the chunk table."""


@dataclass(frozen=True, slots=True)
class Base:
    """An earlier checkpoint in a folder beside this one, in whose files some of its chunks lie."""

    folder: str
    files: tuple[BaseFile, ...]


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file of a base, as far as it must be what it was."""

    name: str
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as the manifest knows it."""

    shape: tuple[int, ...]
    dtype: DType
    layout: Layout
    """Which rank's file holds which piece: no element twice."""


WRITER_KEYS = ("ckpt", "torch", "world_size", "time")
"""What a writer says of itself; what else is under `writer` somebody said of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a reader needs before it opens a shard file."""

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    tree: Tree
    files: Sequence[ShardFile]
    writer: Mapping[str, str] = field(default_factory=dict)
    bases: Sequence[Base | None] = ()
    """By the number that shard files know them by; None where no chunk lies there any more."""


def dump(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`. The same manifest always gives the same bytes."""
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
        }
    )
    body = body[:-1] + b',"state":' + state + b"}"
    digest = xxhash.xxh3_128_hexdigest(body).encode("ascii")
    return DIGEST_KEY + digest + b'",' + body[1:]


def read_manifest(reader: Reader, name: str = MANIFEST) -> bytes:
    """A manifest, still packed, in one request. Raises FileNotFoundError where there is none."""
    try:
        return reader.read_whole(name, current().manifest_bytes)
    except TooLargeError as error:
        check("manifest_bytes", error.nbytes, f"{reader.url}/{name}")
        raise


def digest_in(data: bytes) -> str:
    """The digest that a manifest's bytes begin with: no two checkpoints have the same."""
    return data[len(DIGEST_KEY) : len(DIGEST_KEY) + 32].decode("ascii")


def _version(state: bytes, bases: list[Json]) -> int:
    if b'{"$typed":' in state:  # within a text, a quotation mark has a backslash before it
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


def _base_json(base: Base) -> Json:
    return [base.folder, [[file.name, file.rank, file.size] for file in base.files]]
