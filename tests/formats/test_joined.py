"""Catalogs of several files and sub-folders as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

import ckpt
from ckpt.stores.store import open_store
from formats import torch_save
from formats.catalog import Catalog, FileRecord, PieceTable, TensorRecord, TensorRef, Tree
from formats.dtypes import BY_NAME
from formats.errors import CorruptError, FormatError
from formats.joined import Part, below, join_catalogs, under
from formats.safetensors import file as safetensors_file
from formats.safetensors import huggingface


def written(folder: Path) -> None:
    """Two files with the tensor `w`, and one in a sub-folder."""
    (folder / "inner").mkdir()
    torch.save({"w": torch.ones(2), "n": {"step": 3}}, folder / "a.pt")
    torch.save(torch.full((3,), 2.0), folder / "bare.pt")
    safetensors.torch.save_file({"w": torch.zeros(4)}, folder / "inner" / "model.safetensors")


def test_each_part_lies_at_its_place(tmp_path: Path) -> None:
    written(tmp_path)
    with open_store(tmp_path) as store:
        found = join_catalogs(
            "mixed",
            [
                Part(("model",), torch_save.read(store, "a.pt")),
                Part(("rng", "0"), torch_save.read(store, "bare.pt")),
                Part(("deep", "x"), below(store, "inner", huggingface.read)),
            ],
            [FileRecord("log.json", 2)],
        )
        assert list(found.tensors) == ["model.w", "rng.0", "deep.x.w"]
        assert found.tree == {
            "model": {"w": TensorRef("model.w"), "n": {"step": 3}},
            "rng": {"0": TensorRef("rng.0")},
            "deep": {"x": {"w": TensorRef("deep.x.w")}},
        }
        files = {"log.json", "a.pt", "bare.pt", "inner/model.safetensors"}
        assert {file.name for file in found.files} == files
        assert [folder for folder, _ in found.parts] == ["", "", "inner"]
        for name, value in (("model.w", 1.0), ("rng.0", 2.0), ("deep.x.w", 0.0)):
            (stored,) = found.tensors[name].pieces
            data = store.read(stored.extent.file, stored.extent.offset, stored.extent.nbytes)
            assert torch.frombuffer(bytearray(data), dtype=torch.float32).eq(value).all()
        assert list(under(found, "model").tensors) == ["w"]
        assert under(found, "model").tree == {"w": TensorRef("w"), "n": {"step": 3}}
        assert under(found, "no such key") is found


def test_two_parts_with_one_value_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    with open_store(tmp_path) as store:
        one = torch_save.read(store, "a.pt")
    with pytest.raises(FormatError, match=r"a\.pt: w is in another file of the folder too"):
        join_catalogs("mixed", [Part((), one), Part((), one)])
    value = Catalog("json", {}, {"n": {"step": 4}}, (FileRecord("n.json", 1),))
    with pytest.raises(FormatError, match=r"n\.json: n\.step is in another file"):
        join_catalogs("mixed", [Part((), one), Part((), value)])
    other = Catalog("json", {}, {"n": {"epoch": 4}}, (FileRecord("n.json", 1),))
    assert join_catalogs("mixed", [Part((), one), Part((), other)]).tree == {
        "w": TensorRef("w"),
        "n": {"step": 3, "epoch": 4},
    }
    assert one.tree == {"w": TensorRef("w"), "n": {"step": 3}}, "the parts are unchanged"


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_name_is_not_given_twice(tied: bool) -> None:
    def catalog(file: str, name: str, tree: Tree, aliases: dict[str, str]) -> Catalog:
        record = TensorRecord(name, (0,), BY_NAME["F32"], PieceTable([]))
        return Catalog("t", {name: record}, tree, (FileRecord(file, 1),), aliases)

    one = catalog("1", "w", {"w": TensorRef("w"), "a.b": TensorRef("w")}, {"a.b": "w"})
    if tied:
        two = catalog("2", "v", {"v": TensorRef("v"), "a": {"b": TensorRef("v")}}, {"a.b": "v"})
    else:
        two = catalog("2", "a.b", {"a": {"b": TensorRef("a.b")}}, {})
    with pytest.raises(FormatError, match=r"2: a\.b is in another file"):
        join_catalogs("mixed", [Part((), one), Part((), two)])


def test_messages_name_the_sub_folder(tmp_path: Path) -> None:
    written(tmp_path)
    file = tmp_path / "inner" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with (
        open_store(tmp_path) as store,
        pytest.raises(CorruptError, match=r"^inner/model\.safetensors: "),
    ):
        below(store, "inner", lambda reader: safetensors_file.read(reader, "model.safetensors"))


def test_ties_stay_ties_below_a_key() -> None:
    tree: Tree = {"model": {"a": TensorRef("model.a"), "b": TensorRef("model.a")}, "step": 1}
    record = TensorRecord("model.a", (0,), BY_NAME["F32"], PieceTable([]))
    found = under(Catalog("t", {"model.a": record}, tree, (), {"model.b": "model.a"}), "model")
    assert (list(found.tensors), found.aliases) == (["a"], {"b": "a"})
    assert found.tree == {"a": TensorRef("a"), "b": TensorRef("a")}


def test_entries_are_those_of_a_folder_on_a_disk_and_in_a_bucket(tmp_path: Path) -> None:
    import fsspec

    written(tmp_path)
    memory = fsspec.filesystem("memory")
    try:
        memory.put(str(tmp_path) + "/", "/entries/", recursive=True)
        for url in (str(tmp_path), "memory://entries"):
            with open_store(url) as store:
                assert store.entries() == ["a.pt", "bare.pt", "inner/"]
                assert store.entries("inner") == ["model.safetensors"]
                assert store.entries("missing") == []
                assert ckpt.read(f"{url}/inner")["w"].shape == (4,)
    finally:
        memory.rm("/entries", recursive=True)
