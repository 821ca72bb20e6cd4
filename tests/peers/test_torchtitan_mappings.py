"""Models of torchtitan 0.2 compute from converted weights the logits of transformers.

No extra installs torchtitan, which needs triton on the processor too. These tests run in an
environment of `make test-peers` after `pip install torchtitan==0.2.2 triton tensorboard`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import ckpt

pytest.importorskip("torchtitan.models.llama4", reason="torchtitan 0.2 owns the names")
transformers = pytest.importorskip("transformers", reason="the owner of the weights")
pytestmark = pytest.mark.filterwarnings("default")

HIDDEN, HEADS, GROUPS, VOCAB, LENGTH, FFN = 32, 4, 2, 64, 16, 48
HF: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
COMMON: dict[str, Any] = {
    "dim": HIDDEN,
    "n_layers": 2,
    "n_heads": HEADS,
    "vocab_size": VOCAB,
    "max_seq_len": LENGTH,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
MODELS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        HF | {"intermediate_size": 96},
        "llama3.model.model:Transformer",
        COMMON | {"n_kv_heads": GROUPS, "multiple_of": 16},
        {},
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        HF | {"head_dim": 16},
        "qwen3.model.model:Qwen3Model",
        COMMON | {"n_kv_heads": GROUPS, "head_dim": 16, "hidden_dim": FFN},
        {},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        HF
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "norm_topk_prob": True},
        "qwen3.model.model:Qwen3Model",
        COMMON
        | {"n_kv_heads": GROUPS, "head_dim": 16, "hidden_dim": FFN}
        | {"moe_enabled": True, "moe_inter_dim": 16},
        {"num_shared_experts": 0, "score_func": "softmax", "route_norm": True, "top_k": 2},
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        HF
        | {"num_key_value_heads": HEADS, "v_head_dim": 16, "moe_intermediate_size": 16}
        | {"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
        | LATENT,
        "deepseek_v3.model.model:DeepSeekV3Model",
        COMMON | LATENT | {"v_head_dim": 16, "inter_dim": FFN, "moe_inter_dim": 16},
        {"num_shared_experts": 2, "route_norm": True, "route_scale": 2.5, "top_k": 2},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        HF
        | EXPERTS
        | {"head_dim": 16, "sliding_window": 4}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        "gpt_oss.model.model:GptOssModel",
        COMMON
        | {"n_kv_heads": GROUPS, "head_dim": 16, "moe_inter_dim": FFN}
        | {"sliding_window_size": 4, "rope_factor": 1.0},
        {"num_shared_experts": 0, "score_func": "softmax", "gate_bias": True, "top_k": 2}
        | {"route_norm": True},
    ),
    "llama-4": (
        "Llama4ForCausalLM",
        HF
        | {"intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1}
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "no_rope_layers": [1, 1]}
        | {"attn_temperature_tuning": False, "head_dim": 8, "attention_chunk_size": LENGTH},
        "llama4.model.model:Transformer",
        COMMON | {"n_kv_heads": GROUPS, "multiple_of": 16, "interleave_moe_layer_step": 2},
        {"num_shared_experts": 1, "top_k": 1},
    ),
}
MAPPINGS = {
    "llama": "llama-hf-torchtitan",
    "qwen3": "qwen3-hf-torchtitan",
    "qwen3-moe": "qwen3-hf-torchtitan",
    "deepseek": "deepseekv3-hf-torchtitan",
    "gpt-oss": "gptoss-hf-torchtitan",
    "llama-4": "llama4-hf-torchtitan",
}


def torchtitan_model(name: str) -> Any:
    """A model on the processor, without the kernels of a GPU."""
    _, _, place, sizes, experts = MODELS[name]
    module, _, cls = place.partition(":")
    module = import_module(f"torchtitan.models.{module}")
    kind = getattr(module, cls)
    args = kind.__init__.__annotations__["model_args"]
    args = getattr(module, args) if isinstance(args, str) else args
    given = dict(sizes)
    if experts:
        moe = import_module("torchtitan.models.moe").MoEArgs
        bias = {} if name == "deepseek" else {"load_balance_coeff": None}
        given["moe_args"] = moe(
            **{"num_experts": 4, "use_grouped_mm": False, "score_before_experts": name == "llama-4"}
            | bias
            | experts
        )
    made = args(**given)
    if name == "llama":
        made.rope_scaling_args.scaling_factor = 1.0
    if name == "deepseek":
        made.rope_factor, made.moe_impl = 1.0, "standard"
    return kind(made).float().eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan.models.attention import FlexAttentionWrapper

    histc = torch.histc  # counts no integers on the processor
    monkeypatch.setattr(torch, "histc", lambda x, **given: histc(x.float(), **given).long())
    monkeypatch.setattr(FlexAttentionWrapper, "_compiled_flex_attn", flex_attention)
    cls, sizes, *_ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, cls).config_class(**sizes)).eval()
    with torch.no_grad():
        biases = (one for key, one in model.named_buffers() if "correction_bias" in key)
        for parameter in [*model.parameters(), *biases]:
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "hf")
    mapping = MAPPINGS[name]
    ckpt.convert(tmp_path / "hf", tmp_path / "t.pt", mapping="auto-hf-torchtitan", verify=True)
    there = torchtitan_model(name)
    there.load_state_dict(torch.load(tmp_path / "t.pt", weights_only=True))
    ids = torch.randint(VOCAB, (2, LENGTH))
    masks = there.get_attention_masks(ids, None) if name == "gpt-oss" else None
    with torch.no_grad():
        torch.testing.assert_close(there(ids, masks), model(ids).logits, atol=1e-4, rtol=1e-4)
    back = "-".join([mapping.split("-")[0], "torchtitan", "hf"])
    config = tmp_path / "hf"
    ckpt.convert(tmp_path / "t.pt", tmp_path / "back", to="hf", mapping=back, config=config)
    assert ckpt.diff(tmp_path / "hf", tmp_path / "back").equal
