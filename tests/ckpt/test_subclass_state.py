"""Optimizer state that is made of other tensors: saved, loaded into a fresh optimizer, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import ckpt
from ckpt.state.subclass_state import CLASS, put_together, taken_apart


class Quantized(torch.Tensor):
    """Codes of 8 bits and a scale for every block of a row."""

    codes: torch.Tensor
    scale: torch.Tensor
    signed: bool

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], list[object]]:
        return ["codes", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: list[Any], size: object, stride: object
    ) -> Quantized:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Quantized:
        [self] = args  # detach, alias and the like: no arithmetic is needed here
        return cls(self.codes, self.scale, self.signed)


def trained() -> dict[str, Any]:
    model = nn.Linear(4, 3)
    optim = SGD(model.parameters(), lr=0.1)
    codes = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    moment = Quantized(codes, torch.tensor([0.5, 2.0, 4.0]), signed=True)
    optim.state[model.weight] = {"moment": moment, "step": 3}
    return {"model": model, "optim": optim}


def fresh() -> dict[str, Any]:
    model = nn.Linear(4, 3)
    return {"model": model, "optim": SGD(model.parameters(), lr=0.5)}


def check(state: dict[str, Any]) -> None:
    loaded = state["optim"].state[state["model"].weight]
    assert loaded["step"] == 3
    assert type(loaded["moment"]) is Quantized
    assert loaded["moment"].signed is True
    assert loaded["moment"].codes.tolist() == torch.arange(12).reshape(3, 4).tolist()
    assert loaded["moment"].scale.tolist() == [0.5, 2.0, 4.0]


def test_it_is_saved_by_its_tensors_and_made_again_in_a_fresh_optimizer(tmp_path: Path) -> None:
    ckpt.save(tmp_path, trained())
    stored = ckpt.read(tmp_path)["optim"]["state"]["weight"]["moment"]
    assert stored["tensors"]["codes"].dtype == torch.uint8
    assert stored[CLASS].endswith(":Quantized")
    check(ckpt.load(tmp_path, fresh()))


def test_it_goes_from_memory_to_memory(tmp_path: Path) -> None:
    target = fresh()
    ckpt.state_dict.load(ckpt.state_dict.convert(trained(), to="local"), target)
    check(target)


def test_a_class_that_nobody_imported_is_a_difference(tmp_path: Path) -> None:
    state = ckpt.state_dict.convert(trained(), to="full")
    state["optim"]["state"]["weight"]["moment"][CLASS] = "os:system"
    target = fresh()
    with pytest.raises(ckpt.MismatchError, match="os:system in the checkpoint, which this program"):
        ckpt.state_dict.load(state, target)
    assert not target["optim"].state


def test_elsewhere_it_is_refused_by_name(tmp_path: Path) -> None:
    moment = trained()["optim"].state_dict()["state"][0]["moment"]
    with pytest.raises(ckpt.StateError, match=r"state\['m'\]: a Quantized wraps other tensors"):
        ckpt.save(tmp_path, {"m": moment})


def test_what_is_made_of_nothing_else_stays_as_it_is() -> None:
    tensor = torch.ones(2)
    assert taken_apart(tensor) is tensor
    assert put_together({"a": [tensor, 3]})["a"][0] is tensor
