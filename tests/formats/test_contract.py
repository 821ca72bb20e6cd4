"""What the contribution guide says of a new format, a new store and a new argument is enough."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import ModuleType

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
from fsspec.implementations.memory import MemoryFileSystem

import ckpt
from ckpt.testing import FormatContract, StoreContract, StorePlace
from formats import detect
from formats.catalog import (
    Catalog,
    Extent,
    FileRecord,
    PieceTable,
    StoredPiece,
    TensorRecord,
    TensorRef,
    Tree,
)
from formats.dtypes import dtype_named
from formats.errors import CorruptError
from formats.limits import decode_object
from formats.storage import Reader
from sharding.layout import Box, Piece, row_major

ROOT = Path(__file__).parents[2]
TENSORS = {
    "a.weight": torch.arange(24, dtype=torch.float32).reshape(6, 4) / 7,
    "a.bias": torch.tensor([float("nan"), -0.0, float("inf"), 5e-324], dtype=torch.float64),
    "count": torch.tensor(3),
    "empty": torch.zeros(0, 5, dtype=torch.int16),
}
"""Of every kind of shape and value that each of the formats can hold."""

Written = tuple[Path, Mapping[str, torch.Tensor]]


class TestSafetensors(FormatContract):
    @pytest.fixture
    def written(self, tmp_path: Path) -> Written:
        safetensors.torch.save_file(TENSORS, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors", TENSORS


class TestNpz(FormatContract):
    @pytest.fixture
    def written(self, tmp_path: Path) -> Written:
        np.savez(tmp_path / "a.npz", **{name: tensor.numpy() for name, tensor in TENSORS.items()})
        return tmp_path / "a.npz", TENSORS


class TestTorchSave(FormatContract):
    @pytest.fixture
    def written(self, tmp_path: Path) -> Written:
        torch.save(TENSORS, tmp_path / "a.pt")
        return tmp_path / "a.pt", TENSORS


class TestOwnFormat(FormatContract):
    @pytest.fixture
    def written(self, tmp_path: Path) -> Written:
        ckpt.save(tmp_path / "step-1", dict(TENSORS))
        return tmp_path / "step-1", TENSORS


def write_plain(folder: Path) -> None:
    """A format that no library has: `plain.json`, and a file of raw bytes for each tensor."""
    folder.mkdir()
    index = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        (folder / f"{number}.raw").write_bytes(tensor.numpy().tobytes())
        code = {"float32": "F32", "float64": "F64", "int64": "I64", "int16": "I16"}
        index[name] = [f"{number}.raw", code[str(tensor.dtype)[6:]], list(tensor.shape)]
    (folder / "plain.json").write_text(json.dumps(index))


def read_plain(reader: Reader) -> Catalog:
    """The reader of the format, as the guide says: it checks each size before it returns."""
    index = decode_object(reader.read_whole("plain.json", 1 << 20), "plain.json")
    tensors, files = {}, []
    for name, row in index.items():
        match row:
            case [str(file), str(code), list(shape)] if all(
                isinstance(size, int) and 0 <= size < 1 << 40 for size in shape
            ):
                pass
            case _:
                raise CorruptError(f"plain.json: {name} is {row!r}, not [file, dtype, shape]")
        dtype = dtype_named(code, name)
        if not reader.exists(file):
            raise CorruptError(f"{file}: the file of {name} is missing")
        nbytes = prod(shape) * dtype.itemsize
        if reader.size(file) != nbytes:
            raise CorruptError(f"{file}: {name} needs {nbytes} bytes")
        piece = Piece(Box.whole(tuple(shape)), 0, row_major(tuple(shape)))
        extent = Extent(file, 0, nbytes, itemsize=dtype.itemsize)
        pieces = PieceTable([StoredPiece(piece, extent)] if nbytes else [])
        tensors[name] = TensorRecord(name, tuple(shape), dtype, pieces)
        files.append(FileRecord(file, nbytes))
    tree: Tree = {name: TensorRef(name) for name in tensors}
    return Catalog("plain", tensors, tree, tuple(files))


class TestAFormatThatIsAddedAsTheGuideSays(FormatContract):
    """A module with `read`, and a row of the table: nothing else."""

    @pytest.fixture
    def written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
        module = ModuleType("formats.plain")
        module.read = read_plain  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "formats.plain", module)
        row = detect.FolderFormat("plain", detect.has("plain.json"), "plain:read")
        monkeypatch.setattr(detect, "FOLDERS", (row, *detect.FOLDERS))
        write_plain(tmp_path / "folder")
        return tmp_path / "folder", TENSORS


class Added(MemoryFileSystem):
    """A store of a user: a driver for fsspec, registered by its protocol."""

    protocol = "added"
    store: dict[str, object] = {}  # noqa: RUF012 - as fsspec has it: the class has the files
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("added://"))


class TestAStoreThatIsAddedAsTheGuideSays(StoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> StorePlace:
        fsspec.register_implementation("added", Added, clobber=True)
        return StorePlace(f"added://{tmp_path.name}/run")

    def test_a_checkpoint_is_saved_and_loaded_there(self, place: StorePlace) -> None:
        ckpt.save(place.url, dict(TENSORS))
        assert ckpt.verify(place.url).sound
        assert ckpt.read(place.url)["count"] == 3


def test_the_guide_names_each_file_that_an_argument_goes_through() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = guide.partition("## How to add an argument")[2].partition("\n## ")[0]
    named = {*re.findall(r"`((?:ckpt|tools)/[\w/]+\.py)`", section)}
    assert named == {
        str(path.relative_to(ROOT))
        for package in ("ckpt", "tools")
        for path in (ROOT / package).rglob("*.py")
        if any(map(has_compress, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }


def has_compress(node: ast.AST) -> bool:
    """Whether it is a parameter or a field named `compress`, the guide's example."""
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == "compress"
    return isinstance(node, ast.arg) and node.arg == "compress"
