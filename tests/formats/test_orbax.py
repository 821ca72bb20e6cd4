"""Folders of Orbax, as Orbax 0.12 wrote them (tests/data/orbax)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import CorruptError, HostileError
from ckpt.opening.sources import open_source
from ckpt.stores.store import open_store
from formats.errors import FormatError, UnsupportedError
from formats.ocdbt import crc32c, values_in

DATA = Path(__file__).parent.parent / "data" / "orbax"
EMBED = torch.arange(12.0).reshape(3, 4)


def test_arrays_in_files_of_zarr_are_tensors() -> None:
    found = ckpt.read(DATA / "zarr")
    assert torch.equal(found["params"]["embed"], EMBED)
    assert torch.equal(found["params"]["half"], torch.ones(2, 2, dtype=torch.bfloat16))
    assert found["layers"][0]["w"].tolist() == [0, 0]
    assert (found["layers"][1], found["step"].item()) == ({}, 5)


@pytest.mark.parametrize("place", ["ocdbt", "manager/5/default"])
def test_arrays_in_ocdbt_are_tensors(place: str, tmp_path: Path) -> None:
    assert ckpt.diff(DATA / "zarr", DATA / place).equal
    target = {"params": {"embed": torch.zeros(3, 4)}}
    ckpt.load(DATA / place, target, include=["params.embed"])
    assert torch.equal(target["params"]["embed"], EMBED)
    ckpt.convert(DATA / place, tmp_path / "a.pt", verify=True)
    assert torch.load(tmp_path / "a.pt")["step"].item() == 5
    assert not ckpt.verify(DATA / place).problems


def in_database(folder: Path) -> Path:
    shutil.copytree(DATA / "deep", folder / "deep")
    return folder / "deep"


def test_values_of_a_database_lie_in_nodes_of_several_heights_and_in_files(tmp_path: Path) -> None:
    with open_store(in_database(tmp_path)) as store:
        found = values_in(store)
        content = {
            key: store.read(*value[:3]) if value.data is None else value.data
            for key, value in found.items()
        }
    assert content == {f"a/{number:03d}": b"x" * (number % 40) for number in range(100)}
    assert {value.data is None for value in found.values()} == {False, True}


@pytest.mark.parametrize("at", [3, 12, 40, -1])
@pytest.mark.parametrize("name", ["manifest.ocdbt", "d"])
def test_a_damaged_database_is_named(tmp_path: Path, name: str, at: int) -> None:
    folder = in_database(tmp_path)
    path = next((folder / "d").iterdir()) if name == "d" else folder / name
    content = bytearray(path.read_bytes())
    content[at if name != "d" or at == -1 else len(content) // 2 + at] ^= 1
    path.write_bytes(content)
    with open_store(folder) as store, pytest.raises(CorruptError, match=path.name):
        values_in(store)


def test_a_database_that_ends_early_or_lacks_its_file_is_an_error(tmp_path: Path) -> None:
    folder = in_database(tmp_path)
    manifest = folder / "manifest.ocdbt"
    whole = manifest.read_bytes()
    for length in range(0, len(whole), 7):
        manifest.write_bytes(whole[:length])
        with open_store(folder) as store, pytest.raises(CorruptError, match=r"manifest\.ocdbt"):
            values_in(store)
    manifest.write_bytes(whole)
    next((folder / "d").iterdir()).unlink()
    with open_store(folder) as store, pytest.raises(CorruptError, match=r"d/\w{32}"):
        values_in(store)


def manifest_of(path: bytes, count: int = 1, kind: int = 0) -> bytes:
    """A manifest whose newest tree has its root in one file."""
    table = bytes([count, len(path), 0]) + path if count == 1 else bytes([count])
    tree = table + bytes([1, 1, 0, 0, 0, 50, 0, 0, 0]) + bytes(8)
    body = bytes(16) + bytes([kind, 1, 1, 4, 0]) + tree
    head = bytes.fromhex("0cdb3a2a") + (len(body) + 18).to_bytes(8, "little") + bytes(2)
    return head + body + crc32c(head + body).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("manifest", "error", "said"),
    [
        (manifest_of(b"../other"), HostileError, "'../other' is no file of the database"),
        (manifest_of(b"/etc/passwd"), HostileError, "is no file of the database"),
        (manifest_of(b"d/x", kind=1), FormatError, "manifests by number cannot be read"),
        (manifest_of(b"", count=120), CorruptError, "names 119 entries"),
    ],
)
def test_a_hostile_database_is_refused(
    tmp_path: Path, manifest: bytes, error: type[Exception], said: str
) -> None:
    (tmp_path / "manifest.ocdbt").write_bytes(manifest)
    with open_store(tmp_path) as store, pytest.raises(error, match=re.escape(said)):
        values_in(store)


def test_the_nodes_of_a_database_have_a_limit(tmp_path: Path) -> None:
    with (
        ckpt.limits(index_bytes=1000),
        open_store(in_database(tmp_path)) as store,
        pytest.raises(HostileError, match="index_bytes"),
    ):
        values_in(store)


def test_arrays_of_zarr_3_are_tensors() -> None:
    assert ckpt.diff(DATA / "zarr", DATA / "zarr3").equal


def sharded(folder: Path) -> Path:
    """A folder whose array `params.embed` has 10 × 7 elements, in chunks that consist of others."""
    shutil.copytree(DATA / "zarr3", folder / "c")
    shutil.rmtree(folder / "c" / "params.embed")
    shutil.copytree(DATA / "shards", folder / "c" / "params.embed")
    return folder / "c"


def test_chunks_in_chunks_are_put_together(tmp_path: Path) -> None:
    with ckpt.open(sharded(tmp_path)) as found:
        wanted = torch.arange(1.0, 71.0).reshape(10, 7)
        assert torch.equal(found["params.embed"][...], wanted)
        assert torch.equal(found["params.embed"][3:9, 2:7], wanted[3:9, 2:7])


@pytest.mark.parametrize("at", [-1, -9, 2])
def test_a_damaged_index_or_chunk_is_named(tmp_path: Path, at: int) -> None:
    folder = sharded(tmp_path)
    file = folder / "params.embed" / "c" / "1" / "0"
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError, match=r"params\.embed/c/1/0: "):
        ckpt.read(folder)
    file.write_bytes(content[-30:])
    with pytest.raises(CorruptError, match="it has no index of 4 chunks"):
        ckpt.read(folder)


def changed(folder: Path, old: str, new: str) -> Path:
    """A folder with another description of an array of zarr 3."""
    shutil.copytree(DATA / "zarr3", folder / "c")
    described = folder / "c" / "params.embed" / "zarr.json"
    text = described.read_text()
    assert old in text
    described.write_text(text.replace(old, new))
    return folder / "c"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"name":"zstd"', '"name":"blosc"'),
        ('"endian":"little"', '"endian":"big"'),
        ("float32", "int4"),
        ('"index_codecs":', '"index_location":"start","index_codecs":'),
        ('"name":"regular"', '"name":"rectilinear"'),
    ],
)
def test_other_arrays_are_shown_and_not_loaded(tmp_path: Path, old: str, new: str) -> None:
    folder = changed(tmp_path, old, new)
    with open_source(folder) as source:
        assert "params.embed" not in source.catalog.tensors
        assert "[3, 4]" in str(source.catalog.tree)
        [note] = source.catalog.notes
        assert "PyTreeCheckpointHandler()" in note
    with pytest.raises(ckpt.MismatchError, match="embed"):
        ckpt.load(folder, {"params": {"embed": torch.zeros(3, 4)}}, include=["params.embed"])


def test_absurd_chunks_of_zarr_3_are_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zarr3", folder := tmp_path / "c")
    described = folder / "params.embed" / "zarr.json"
    text = described.read_text()
    described.write_text(text.replace("[1,2]", "[1,3]", 1))
    with pytest.raises(FormatError, match="do not divide"):
        ckpt.read(folder)
    described.write_text(text.replace('"shape":[3,4]', '"shape":[1048576,1048576]'))
    with pytest.raises(HostileError, match="chunks"):
        ckpt.read(folder)


def copied(folder: Path) -> Path:
    shutil.copytree(DATA / "zarr", folder / "zarr")
    return folder / "zarr"


def array(folder: Path, **changes: object) -> None:
    """Changes the description of the array `params.embed`."""
    file = folder / "params.embed" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_chunks_without_compression_are_put_together(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    array(folder, chunks=[2, 3], compressor=None)
    (folder / "params.embed" / "0.0").unlink()
    padded = torch.zeros(4, 6)
    padded[:3, :4] = EMBED
    for row in (0, 1):
        for column in (0, 1):
            part = padded[2 * row : 2 * row + 2, 3 * column : 3 * column + 3].contiguous()
            file = folder / "params.embed" / f"{row}.{column}"
            file.write_bytes(part.numpy().tobytes())
    assert torch.equal(ckpt.read(folder)["params"]["embed"], EMBED)
    ckpt.convert(folder, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["params"]["embed"], EMBED)


def test_the_limit_of_a_chunk_counts_the_bytes_that_are_decoded(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    with ckpt.limits(chunk_bytes=EMBED.nbytes):
        ckpt.read(folder)
    with (
        ckpt.limits(chunk_bytes=EMBED.nbytes - 1),
        pytest.raises(HostileError, match=r"embed/0\.0: a chunk: chunk_bytes would be 48"),
    ):
        ckpt.read(folder)
    array(folder, compressor=None)
    (folder / "params.embed" / "0.0").write_bytes(EMBED.numpy().tobytes())
    with ckpt.limits(chunk_bytes=16), ckpt.open(folder) as opened:
        assert torch.equal(opened["params.embed"][...], EMBED), "stored chunks are read by ranges"


def test_a_missing_array_is_named(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    shutil.rmtree(folder / "params.embed")
    with pytest.raises(CorruptError, match=r"params\.embed/\.zarray: it is missing"):
        ckpt.read(folder)


def test_a_missing_chunk_is_named(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "params.embed" / "0.0").unlink()
    with pytest.raises(CorruptError, match=r"params\.embed/0\.0: the chunk is missing"):
        ckpt.read(folder)


def test_an_empty_chunk_is_named(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zarr", tmp_path / "c")
    (tmp_path / "c" / "params.embed" / "0.0").write_bytes(b"")
    with pytest.raises(CorruptError, match=r"params\.embed/0\.0: the chunk has 0 bytes"):
        ckpt.read(tmp_path / "c")


def test_a_chunk_of_other_bytes_is_named(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "params.embed" / "0.0").write_bytes(b"x" * 40)
    with pytest.raises(CorruptError, match=r"params\.embed/0\.0: .*zstd"):
        ckpt.read(folder)


def test_another_compressor_is_shown(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    array(folder, compressor={"id": "blosc"})
    with open_source(folder) as source:
        assert "params.embed" not in source.catalog.tensors
        assert "'<f4' [3, 4]" in str(source.catalog.tree)


def test_absurd_chunks_are_hostile(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    array(folder, chunks=[1, 1], shape=[1 << 20, 1 << 20])
    with pytest.raises(HostileError, match="chunks"):
        ckpt.read(folder)


@pytest.mark.parametrize("name", ["c.safetensors", "c.npz", "c.gguf"])
def test_weights_of_which_none_can_be_read_are_refused(tmp_path: Path, name: str) -> None:
    folder = copied(tmp_path)
    for described in folder.glob("*/.zarray"):
        described.write_text(described.read_text().replace("zstd", "blosc"))
    with pytest.raises(UnsupportedError, match=r"5 objects are shown and never made \(layers"):
        ckpt.convert(folder, tmp_path / name)
    assert not (tmp_path / name).exists()
