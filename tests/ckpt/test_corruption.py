"""Damage of any kind, anywhere in a checkpoint, is an error that names the file and the tensor."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt

SEED = 20261


def state(seed: int = 0) -> dict[str, Any]:
    """Sharded, replicated, tied, tiny and empty tensors, and values."""
    generator = torch.Generator().manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    tied = torch.ones(70)
    return {
        "model": {
            "w": distribute_tensor(
                torch.randn(50, 7, generator=generator), mesh, [Shard(0)], src_data_rank=None
            ),
            "half": torch.randn(300, generator=generator).bfloat16(),
            "head": tied,
            "embed": tied,
            "empty": torch.zeros(0, 3),
            "zeros": torch.zeros(500),
        },
        "scalars": [torch.tensor(3), torch.tensor(True)],
        "step": 12,
        "text": "some text",
    }


def save(folder: str, compress: bool, seed: int = 0) -> None:
    ckpt.save(folder, state(seed), compress=compress)


@pytest.fixture(scope="module")
def checkpoints(
    clusters: Callable, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, bytes]]:
    """The files of a checkpoint of two ranks: raw, compressed, and of another attempt."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, compress, seed in (("raw", False, 0), ("zstd", True, 0), ("other", False, 1)):
        clusters(2).run(save, str(folder / name), compress, seed)
    return {
        checkpoint.name: {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())}
        for checkpoint in folder.iterdir()
    }


def write(folder: Path, files: dict[str, bytes]) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def damage_at(folder: Path) -> str:
    """What loading everything into memory of its own says is damaged."""
    with pytest.raises(ckpt.CorruptError) as error:
        ckpt.load(folder, {})
    return str(error.value)


def tensor_at(folder: Path, file: str, at: int) -> str | None:
    """The tensor whose data has byte `at` of a file; None where no tensor's has."""
    with ckpt.open(folder) as checkpoint:
        for name, record in checkpoint.catalog.tensors.items():
            for stored in record.pieces:
                extent = stored.extent
                chunks = extent.chunks
                stored_bytes = sum(chunks[i].stored_bytes for i in range(len(chunks or ())))  # type: ignore[index]
                if extent.file == file and extent.offset <= at < extent.offset + stored_bytes:
                    return name
    return None


@pytest.mark.thorough
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_each_of_many_flipped_bits_is_found_and_named(
    checkpoints: dict[str, dict[str, bytes]], tmp_path: Path, codec: str
) -> None:
    files = checkpoints[codec]
    whole, broken = write(tmp_path / "whole", files), write(tmp_path / "broken", files)
    assert isinstance(ckpt.load(whole, {}), dict)
    chance = random.Random(SEED)
    in_tensors = 0
    for flip in range(150):
        file = sorted(files)[flip % len(files)]
        bit = chance.randrange(8 * len(files[file]))
        data = bytearray(files[file])
        data[bit // 8] ^= 1 << bit % 8
        (broken / file).write_bytes(data)
        message = damage_at(broken)
        assert f"{broken}/{file}" in message, (file, bit)
        tensor = tensor_at(whole, file, bit // 8)
        if tensor is not None:
            assert f"{file}: {tensor}: bytes" in message, (file, bit)
            in_tensors += 1
        (broken / file).write_bytes(files[file])
    assert in_tensors > 20
    assert isinstance(ckpt.load(broken, {}), dict)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_truncated_file_and_one_with_bytes_behind_it_are_named(
    checkpoints: dict[str, dict[str, bytes]], tmp_path: Path, codec: str
) -> None:
    files, chance = checkpoints[codec], random.Random(SEED)
    for file, data in files.items():
        for size in (0, 1, len(data) - 1, *(chance.randrange(len(data)) for _ in range(10))):
            folder = write(tmp_path / "broken", {**files, file: data[:size]})
            assert f"{folder}/{file}" in damage_at(folder), (file, size)
        for more in (b"\0", b" ", b"}", bytes(5000)):
            folder = write(tmp_path / "broken", {**files, file: data + more})
            assert f"{folder}/{file}" in damage_at(folder), (file, more[:1])


def test_a_missing_file_is_named(checkpoints: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    files = checkpoints["raw"]
    for file in files:
        folder = write(tmp_path / "broken", {k: v for k, v in files.items() if k != file})
        if file == "manifest.json":
            with pytest.raises(ckpt.NotACheckpointError, match="an unfinished save"):
                ckpt.load(folder, {})
        else:
            assert f"{folder}/{file}: the file is missing" in damage_at(folder)


def test_files_that_belong_elsewhere_are_named(
    checkpoints: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    files, others = checkpoints["raw"], checkpoints["other"]
    first, second = (name for name in files if name.endswith(".safetensors"))
    swapped = {**files, first: files[second], second: files[first]}
    assert first in damage_at(write(tmp_path / "swapped", swapped))
    # A file of the same rank, size and header, written by another attempt.
    other = next(name for name in others if name.endswith(first[16:]))
    assert len(others[other]) == len(files[first])
    mixed = {**files, first: others[other]}
    assert f"{first}: its header" in damage_at(write(tmp_path / "mixed", mixed))
    manifest = {**files, "manifest.json": others["manifest.json"]}
    assert "the file is missing" in damage_at(write(tmp_path / "manifest", manifest))


def test_nothing_of_the_target_is_touched_when_a_file_is_damaged_in_its_structure(
    checkpoints: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    files = checkpoints["raw"]
    second = [name for name in files if name.endswith(".safetensors")][1]
    folder = write(tmp_path / "broken", {**files, second: files[second][:-1]})
    target = ckpt.read(write(tmp_path / "whole", files))
    assert isinstance(target, dict)
    target["model"]["w"].fill_(5.0)
    with pytest.raises(ckpt.CorruptError) as error:
        ckpt.load(folder, target)
    assert not isinstance(error.value, ckpt.PartialLoadError)
    assert (target["model"]["w"] == 5).all()


def load_damaged(folder: str) -> tuple[str, str]:
    try:
        ckpt.load(folder, state(3))
    except (ckpt.CorruptError, ckpt.RankError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_damage_that_one_rank_meets_reaches_all(
    clusters: Callable, checkpoints: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    files = checkpoints["raw"]
    second = [name for name in files if name.endswith(".safetensors")][1]
    folder = write(tmp_path / "broken", files)
    data = bytearray(files[second])
    with ckpt.open(folder) as checkpoint:
        pieces = list(checkpoint["model.w"].record.pieces)
    data[next(p.extent.offset for p in pieces if p.extent.file == second)] ^= 1
    (folder / second).write_bytes(data)
    first, other = clusters(2).run(load_damaged, str(folder))
    assert first[0] == "RankError"
    assert other[0] == "DamagedLoadError"
    for _, message in (first, other):
        assert f"{second}: model.w: bytes" in message
