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
pytestmark = pytest.mark.thorough


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


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_merge_folds_an_adapter_in_as_peft_does(family: str, tmp_path: Path) -> None:
    import transformers

    from ckpt.integrations.peft import save_adapter

    torch.manual_seed(1)
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=24,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=False,
        )
        modules = ["q_proj", "down_proj", "embed_tokens"]
        more = {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"layers.1.self_attn.q_proj": 5}}
    else:
        config = transformers.GPT2Config(
            n_embd=8, n_layer=2, n_head=2, vocab_size=24, n_positions=8
        )
        modules, more = ["c_attn", "mlp.c_fc"], {"fan_in_fan_out": True, "use_rslora": True}
    base = transformers.AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    ckpt.save(tmp_path / "run", {"net": base})
    lora = peft.LoraConfig(target_modules=modules, r=4, lora_alpha=7, **more)
    model = peft.get_peft_model(base, lora)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    adapter = tmp_path / "adapter"
    if family == "gpt2":  # PEFT's state dict has the embedding as well, if it has an adapter
        adapter = tmp_path / "saved"
        save_adapter(adapter, model)
    ckpt.merge([tmp_path / "base"], tmp_path / "merged", lora=tmp_path / "adapter", to="hf")
    ckpt.merge([tmp_path / "run"], tmp_path / "of-run", lora=adapter, select="net")
    expected = model.merge_and_unload()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    stored: Any = ckpt.read(tmp_path / "of-run")
    assert all(torch.equal(stored[name], found[name]) for name in stored)
