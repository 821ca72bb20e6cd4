"""Folders of Orbax, as Orbax 0.12 wrote them (tests/data/orbax)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import CorruptError, HostileError
from ckpt.opening.sources import open_source
from formats.errors import UnsupportedError

DATA = Path(__file__).parent.parent / "data" / "orbax"
EMBED = torch.arange(12.0).reshape(3, 4)


def test_arrays_in_files_of_zarr_are_tensors() -> None:
    found = ckpt.read(DATA / "zarr")
    assert torch.equal(found["params"]["embed"], EMBED)
    assert torch.equal(found["params"]["half"], torch.ones(2, 2, dtype=torch.bfloat16))
    assert found["layers"][0]["w"].tolist() == [0, 0]
    assert (found["layers"][1], found["step"].item()) == ({}, 5)


@pytest.mark.parametrize("place", ["ocdbt", "manager/5"])
def test_arrays_in_ocdbt_are_shown(place: str) -> None:
    with open_source(DATA / place) as source:
        assert not source.catalog.tensors
        assert "jax.Array, written in parts of shape [3, 4]" in str(source.catalog.tree)
        [note] = source.catalog.notes
        assert "use_ocdbt=False" in note


def test_arrays_in_ocdbt_are_not_loaded() -> None:
    with pytest.raises(ckpt.MismatchError, match="embed"):
        ckpt.load(
            DATA / "ocdbt", {"params": {"embed": torch.zeros(3, 4)}}, include=["params.embed"]
        )


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
        pytest.raises(HostileError, match=r"zarray: a chunk: chunk_bytes would be 48"),
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
    with pytest.raises(UnsupportedError, match=r"5 objects are shown and never made \(layers"):
        ckpt.convert(DATA / "ocdbt", tmp_path / name)
    assert not (tmp_path / name).exists()
