"""A load takes a mapping: each rank reads the bytes of its shards from tensors of other shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.mapping.rules import parse_mapping
from sharding.errors import ArgumentError

TRAINER = Path(__file__).parents[1] / "data" / "trainer" / "checkpoint-2"
MAPPING = """
[[rule]]
from = ["h.*.q", "h.*.k"]
to = "layers.*.qk"
rearrange = "(groups *) ... -> (groups *) ..."
sizes = { groups = 2 }
[[rule]]
from = "h.{layer}.out"
to = "out"
rearrange = "i o -> layer o i"
"""


def tensors() -> dict[str, torch.Tensor]:
    found = {}
    for layer in range(2):
        found[f"h.{layer}.q"] = torch.arange(24.0).reshape(8, 3) + 100 * layer
        found[f"h.{layer}.k"] = torch.arange(12.0).reshape(4, 3) + 50 + 100 * layer
        found[f"h.{layer}.out"] = torch.arange(15.0).reshape(5, 3) + 100 * layer
    return found


def expected() -> dict[str, torch.Tensor]:
    given = tensors()
    found = {"out": torch.stack([given["h.0.out"].T, given["h.1.out"].T])}
    for layer in range(2):
        parts = [given[f"h.{layer}.{name}"].reshape(2, -1, 3) for name in "qk"]
        found[f"layers.{layer}.qk"] = torch.cat(parts, 1).reshape(12, 3)
    return found


def load_shards(file: str, dim: int) -> list[str]:
    """The names whose shards are not what they should be."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target: dict[str, Any] = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(dim)])
        for name, tensor in expected().items()
    }
    ckpt.load(file, {"model": target}, mapping=parse_mapping(MAPPING, "m").below("model"))
    return [
        name
        for name, tensor in expected().items()
        if not torch.equal(
            target[name].to_local(), distribute_tensor(tensor, mesh, [Shard(dim)]).to_local()
        )
    ]


@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_load_shards_of_mapped_tensors(clusters: Callable, tmp_path: Path, dim: int) -> None:
    save_file(tensors(), tmp_path / "m.safetensors")
    assert clusters(3).run(load_shards, str(tmp_path / "m.safetensors"), dim) == [[], [], []]


def test_a_mapping_that_does_not_fit_leaves_the_target(tmp_path: Path) -> None:
    given = {name: tensor for name, tensor in tensors().items() if name != "h.0.k"}
    save_file(given, tmp_path / "m.safetensors")
    target = {"layers.0.qk": torch.zeros(12, 3)}
    with pytest.raises(ArgumentError, match=r"h\.0\.k of the same rule is missing"):
        ckpt.load(tmp_path / "m.safetensors", target, mapping=parse_mapping(MAPPING, "m"))
    assert not target["layers.0.qk"].any()


def test_an_open_checkpoint_has_the_names_and_shapes_of_a_mapping(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "m.safetensors")
    mapping = parse_mapping(MAPPING, "m")
    with ckpt.open(tmp_path / "m.safetensors", mapping=mapping) as found:
        assert set(found) == set(expected())
        for name, tensor in expected().items():
            assert found[name].shape == tensor.shape
            assert torch.equal(found[name][1:], tensor[1:])
    read: Any = ckpt.read(tmp_path / "m.safetensors", mapping=mapping, include="layers.*")
    assert {name: value.tolist() for name, value in read.items()} == {
        name: value.tolist() for name, value in expected().items() if name != "out"
    }
    with pytest.raises(ArgumentError, match="no mapping file"):
        ckpt.open(tmp_path / "m.safetensors", mapping=tmp_path / "none.toml")


def test_a_mapping_takes_the_weights_of_a_training_s_folder() -> None:
    mapped = ckpt.read(TRAINER, mapping="llama-hf-torchtitan")
    assert set(mapped) == set(
        ckpt.read(TRAINER / "model.safetensors", mapping="llama-hf-torchtitan")
    )  # type: ignore[call-overload]


def test_sizes_and_renames_of_a_load_are_those_of_a_conversion(tmp_path: Path) -> None:
    ckpt.convert(
        TRAINER / "model.safetensors",
        tmp_path / "c",
        mapping="llama-hf-torchtitan",
        rename={"output": "head"},
        parameters={"heads": 2, "kv_heads": 1},
    )
    wanted: Any = ckpt.read(tmp_path / "c")
    target = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    ckpt.load(
        TRAINER,
        target,
        mapping=["llama-hf-torchtitan"],
        parameters={"heads": 2, "kv_heads": 1},
        rename={"output": "head"},
    )
    assert all(torch.equal(target[name], tensor) for name, tensor in wanted.items())
