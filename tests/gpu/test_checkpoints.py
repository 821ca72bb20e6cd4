"""Checkpoints of tensors on a device: every dtype, from one device to another, in every format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from tests import dcp_alone
from tests.gpu.states import copies, differing, leaves, like, parts, train, trained

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.parametrize("onto_host", [False, True], ids=["onto the device", "onto the host"])
def test_every_dtype_and_stride_comes_back_to_the_bit(
    tmp_path: Path, device: str, onto_host: bool
) -> None:
    state = leaves(device)
    ckpt.save(tmp_path / "c", state)
    target = like(state, "cpu" if onto_host else device)
    devices = {name: tensor.device for name, tensor in target.items()}
    found = ckpt.load(tmp_path / "c", target)
    assert differing(found, state) == []
    assert {name: tensor.device for name, tensor in found.items()} == devices


def test_what_the_host_saved_is_loaded_onto_the_device(tmp_path: Path, device: str) -> None:
    state = leaves("cpu")
    ckpt.save(tmp_path / "c", state)
    target = like(state, device)
    places = {name: tensor.data_ptr() for name, tensor in target.items()}
    found = ckpt.load(tmp_path / "c", target)
    assert differing(found, state) == []
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == places


@pytest.mark.parametrize("compress", [False, True])
def test_read_and_open_give_host_memory(tmp_path: Path, device: str, compress: bool) -> None:
    if compress:
        pytest.importorskip("zstandard")
    state = leaves(device)
    ckpt.save(tmp_path / "c", state, compress=compress)
    ckpt.verify(tmp_path / "c")
    found = ckpt.read(tmp_path / "c")
    assert {tensor.device.type for tensor in found.values()} == {"cpu"}
    assert differing(found, state) == []
    part = ckpt.open(tmp_path / "c")["transposed"][2:5, 1:3]
    assert torch.equal(part, state["transposed"][2:5, 1:3].cpu())


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_training_goes_on_to_the_bit(tmp_path: Path, device: str, options: dict[str, bool]) -> None:
    model, optimizer = trained(device, options, seed=0)
    train(model, optimizer, 0, 3)
    ckpt.save(tmp_path / "c", {"model": model, "optim": optimizer, "step": 3})
    train(model, optimizer, 3, 2)
    again, its_optimizer = trained(device, options, seed=1)
    target = {"model": again, "optim": its_optimizer, "step": 0}
    assert ckpt.load(tmp_path / "c", target)["step"] == 3
    train(again, its_optimizer, 3, 2)
    assert differing(parts(again, its_optimizer), parts(model, optimizer)) == []


def test_an_optimizers_step_stays_where_the_optimizer_keeps_it(tmp_path: Path, device: str) -> None:
    options = {"capturable": device == "cuda"}
    model, optimizer = trained(device, options, seed=0)
    train(model, optimizer, 0, 2)
    ckpt.save(tmp_path / "c", {"model": model, "optim": optimizer})
    again, its_optimizer = trained(device, options, seed=1)
    ckpt.load(tmp_path / "c", {"model": again, "optim": its_optimizer})
    before, after = (
        [state["step"].device for state in each.state.values()]
        for each in (optimizer, its_optimizer)
    )
    assert after == before
    train(again, its_optimizer, 2, 1)


def test_random_numbers_go_on_where_they_were(tmp_path: Path, device: str) -> None:
    generator = torch.Generator(device).manual_seed(7)
    torch.rand(3, device=device, generator=generator)
    ckpt.save(tmp_path / "c", {"rng": generator.get_state()})
    wanted = torch.rand(3, device=device, generator=generator)
    other = torch.Generator(device).manual_seed(8)
    other.set_state(ckpt.load(tmp_path / "c", {"rng": other.get_state()})["rng"])
    assert torch.equal(torch.rand(3, device=device, generator=other), wanted)


@pytest.mark.parametrize("kind", ["hf", "safetensors", "torch", "dcp", "ckpt"])
def test_it_is_converted_to_what_others_read(tmp_path: Path, device: str, kind: str) -> None:
    state = {"a": torch.randn(5, 7, device=device), "b": {"c": torch.arange(9, device=device)}}
    wanted = copies({"a": state["a"], "b.c": state["b"]["c"]})
    ckpt.save(tmp_path / "c", state)
    target = tmp_path / {"safetensors": "m.safetensors", "torch": "m.pt"}.get(kind, "m")
    options = {} if kind in ("safetensors", "torch") else {"to": kind}
    ckpt.convert(tmp_path / "c", target, **options)
    if kind == "torch":
        found = torch.load(target, map_location=device)
    elif kind == "dcp":
        found = {"a": torch.zeros(5, 7, device=device), "b": {"c": torch.zeros(9).long()}}
        dcp_alone.load(found, target)
    else:
        found = ckpt.read(target)
    nested = "b" in found
    assert (
        differing({"a": found["a"], "b.c": found["b"]["c"] if nested else found["b.c"]}, wanted)
        == []
    )


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_what_torch_saved_from_the_device_is_loaded_onto_it(
    tmp_path: Path, device: str, kind: str
) -> None:
    state = {"a": torch.randn(5, 7, device=device), "b": torch.randn(3, device=device).half()}
    url = tmp_path / ("m.pt" if kind == "torch" else "m")
    torch.save(state, url) if kind == "torch" else dcp_alone.save(state, url)
    found = ckpt.load(url, like(state, device))
    assert differing(found, state) == []
    assert {tensor.device.type for tensor in found.values()} == {device}
    ckpt.convert(url, tmp_path / "c", to="ckpt")
    assert differing(ckpt.read(tmp_path / "c"), state) == []


def test_a_target_of_another_shape_is_named_and_nothing_is_touched(
    tmp_path: Path, device: str
) -> None:
    ckpt.save(
        tmp_path / "c", {"a": torch.ones(4, device=device), "b": torch.ones(5, device=device)}
    )
    target = {"a": torch.zeros(4, device=device), "b": torch.zeros(6, device=device)}
    with pytest.raises(ckpt.MismatchError, match=r"(?s)b.*\(5,\).*\(6,\)"):
        ckpt.load(tmp_path / "c", target)
    assert not target["a"].any()


@pytest.mark.gpu
def test_tensors_of_several_devices_are_in_one_checkpoint(tmp_path: Path) -> None:
    state = {"host": torch.randn(9), "device": torch.randn(9, device="cuda")}
    ckpt.save(tmp_path / "c", state)
    target = {"host": torch.zeros(9, device="cuda"), "device": torch.zeros(9)}
    assert differing(ckpt.load(tmp_path / "c", target), state) == []
