"""`ckpt.merge`: the weighted sum of checkpoints of any formats, written to any format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.converting import weighted_sum

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64)
WEIGHTS = (0.5, -0.3, 0.8)
ADAPTER = "adapter_model.safetensors"


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes, of which one has whole numbers and one no elements."""
    made = torch.Generator().manual_seed(seed)
    found = {
        str(dtype).removeprefix("torch."): torch.randn(37, 5, 3, generator=made).to(dtype)
        for dtype in DTYPES
    }
    return found | {"steps": torch.arange(7), "empty": torch.zeros(0, 3)}


def reference(states: list[dict[str, torch.Tensor]], by: tuple[float, ...]) -> dict[str, Any]:
    """The sum by torch, of whole tensors."""
    found = {}
    for name, first in states[0].items():
        if not (first.is_floating_point() or first.is_complex()):
            found[name] = first
            continue
        wide = torch.promote_types(first.dtype, torch.float32)
        total = states[0][name].to(wide) * by[0]
        for state, weight in zip(states[1:], by[1:], strict=True):
            total = total + state[name].to(wide) * weight
        found[name] = total.to(first.dtype)
    return found


def save_as(kind: str, place: Path, state: dict[str, torch.Tensor]) -> Path:
    """Saves a state in a format."""
    if kind == "ckpt":
        ckpt.save(place, state)
    elif kind == "torch":
        place = place.with_suffix(".pt")
        torch.save(state, place)
    else:
        place = place.with_suffix(".safetensors")
        save_file(state, place)
    return place


