"""Adapters of PEFT as checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tools.main import main

peft = pytest.importorskip("peft", reason="the tests of ckpt.integrations.peft need peft")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.v_proj = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.v_proj(self.q_proj(x))  # type: ignore[no-any-return]


def model_of(seed: int, rank: int = 4) -> Any:
    """A model with an adapter whose tensors depend on the seed."""
    model = peft.get_peft_model(Base(), peft.LoraConfig(target_modules=["q_proj"], r=rank))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter)
    return model


def adapter_of(model: Any) -> dict[str, list[float]]:
    return {name: one.tolist() for name, one in model.named_parameters() if "lora" in name}


def test_an_adapter_is_filled_in_place_and_the_base_model_is_not_stored(tmp_path: Path) -> None:
    from ckpt.integrations.peft import load_adapter, save_adapter

    saved, loaded = model_of(1), model_of(2)
    save_adapter(tmp_path, saved, metadata=None)
    load_adapter(tmp_path, loaded)
    assert adapter_of(loaded) == adapter_of(saved)
    with ckpt.open(tmp_path) as stored:
        assert all("lora" in name for name in stored)
        assert '"r": 4' in stored.metadata["peft_config"]
    with pytest.raises(ckpt.MismatchError, match="lora_A"):
        load_adapter(tmp_path, model_of(2, rank=2))
    with pytest.raises(ckpt.ArgumentError, match=r"\['default'\]"):
        save_adapter(tmp_path / "other", saved, adapter="missing")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["PromptTuning", "PromptEncoder", "PrefixTuning"])
def test_the_parameters_from_which_peft_computes_prompts_are_filled(
    kind: str, tmp_path: Path
) -> None:
    """PEFT's own state dict has only the results, which are no parameters of the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ckpt.integrations.peft import load_adapter, save_adapter

    def made(seed: int) -> Any:
        sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
        language = LlamaForCausalLM(
            LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
        )
        config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=4)
        model = peft.get_peft_model(language, config)
        torch.manual_seed(seed)
        for parameter in model.prompt_encoder.parameters():
            nn.init.normal_(parameter)
        return model

    saved, loaded = made(1), made(2)
    save_adapter(tmp_path, saved)
    load_adapter(tmp_path, loaded)
    state = loaded.prompt_encoder.state_dict()
    assert all(
        torch.equal(value, state[name]) for name, value in saved.prompt_encoder.state_dict().items()
    )


def test_with_a_base_only_what_has_changed_is_written(tmp_path: Path) -> None:
    from ckpt.integrations.peft import load_adapter, save_adapter

    model = model_of(1)
    save_adapter(tmp_path / "1", model)
    with torch.no_grad():
        model.base_model.model.q_proj.lora_B["default"].weight.add_(1)
    save_adapter(tmp_path / "2", model, base=tmp_path / "1")
    sizes = [
        sum(e.stat().st_size for e in os.scandir(tmp_path / n) if e.name.endswith("tensors"))
        for n in "12"
    ]
    assert sizes[1] < sizes[0]
    loaded = model_of(3)
    load_adapter(tmp_path / "2", loaded)
    assert adapter_of(loaded) == adapter_of(model)


def test_peft_loads_what_convert_makes_of_an_adapter(tmp_path: Path) -> None:
    from ckpt.integrations.peft import save_adapter

    model, folder = model_of(1), tmp_path / "adapter"
    save_adapter(tmp_path / "1", model)
    folder.mkdir()
    assert main(["convert", str(tmp_path / "1"), str(folder / "adapter_model.safetensors")]) == 0
    model.peft_config["default"].save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(Base(), folder, is_trainable=True)
    assert adapter_of(loaded) == adapter_of(model)
