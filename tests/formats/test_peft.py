"""Adapters, as peft 0.21 wrote them (tests/data/peft)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.data.peft.write import weights

DATA = Path(__file__).parents[1] / "data" / "peft"


@pytest.mark.parametrize("name", ["adapter", "adapter-bin"])
def test_an_adapter_is_read_and_verified(name: str) -> None:
    found: Any = ckpt.read(DATA / name)
    assert {key: tensor.tolist() for key, tensor in found.items()} == weights()
    report = ckpt.verify(DATA / name)
    assert report.sound
    assert report.notes == ("not checked: adapter_config.json",)


def test_an_adapter_from_a_training_is_one_that_peft_loads(tmp_path: Path) -> None:
    state = {name: torch.tensor(rows) + 1 for name, rows in weights().items()}
    bare = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}
    ckpt.save(tmp_path / "step", {"model": {**bare, "layer.weight": torch.zeros(4, 3)}})
    report = ckpt.convert(
        tmp_path / "step",
        tmp_path / "adapter",
        to="hf",
        part="model",
        include="*lora*",
        prefix="base_model.model",
        config=DATA / "adapter" / "adapter_config.json",
    )
    assert report.model_files == ("adapter_config.json",)
    there = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert there == {"adapter_config.json", "adapter_model.safetensors"}
    peft = pytest.importorskip("peft", reason="peft is in the extra of the tests")
    model = peft.PeftModel.from_pretrained(Base(), tmp_path / "adapter")
    loaded = peft.get_peft_model_state_dict(model)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


class Base(nn.Module):
    """The model of tests/data/peft/write.py."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
