"""`ckpt.id`: equal weights have equal digests, whatever holds them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from tools.main import main

DTYPES = ("float32", "bfloat16", "complex64", "int64", "bool", "int16", "float8_e4m3fn")


def weights() -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    whole = torch.randn(9, 4, generator=made)
    return {name: whole.to(getattr(torch, name)) for name in DTYPES} | {"none": torch.ones(0, 2)}


def save_on_ranks(folder: str) -> Any:
    """On each rank: saves cut tensors, and returns the identity of those in memory."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cuts = (Shard(0), Shard(1), Replicate())
    state = {}
    for number, (name, tensor) in enumerate(weights().items()):
        if tensor.numel() and tensor.element_size() < 4:  # gloo does not move all of these
            raw, cut = tensor.view(torch.uint8), cuts[number % 2]
            parts = list(raw.view(9, 4, -1).chunk(dist.get_world_size(), cut.dim))
            local = parts[dist.get_rank()].flatten(1).contiguous().view(tensor.dtype)
            sizes = {"shape": tensor.shape, "stride": tensor.stride()}
            state[name] = DTensor.from_local(local, mesh, [cut], run_check=False, **sizes)
        elif number < 6:
            state[name] = distribute_tensor(tensor, mesh, [cuts[number % 3]])
        else:
            state[name] = tensor
    ckpt.save(f"{folder}/cut", {"model": state, "step": 3})
    return ckpt.id(state)


@pytest.mark.thorough
def test_formats_world_sizes_and_memory_have_one_identity(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    state = weights()
    expected = ckpt.id(state)
    assert set(expected.tensors) == set(state)
    assert clusters(2).run(save_on_ranks, str(tmp_path)) == [expected] * 2
    assert ckpt.id(tmp_path / "cut", select="model") == expected
    torch.save({"model": state}, tmp_path / "t.pt")
    assert ckpt.id(tmp_path / "t.pt", select="model") == expected
    for to in ("dcp", "safetensors", "ckpt"):
        ckpt.convert(tmp_path / "t.pt", tmp_path / to, to=to, select="model", compress=to == "ckpt")  # type: ignore[arg-type]
        assert ckpt.id(tmp_path / to) == expected, to


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 35), st.sampled_from(["name", "shape", "bit"]))
def test_each_change_of_a_name_a_shape_or_a_bit_is_another_identity(
    dtype: str, at: int, what: str
) -> None:
    state, other = weights(), weights()
    if what == "name":
        other[f"{dtype}2"] = other.pop(dtype)
    elif what == "shape":
        other[dtype] = other[dtype].reshape(4, 9)
    else:
        raw = other[dtype].view(torch.uint8).view(-1)
        raw[at % len(raw)] ^= 1
    assert ckpt.id(state).digest != ckpt.id(other).digest


def test_a_module_has_the_identity_of_its_checkpoint_with_tied_weights(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.BatchNorm1d(3)})
    model["c"] = nn.Linear(3, 3, bias=False)
    model["c"].weight = model["a"].weight
    ckpt.save(tmp_path / "c", {"model": model, "optim": torch.optim.SGD(model.parameters())})
    assert ckpt.id(tmp_path / "c", select="model") == ckpt.id(model)
    assert ckpt.id({"model": model}, include="model.a.*") == ckpt.id(
        tmp_path / "c", include="model.a.*"
    )
    with torch.no_grad():
        model["a"].weight.neg_()
    assert ckpt.id(tmp_path / "c", select="model") != ckpt.id(model)
    view = {"w": torch.randn(4, 3, dtype=torch.complex64).mH}
    assert ckpt.id(view) == ckpt.id({"w": view["w"].resolve_conj().contiguous()})


def test_what_has_no_identity_is_an_error(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "c", {"w": torch.ones(300)})
    for of in (tmp_path / "c", {"w": torch.ones(3)}):
        with pytest.raises(ckpt.ArgumentError, match="has no tensor below 'model'"):
            ckpt.id(of, select="model")
        with pytest.raises(ckpt.ArgumentError, match="matches no name"):
            ckpt.id(of, include="v")
    with pytest.raises(ckpt.ArgumentTypeError, match=r"a\.b is a list"):
        ckpt.id({"a": {"b": [1]}})
    [shard] = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ckpt.CorruptError, match="w: bytes"):
        ckpt.id(tmp_path / "c")


def test_the_command_prints_lines_as_sha256sum_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt.save(tmp_path / "c", {"w": torch.ones(3), "v": torch.zeros(1)})
    found = ckpt.id(tmp_path / "c")
    assert main(["id", "-v", str(tmp_path / "c")]) == 0
    lines = [f"{digest}  {name}" for name, digest in found.tensors.items()]
    assert capsys.readouterr().out.splitlines() == [*lines, f"{found}  {tmp_path / 'c'}"]
    assert main(["id", "--json", "--include", "v", str(tmp_path / "c")]) == 0
    [one] = json.loads(capsys.readouterr().out)
    assert one["tensors"] == {"v": found.tensors["v"]}
