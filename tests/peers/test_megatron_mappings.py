"""Megatron-core computes the same logits from converted weights as transformers does.

`make test-peers` installs Megatron-core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.mapping.rules import Rule, TensorMapping

pytest.importorskip("megatron.core", reason="make test-peers installs Megatron-core")
transformers = pytest.importorskip("transformers", reason="the owner of the weights")
pytestmark = pytest.mark.filterwarnings("default")

LAYERS, HIDDEN, FFN, HEADS, GROUPS, VOCAB, LENGTH, EXPERTS = 2, 32, 48, 4, 2, 64, 16, 3
HF: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
GPT2: dict[str, Any] = {
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "vocab_size": VOCAB,
    "n_positions": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GATED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "num_query_groups": GROUPS,
}


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The approximation of GPT-2."""
    return torch.nn.functional.gelu(x, approximate="tanh")


MODELS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", HF, "llama-hf-megatron", GATED),
    "qwen2": ("Qwen2ForCausalLM", HF, "qwen2-hf-megatron", GATED | {"add_qkv_bias": True}),
    "qwen3": (
        "Qwen3ForCausalLM",
        HF | {"head_dim": 16},
        "qwen3-hf-megatron",
        GATED | {"qk_layernorm": True, "kv_channels": 16},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        HF | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
        "mixtral-hf-megatron",
        GATED | {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN},
    ),
    "mistral": ("MistralForCausalLM", HF | {"sliding_window": None}, "llama-hf-megatron", GATED),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        HF
        | {
            "head_dim": 16,
            "moe_intermediate_size": FFN,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        "qwen3moe-hf-megatron",
        GATED
        | {"qk_layernorm": True, "kv_channels": 16, "num_moe_experts": EXPERTS}
        | {"moe_router_topk": 2, "moe_ffn_hidden_size": FFN},
    ),
    "gpt2": ("GPT2LMHeadModel", GPT2, "gpt2-hf-megatron", {"activation_func": gelu}),
}


NORM = ("decoder.layers.*.mlp.linear_fc1.layer_norm_weight",)
LOCAL_NORMS = TensorMapping("local", (Rule(NORM, ("decoder.layers.*.pre_mlp_layernorm.weight",)),))
"""Local layers store the norm before experts as that of a dense MLP."""


@pytest.fixture(scope="module")
def parallel_state() -> Iterator[None]:
    """One rank, as Megatron-core needs it."""
    from megatron.core import parallel_state

    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def megatron_model(options: dict[str, Any]) -> torch.nn.Module:
    """A GPTModel with local layers, on the CPU."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    is_gpt2 = "gated_linear_unit" not in options
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=4 * HIDDEN if is_gpt2 else FFN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        layernorm_epsilon=1e-5,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **options,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=options.get("num_moe_experts"),
        moe_grouped_gemm=False,
        qk_layernorm=options.get("qk_layernorm", False),
        normalization=options.get("normalization"),
    )
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        share_embeddings_and_output_weights=is_gpt2,
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(
    name: str, tmp_path: Path, parallel_state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    # Megatron-core's forward asks for a GPU: for buffers, and for the random state of dropout. Its
    # router asks for Transformer Engine.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda *_: nullcontext())
    router = "megatron.core.transformer.moe.moe_utils.te_general_gemm"
    monkeypatch.setattr(router, None, raising=False)
    cls, sizes, mapping, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, cls).config_class(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "hf")
    ckpt.convert(tmp_path / "hf", tmp_path / "m.pt", mapping=[mapping, "megatron-te-local"])
    there = megatron_model(options).eval()
    state: Any = torch.load(tmp_path / "m.pt", weights_only=True)
    missing = there.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all("_extra_state" in key for key in missing.missing_keys)
    ids = torch.randint(VOCAB, (2, LENGTH))
    places = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        torch.testing.assert_close(
            there(ids, places, mask), model(ids).logits, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_layers_together_have_the_names_and_shapes_of_torch_dist(
    name: str, tmp_path: Path, parallel_state: None
) -> None:
    model = megatron_model(MODELS[name][3])
    state = {key: value for key, value in model.state_dict().items() if "_extra_state" not in key}
    torch.save(state, tmp_path / "m.pt")
    ckpt.convert(
        tmp_path / "m.pt", tmp_path / "d.pt", mapping=["megatron-local-te", "megatron-layers-dist"]
    )
    with ckpt.open(tmp_path / "d.pt") as found:
        shapes = {key: handle.shape for key, handle in found.items()}
    sharded = {
        one.key: tuple(one.global_shape)
        for one in leaves_of(model.sharded_state_dict())
        if "_extra_state" not in one.key
    }
    assert shapes == sharded


def leaves_of(nest: Any) -> Iterator[Any]:
    """The ShardedTensors of a sharded state dict, with those that its factories make."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(nest, dict):
        for item in nest.values():
            yield from leaves_of(item)
    elif isinstance(nest, list | tuple):
        for item in nest:
            yield from leaves_of(item)
    elif isinstance(nest, ShardedTensorFactory):
        yield from leaves_of(nest.build())
    elif isinstance(nest, ShardedTensor):
        yield nest


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3-moe"])
def test_a_torch_dist_folder_becomes_the_hugging_face_folder(
    name: str, tmp_path: Path, parallel_state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import dist_checkpointing

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    cls, sizes, mapping, options = MODELS[name]
    hf = getattr(transformers, cls)(getattr(transformers, cls).config_class(**sizes))
    hf.save_pretrained(tmp_path / "hf")
    ckpt.convert(tmp_path / "hf", tmp_path / "m.pt", mapping=[mapping, "megatron-te-local"])
    model = megatron_model(options)
    model.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True), strict=False)
    (tmp_path / "dist").mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(tmp_path / "dist"))
    model_name = mapping.split("-")[0]
    norms = [LOCAL_NORMS] if "num_moe_experts" in options else []
    between = ["megatron-dist-layers", *norms, f"{model_name}-megatron-hf"]
    ckpt.convert(
        tmp_path / "dist",
        tmp_path / "back",
        to="hf",
        mapping=between,
        parameters={"heads": HEADS, "kv_heads": GROUPS},
        verify=True,
    )
    assert ckpt.diff(tmp_path / "hf", tmp_path / "back").equal
