"""Versions of weights as differences, for engines: `ckpt.convert(..., since=)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.torch import load_file

import ckpt

Weights = dict[str, torch.Tensor]


def weights(seed: int) -> Weights:
    """Weights of several dtypes; one is larger than a block of a copy, one has no elements."""
    torch.manual_seed(seed)
    return {
        "embed.weight": torch.randn(1500, 1000),
        "layers.0.weight": torch.randn(64, 32).bfloat16(),
        "layers.0.bias": torch.randn(()).half(),
        "layers.1.weight": torch.randint(-9, 9, (5, 7)),
        "none": torch.empty(0, 3),
    }


def changed(old: Weights) -> Weights:
    """The next version, in which one tensor stays."""
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["embed.weight"].view(-1)[::97] += 1
    new["layers.0.weight"][3] *= 2
    new["layers.1.weight"] -= 1
    return new


def apply(folder: Path, base: Weights) -> Weights:
    """Brings weights to a version, as its description says."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    told = index["metadata"]
    assert (told["delta_encoding"], told["compression_format"]) == ("xor", "zstd")
    assert told["checksum_format"] == "xxh3-128"
    assert int(told["version"]) == int(folder.name[-6:]) == int(told["base_version"]) + 1
    found = {name: tensor.clone() for name, tensor in base.items()}
    with safe_open(folder / "model.safetensors", "np") as file:
        sums = file.metadata()
        names = list(file.keys())
        assert set(names) == set(sums) == set(index["weight_map"])
        for name in names:
            frame = file.get_tensor(name)
            assert frame.dtype == np.uint8
            memory: Any = found[name].view(-1).view(torch.uint8).numpy()
            xor = zstandard.ZstdDecompressor().decompressobj().decompress(frame.tobytes())
            memory ^= np.frombuffer(xor, "u1")
            assert xxhash.xxh3_128_hexdigest(memory) == sums[name]
    return found


def same(found: Weights, expected: Weights) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_versions_as_differences_bring_the_weights_of_an_engine_to_the_bit(tmp_path: Path) -> None:
    versions = [weights(0)]
    for _ in range(2):
        versions.append(changed(versions[-1]))
    for number, version in enumerate(versions):
        ckpt.save(tmp_path / f"step-{number}", {"model": version, "step": number})
    target = tmp_path / "weight_v000000"
    ckpt.convert(tmp_path / "step-0", target, to="hf", part="model")
    held = load_file(target / "model.safetensors")
    for number in (1, 2):
        target = tmp_path / f"weight_v{number:06d}"
        ckpt.convert(
            tmp_path / f"step-{number}",
            *(target,),
            to="hf",
            part="model",
            since=tmp_path / f"step-{number - 1}",
        )
        held = apply(target, held)
        assert same(held, versions[number])
        assert (target / "model.safetensors").stat().st_size < 1_000_000  # of 6 MB
        assert (
            "layers.0.bias"
            not in json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
        )


def test_differences_have_the_names_and_dtypes_of_the_conversion(tmp_path: Path) -> None:
    old = {"w": torch.randn(8, 8), "v": torch.randn(3)}
    new = {"w": old["w"] + 1, "v": old["v"]}
    ckpt.save(tmp_path / "old", old)
    ckpt.save(tmp_path / "new", new)
    ckpt.convert(
        *(tmp_path / "new", tmp_path / "weight_v000003"),
        to="hf",
        rename={"w": "x"},
        dtype="bfloat16",
        since=tmp_path / "old",
    )
    found = apply(tmp_path / "weight_v000003", {"x": old["w"].bfloat16(), "v": old["v"].bfloat16()})
    assert same(found, {"x": new["w"].bfloat16(), "v": new["v"].bfloat16()})


@pytest.mark.parametrize(
    ("name", "old", "options", "said"),
    [
        ("weights", {"w": torch.ones(2)}, {}, "name a folder with differences after its version"),
        ("weight_v000000", {"w": torch.ones(2)}, {}, "have version 0"),
        ("weight_v000001", {"w": torch.ones(3)}, {}, r"float32 \[2\] here, and float32 \[3\]"),
        (
            "weight_v000001",
            {"w": torch.ones(2).half()},
            {},
            r"float32 \[2\] here, and float16 \[2\]",
        ),
        ("weight_v000001", {"v": torch.ones(2)}, {}, "v is missing here, and float32"),
        ("weight_v000001", {"w": torch.ones(2)}, {"verify": True}, "leave out resume="),
        ("weight_v000001", {"w": torch.ones(2)}, {"to": "dcp"}, "give to='hf'"),
    ],
)
def test_differences_that_no_reader_could_apply_are_refused_and_nothing_is_written(
    tmp_path: Path, name: str, old: Weights, options: dict[str, Any], said: str
) -> None:
    ckpt.save(tmp_path / "old", old)
    ckpt.save(tmp_path / "new", {"w": torch.ones(2)})
    with pytest.raises(ckpt.ArgumentError, match=said):
        ckpt.convert(
            tmp_path / "new", tmp_path / name, **{"to": "hf", "since": tmp_path / "old", **options}
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]
