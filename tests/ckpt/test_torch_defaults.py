"""What a program has set as torch's defaults changes nothing of what is saved and read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.old_torch import reset_default_device

ROWS = 300_000
"""Of 8 bytes: more than what is read for one cast at a time."""


def state() -> dict[str, Any]:
    made: dict[str, Any] = {
        "w": torch.arange(24.0, device="cpu", dtype=torch.float32).reshape(6, 4),
        "wide": torch.arange(ROWS, device="cpu", dtype=torch.int64),
        "eighth": torch.arange(16.0, device="cpu").to(torch.float8_e4m3fn),
        "none": torch.empty(0, 3, device="cpu", dtype=torch.bfloat16),
        "step": 3,
    }
    return made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_same(found: Any, wanted: dict[str, Any]) -> bool:
    """To the bit, type and device."""
    return all(
        found[name].dtype == value.dtype
        and found[name].device.type == "cpu"
        and torch.equal(bits(found[name]), bits(value))
        if isinstance(value, torch.Tensor)
        else found[name] == value
        for name, value in wanted.items()
    )


@pytest.fixture(params=["meta", torch.float64])
def _defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    if isinstance(request.param, str):
        torch.set_default_device(request.param)
        yield
        reset_default_device()
    else:
        torch.set_default_dtype(request.param)
        yield
        torch.set_default_dtype(torch.float32)


pytestmark = pytest.mark.usefixtures("_defaults")


@pytest.mark.parametrize("how", [{}, {"compress": True}, {"blocking": False}], ids=str)
def test_what_is_saved_is_read(tmp_path: Path, how: dict[str, Any]) -> None:
    handle = ckpt.save(tmp_path, state(), **how)
    if handle is not None:
        handle.wait()
    assert ckpt.verify(tmp_path).sound
    assert is_same(ckpt.read(tmp_path), state())
    assert is_same(ckpt.load(tmp_path, None), state())
    with ckpt.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["w"][3:5, ::2], state()["w"][3:5, ::2])
    halves: Any = ckpt.read(tmp_path, dtype=torch.float16)
    assert halves["w"].dtype == torch.float16


def test_what_is_saved_fills_a_target(tmp_path: Path) -> None:
    ckpt.save(tmp_path, state())
    target = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        for name, value in state().items()
    }
    assert is_same(ckpt.load(tmp_path, target), state())


def test_a_target_of_another_type_or_with_steps_is_filled_by_way_of_a_copy(tmp_path: Path) -> None:
    ckpt.save(tmp_path, state())
    wide = torch.zeros(ROWS, 2, device="cpu", dtype=torch.int32)[:, 0]
    doubles = torch.zeros(6, 4, device="cpu", dtype=torch.float64)
    target = {"w": doubles, "wide": wide}
    ckpt.load(tmp_path, target, include=["w", "wide"], dtype="target", casting="unsafe")
    assert torch.equal(doubles, state()["w"].double())
    assert torch.equal(wide, state()["wide"].int())


def test_a_module_and_its_optimizer_go_on(tmp_path: Path) -> None:
    def made(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Linear(3, 2, device="cpu", dtype=torch.float32)
        for parameter in module.parameters():
            nn.init.constant_(parameter, value)
            parameter.grad = torch.ones_like(parameter)
        return module, torch.optim.Adam(module.parameters())

    model, optimizer = made(1.0)
    with torch.device("cpu"):
        optimizer.step()
    ckpt.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, its = made(2.0)
    ckpt.load(tmp_path, {"model": other, "optimizer": its})
    assert is_same(other.state_dict(), model.state_dict())
    for mine, theirs in zip(its.state.values(), optimizer.state.values(), strict=True):
        assert is_same(mine, theirs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("m.safetensors", {}),
        ("m.pt", {}),
        ("hf", {"to": "hf"}),
        ("dcp", {"to": "dcp"}),
        ("native", {"compress": True}),
    ],
)
def test_what_is_saved_is_converted_cast_and_compared(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    ckpt.save(tmp_path / "a", state())
    ckpt.convert(tmp_path / "a", tmp_path / name, **options)
    found: Any = ckpt.read(tmp_path / name)
    assert is_same(found, {key: value for key, value in state().items() if key != "step"})
    ckpt.convert(tmp_path / "a", tmp_path / "cast", dtype="bfloat16")
    cast: Any = ckpt.read(tmp_path / "cast")
    assert torch.equal(cast["w"], state()["w"].bfloat16())
    assert list(ckpt.diff(tmp_path / "a", tmp_path / "cast").tensors)


def test_states_in_memory_are_converted_and_loaded() -> None:
    held: Any = ckpt.state_dict.convert(state(), "full")
    assert is_same(held, state())
    target = {"w": torch.zeros(6, 4, device="cpu", dtype=torch.float64)}
    ckpt.state_dict.load(state(), target, include=["w"], dtype="target")
    assert torch.equal(target["w"], state()["w"].double())