@pytest.mark.parametrize(
    "to",
    [
        "safetensors",
        *(pytest.param(to, marks=pytest.mark.thorough) for to in ("ckpt", "hf", "dcp")),
    ],
)
def test_a_merge_of_any_formats_is_the_sum_by_torch_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    monkeypatch.setattr(weighted_sum, "BLOCK_BYTES", 1003)  # parts that cut elements in two
    states = [weights(seed) for seed in range(3)]
    kinds = zip(("ckpt", "torch", "safetensors"), states, strict=True)
    places = [save_as(kind, tmp_path / f"m{n}", state) for n, (kind, state) in enumerate(kinds)]
    report = ckpt.merge(places, tmp_path / "out", weights=WEIGHTS, to=to, verify=to != "hf")
    found: Any = ckpt.read(tmp_path / "out")
    expected = reference(states, WEIGHTS)
    assert report.tensors == len(expected)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def merge_on_ranks(folder: str) -> None:
    """On each rank: saves tensors cut by columns, and merges with the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for seed in range(2):
        state = {
            name: distribute_tensor(tensor, mesh, [Shard(1)]) if tensor.dim() == 3 else tensor
            for name, tensor in weights(seed).items()
        }
        large = torch.full((600, 500), float(seed))
        state["l.weight"] = distribute_tensor(large, mesh, [Shard(1)])
        ckpt.save(f"{folder}/run/step-{seed}", {"model": state, "seed": seed})
    how: Any = {"last": 2, "part": "model", "group": None, "lora": f"{folder}/adapter"}
    ckpt.merge([f"{folder}/run"], f"{folder}/adapted-2.safetensors", **how)
    ckpt.merge([f"{folder}/run"], f"{folder}/by-2.safetensors", **how | {"lora": ()})


@pytest.mark.thorough
def test_several_ranks_merge_to_equal_bits(clusters: Callable[[int], Any], tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", factors_of("l", 600, 500, 0))
    clusters(2).run(merge_on_ranks, str(tmp_path))
    ckpt.merge([tmp_path / "run"], tmp_path / "by-1.safetensors", last=2, part="model")
    run, out = [tmp_path / "run"], tmp_path / "adapted-1.safetensors"
    ckpt.merge(run, out, last=2, part="model", lora=adapter)
    for name in ("by", "adapted"):
        one, two = (tmp_path / f"{name}-{ranks}.safetensors" for ranks in (1, 2))
        assert one.read_bytes() == two.read_bytes()
    found, expected = (
        load_file(tmp_path / "by-1.safetensors"),
        reference([weights(0), weights(1)], (0.5, 0.5)),
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_exponential_average_counts_the_newest_step_most(tmp_path: Path) -> None:
    for step, value in enumerate((1.0, 2.0, 6.0)):
        ckpt.save(tmp_path / f"run/step-{step}", {"w": torch.tensor([value])})
    ckpt.merge([tmp_path / "run"], tmp_path / "out", last=3, ema=0.5)
    assert ckpt.read(tmp_path / "out") == {"w": torch.tensor([1 * 0.25 + 2 * 0.25 + 6 * 0.5])}


def test_a_difference_is_added_to_the_bit_and_minus_zero_stays(tmp_path: Path) -> None:
    base = {"w": torch.tensor([1.0, -0.0, 3.0])}
    for name, state in (("a", base), ("b", {"w": torch.tensor([2.0, 0.0, 5.0])})):
        ckpt.save(tmp_path / name, state)
    urls = [tmp_path / name for name in "aba"]
    ckpt.merge(urls, tmp_path / "out", weights=(1, 0.5, -0.5))
    assert ckpt.read(tmp_path / "out")["w"].tolist() == [1.5, 0.0, 4.0]  # type: ignore[index, call-overload]
    ckpt.merge([tmp_path / "a"], tmp_path / "same")
    assert ckpt.diff(tmp_path / "a", tmp_path / "same", read_all=True).equal


def save_adapter(place: Path, factors: dict[str, torch.Tensor], **config: object) -> Path:
    """Saves an adapter as PEFT does. The names of factors begin with the module."""
    place.mkdir()
    save_file({f"base_model.model.{name}": one for name, one in factors.items()}, place / ADAPTER)
    shown = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, **config}
    (place / "adapter_config.json").write_text(json.dumps(shown))
    return place


def factors_of(module: str, rows: int, columns: int, seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    a, b = torch.randn(3, columns, generator=made), torch.randn(rows, 3, generator=made)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def test_an_adapter_is_folded_in_to_equal_bits_whatever_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighted_sum, "TILE_ELEMENTS", 90)  # tiles of two rows, and one of one
    base = {name: torch.randn(11, 40).bfloat16() for name in ("q.weight", "c.weight", "v.weight")}
    ckpt.save(tmp_path / "base", {"model": base})
    first = factors_of("q", 11, 40, 1) | factors_of("c", 11, 40, 2)
    adapters = [
        save_adapter(tmp_path / "a", first, alpha_pattern={"c": 12}),
        save_adapter(tmp_path / "b", factors_of("q", 40, 11, 3), fan_in_fan_out=True),
    ]
    for parts, block in enumerate((1 << 20, 403)):
        monkeypatch.setattr(weighted_sum, "BLOCK_BYTES", block)
        ckpt.merge([tmp_path / "base"], tmp_path / f"{parts}.pt", lora=adapters, verify=True)
    assert ckpt.diff(tmp_path / "0.pt", tmp_path / "1.pt").equal
    found: Any = ckpt.read(tmp_path / "0.pt")
    second = factors_of("q", 40, 11, 3)
    q = 2 * first["q.lora_B.weight"] @ first["q.lora_A.weight"]
    q += 2 * (second["q.lora_B.weight"] @ second["q.lora_A.weight"]).T
    c = 4 * first["c.lora_B.weight"] @ first["c.lora_A.weight"]
    for name, added in (("q", q), ("c", c), ("v", torch.zeros(()))):
        expected = (base[f"{name}.weight"].float() + added).bfloat16()
        torch.testing.assert_close(found["model"][f"{name}.weight"], expected)


@pytest.mark.parametrize(
    ("factors", "config", "problem"),
    [
        (factors_of("x", 4, 5, 0), {}, r"x\.weight \(no tensor has this name\)"),
        (factors_of("q", 4, 6, 0), {}, r"q\.weight .*shape \(4, 5\), and the product \(4, 6\)"),
        (factors_of("n", 4, 5, 0), {}, r"n\.weight \(it is int64\)"),
        (factors_of("tied", 4, 5, 0), {}, r"tied\.weight \(it is tied to another name"),
        ({"q.lora_A.weight": torch.ones(3, 5)}, {}, r"q\.weight \(the adapter has no two matrices"),
        ({"q.bias": torch.ones(4)}, {}, r"no plain LoRA adapter .*q\.bias; merge it with PEFT's"),
        (factors_of("q", 4, 5, 0), {"use_dora": True}, "no plain LoRA adapter of PEFT: use_dora"),
        (factors_of("q", 4, 5, 0), {"peft_type": "LOHA"}, "no plain LoRA adapter of PEFT: peft_t"),
        (factors_of("q", 4, 5, 0), {"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        (factors_of("q", 4, 5, 0), {"alpha_pattern": {"(q|v)+": 1}}, "the regular expression"),
    ],
)
def test_an_adapter_that_cannot_be_folded_in_is_refused_by_name(
    tmp_path: Path, factors: dict[str, torch.Tensor], config: dict[str, object], problem: str
) -> None:
    weight = torch.ones(4, 5)
    number = torch.ones(4, 5, dtype=torch.int64)
    state = {"q.weight": torch.ones(4, 5), "n.weight": number, "tied.weight": weight}
    ckpt.save(tmp_path / "base", {"model": state | {"head": weight}})
    adapter = save_adapter(tmp_path / "adapter", factors, **config)
    with pytest.raises((ckpt.ArgumentError, ckpt.UnsupportedError), match=problem):
        ckpt.merge([tmp_path / "base"], tmp_path / "out", lora=adapter)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"w": torch.ones(2), "n": torch.tensor([2])}, "n is int64, and its elements differ"),
        ({"w": torch.ones(3), "n": torch.tensor([1])}, r"w has the shapes \(2,\) and \(3,\)"),
        ({"n": torch.tensor([1])}, "w is not in .*b"),
        ({"w": torch.ones(2), "n": torch.ones(1)}, "n is int64 and float32"),
    ],
)
def test_what_has_no_sum_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, other: dict[str, torch.Tensor], problem: str
) -> None:
    ckpt.save(tmp_path / "a", {"w": torch.ones(2), "n": torch.tensor([1]), "v": torch.ones(1)})
    ckpt.save(tmp_path / "b", other | {"v": torch.zeros(1)})
    urls = [tmp_path / name for name in "ab"]
    for dry_run in (True, False):
        with pytest.raises(ckpt.ArgumentError, match=problem):
            ckpt.merge(urls, tmp_path / "out", dry_run=dry_run)
    assert not (tmp_path / "out").exists()
    ckpt.merge(urls, tmp_path / "out", include="v")
    assert ckpt.read(tmp_path / "out") == {"v": torch.tensor([0.5])}


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"weights": [1.0]}, "2 checkpoints have 1 weights"),
        ({"weights": [1.0, float("nan")]}, "give finite numbers"),
        ({"weights": [1.0, 1.0], "ema": 0.5}, "in place of weights"),
        ({"ema": 1.5}, "ema=1.5; give a decay from 0 to 1"),
        ({"last": 2}, "last=2 of 2 sources"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, how: dict[str, Any], problem: str) -> None:
    for name in "ab":
        ckpt.save(tmp_path / name, {"w": torch.ones(2)})
    with pytest.raises(ckpt.ArgumentError, match=problem):
        ckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", **how)
    with pytest.raises(ckpt.ArgumentError, match="has 0 checkpoints, and last=1"):
        ckpt.merge([tmp_path], tmp_path / "out", last=1)


def test_damage_in_any_source_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    for name in "ab":
        ckpt.save(tmp_path / name, {"w": torch.ones(300)})
    [shard] = (tmp_path / "b").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ckpt.CorruptError, match=r"b/.*w: bytes"):
        ckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out.safetensors")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]
