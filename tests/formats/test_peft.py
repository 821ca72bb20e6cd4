"""Adapters, as peft 0.21 wrote them (tests/data/peft)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
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


def adapter(folder: Path, value: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"w.lora_A.weight": torch.full((2,), value)}, folder / "adapter_model.safetensors")


def test_adapters_in_sub_folders_are_one_checkpoint(tmp_path: Path) -> None:
    for name, value in (("fr", 1.0), ("de", 2.0)):
        adapter(tmp_path / "all" / name, value)
    found = ckpt.read(tmp_path / "all")
    ckpt.convert(tmp_path / "all", tmp_path / "flat", to="hf")
    assert ckpt.diff(tmp_path / "all", tmp_path / "flat").equal
    assert {name: item["w.lora_A.weight"].tolist() for name, item in found.items()} == {
        "de": [2.0, 2.0],
        "fr": [1.0, 1.0],
    }


def test_further_adapters_go_along_with_a_conversion(tmp_path: Path) -> None:
    adapter(tmp_path / "a", 1.0)
    adapter(tmp_path / "a" / "de", 2.0)
    ckpt.convert(tmp_path / "a", tmp_path / "b", to="hf")
    names = sorted(str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*.*"))
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert names == [*files, *(f"de/{name}" for name in files)]
    assert ckpt.read(tmp_path / "b" / "de")["w.lora_A.weight"].tolist() == [2.0, 2.0]
