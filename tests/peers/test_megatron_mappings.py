"""Megatron-core computes the same logits from converted weights as transformers does, and back.

`make test-peers` installs Megatron-core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

import ckpt
from ckpt.mapping.rules import Rule, TensorMapping
from tests.conftest import Cluster
from tests.mapping.shards import differing_shards

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


class CoreAttention(torch.nn.Module):
    """Attention with keys and values of two sizes, which Megatron-core's local layers lack."""

    def __init__(self, *_: object, softmax_scale: float | None = None, **__: object) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        """Returns [length, batch, heads * size], of [length, batch, heads, size]."""
        parts = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, scale=self.scale
        )
        return found.permute(2, 0, 1, 3).flatten(2)


class ZeroCentred(torch.nn.Module):
    """The norm of Gemma, which multiplies by 1 + weight."""

    def __init__(self, config: object, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x over its root mean square."""
        return torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


def with_norms_behind(layer: Any) -> Any:
    """The block of layers whose attention and MLP end in a norm, as Megatron-Bridge builds it."""
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    class Normed(RowParallelLinear):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            self.post_layernorm = ZeroCentred(None, args[1], 1e-5)

        def forward(self, x: torch.Tensor) -> Any:
            out, bias = super().forward(x)
            return self.post_layernorm(out), bias

    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCentred
    attention = parts.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = ZeroCentred
    attention.linear_proj = parts.mlp.submodules.linear_fc2 = Normed
    return TransformerBlockSubmodules(layer_specs=[layer] * LAYERS, layer_norm=ZeroCentred)


def with_norms_of_all_heads(layer: Any) -> Any:
    """The layer whose queries and keys have one norm each, as Megatron-Bridge builds OLMoE."""
    from megatron.core.transformer.attention import SelfAttention

    class Attention(SelfAttention):
        def __init__(self, config: Any, submodules: Any, *args: Any, **given: Any) -> None:
            super().__init__(config, submodules, *args, **given)
            norm, size = submodules.q_layernorm, self.hidden_size_per_attention_head
            heads = (self.num_attention_heads_per_partition, self.num_query_groups_per_partition)
            self.q_layernorm, self.k_layernorm = (
                norm(config=config, hidden_size=count * size, eps=1e-5) for count in heads
            )

        def get_query_key_value_tensors(
            self, hidden_states: torch.Tensor, *_: Any, **__: Any
        ) -> Any:
            mixed = self.linear_qkv(hidden_states)[0].unflatten(-1, (GROUPS, -1, HIDDEN // HEADS))
            q, k, v = mixed.split([HEADS // GROUPS, 1, 1], -2)
            q = self.q_layernorm(q.flatten(2)).unflatten(-1, (HEADS, -1))
            k = self.k_layernorm(k.flatten(2)).unflatten(-1, (GROUPS, -1))
            return q, k, v.squeeze(-2)

    layer.submodules.self_attention.module = Attention
    return layer


class OnTheProcessor(TorchFunctionMode):
    """Makes tensors on the processor that Megatron-core asks for on a GPU."""

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        return func(*args, **given)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The activation of Nemotron."""
    return torch.relu(x).square()


class GatedNorm(torch.nn.Module):
    """The norm of groups in a Mamba layer, whose kernel is that of a GPU in Megatron-core."""

    def __init__(self, size: int, eps: float, group_size: int, **_: object) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps
        self.groups = size // group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x, each group over its root mean square."""
        parts = x.unflatten(-1, (self.groups, -1))
        return (
            torch.nn.functional.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2)
            * self.weight
        )


def scan(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    decay: torch.Tensor,
    headdim: int,
    ngroups: int,
    **given: Any,
) -> torch.Tensor:
    """The recurrence of Mamba 2, a step at a time, in the place of the kernel of mamba_ssm."""
    heads, (rows, width) = len(decay), weight.shape
    inner = heads * headdim
    z, xbc, dt = zxbcdt.split([inner, rows, heads], -1)
    padded = torch.nn.functional.pad(xbc.mT, (width - 1, 0))
    xbc = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=rows).mT
    x, b, c = torch.nn.functional.silu(xbc).split([inner, *[(rows - inner) // 2] * 2], -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (
        one.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, -2) for one in (b, c)
    )
    dt = torch.nn.functional.softplus(dt + dt_bias)
    state, found = torch.zeros(*x.shape[:1], heads, headdim, b.shape[-1]), []
    for at in range(x.shape[1]):
        kept = state * (dt[:, at] * decay).exp()[..., None, None]
        state = kept + (dt[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        found.append((state * c[:, at, :, None]).sum(-1) + given["D"][:, None] * x[:, at])
    return torch.stack(found, 1).flatten(2) * torch.nn.functional.silu(z)


def mamba_model(config: Any, layers: str, local: Any) -> torch.nn.Module:
    """A MambaModel of local layers: M for Mamba, * for attention, - for an MLP, E for experts."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    dense, experts = (local(number).submodules for number in (None, config.num_moe_experts))
    mixer = MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(MambaMixer, submodules=mixer),
        mamba_bda=get_bias_dropout_add,
    )
    attention = TransformerLayerSubmodules(
        input_layernorm=dense.input_layernorm,
        self_attention=dense.self_attention,
        self_attn_bda=get_bias_dropout_add,
    )
    mlp, moe = (
        TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm, mlp=one.mlp, mlp_bda=get_bias_dropout_add
        )
        for one in (dense, experts)
    )
    stack = MambaStackSubmodules(
        ModuleSpec(MambaLayer, submodules=mamba),
        ModuleSpec(TransformerLayer, submodules=attention),
        ModuleSpec(MLPLayer, submodules=mlp),
        ModuleSpec(TransformerLayer, submodules=moe),
    )
    spec = ModuleSpec(MambaStack, submodules=stack)
    return MambaModel(config, spec, VOCAB, LENGTH, hybrid_override_pattern=layers)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """The activation of gpt-oss."""
    return x * torch.sigmoid(1.702 * x)


ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 16,
}
PARTIAL = {"rope_parameters": HF["rope_parameters"] | {"partial_rotary_factor": 0.5}}
TWO_KINDS = ("sliding_attention", "full_attention")
WINDOWS = {"layer_types": list(TWO_KINDS), "sliding_window": 4}
SCORED: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1],
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
"""Dense layers first, then experts whose scores have a bias, as DeepSeek-V3 introduced them."""


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
    "olmoe": (
        "OlmoeForCausalLM",
        HF | {"intermediate_size": 16, "num_experts": EXPERTS, "num_experts_per_tok": 2},
        "qwen3moe-hf-megatron",
        GATED
        | {"qk_layernorm": True, "num_moe_experts": EXPERTS, "moe_router_topk": 2}
        | {"moe_ffn_hidden_size": 16, "moe_router_pre_softmax": True},
    ),
    "gpt2": ("GPT2LMHeadModel", GPT2, "gpt2-hf-megatron", {"activation_func": gelu}),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        HF | ROUTED | {"num_key_value_heads": HEADS} | LATENT,
        "deepseekv3-hf-megatron",
        GATED
        | SCORED
        | {"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope"}
        | {"num_query_groups": HEADS, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 8}
        | {"qk_pos_emb_head_dim": 4, "v_head_dim": 16, "rotary_scaling_factor": 1.0},
    ),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        HF
        | ROUTED
        | LATENT
        | {"num_key_value_heads": HEADS, "q_lora_rank": None, "norm_topk_prob": False},
        "deepseekv3-hf-megatron",
        GATED
        | {key: one for key, one in SCORED.items() if "score_f" not in key and "bias" not in key}
        | {"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope"}
        | {"num_query_groups": HEADS, "q_lora_rank": None, "kv_lora_rank": 8, "qk_head_dim": 8}
        | {"qk_pos_emb_head_dim": 4, "v_head_dim": 16, "rotary_scaling_factor": 1.0}
        | {"moe_router_pre_softmax": True},
    ),
    "glm-4.5": (
        "Glm4MoeForCausalLM",
        HF | ROUTED | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True} | PARTIAL,
        "glm4moe-hf-megatron",
        GATED | SCORED | {"qk_layernorm": True, "kv_channels": 16, "add_qkv_bias": True},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        HF | {"head_dim": 16, "num_local_experts": EXPERTS, "num_experts_per_tok": 2} | WINDOWS,
        "gptoss-hf-megatron",
        GATED
        | {"kv_channels": 16, "num_moe_experts": EXPERTS, "moe_router_topk": 2}
        | {"moe_ffn_hidden_size": FFN, "add_bias_linear": True, "activation_func": quick_gelu}
        | {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
        | {"softmax_type": "learnable", "window_size": (3, 0), "window_attn_skip_freq": 2},
    ),
    "llama-4": (
        "Llama4ForCausalLM",
        HF
        | {"intermediate_size": 16, "intermediate_size_mlp": FFN, "head_dim": 16}
        | {"num_local_experts": EXPERTS, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
        | {"no_rope_layers": [1, 1], "attn_temperature_tuning": False, "use_qk_norm": True}
        | {"attention_chunk_size": LENGTH, "tie_word_embeddings": False},
        "llama4-hf-megatron",
        GATED
        | {"kv_channels": 16, "rotary_interleaved": True, "qk_l2_norm": True}
        | {"num_moe_experts": EXPERTS, "moe_layer_freq": [0, 1], "moe_router_topk": 1}
        | {"moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 16}
        | {"moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True},
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        {key: HF[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
        | {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": 16}
        | {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5}
        | {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "chunk_size": 8},
        "nemotronh-hf-megatron",
        {key: one for key, one in SCORED.items() if key != "moe_layer_freq"}
        | {"normalization": "RMSNorm", "activation_func": squared_relu, "add_bias_linear": False}
        | {"num_query_groups": GROUPS, "kv_channels": 16, "gated_linear_unit": False}
        | {"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 8}
        | {"moe_shared_expert_intermediate_size": 16, "num_layers": 4, "is_hybrid_model": True},
    ),
    "gemma-3": (
        "Gemma3ForCausalLM",
        HF
        | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": LENGTH}
        | {"rope_parameters": dict.fromkeys(TWO_KINDS, HF["rope_parameters"])},
        "gemma3-hf-megatron",
        GATED | {"qk_layernorm": True, "kv_channels": 16, "activation_func": gelu},
    ),
}
SHARED = ("gpt2-hf-megatron", "gemma3-hf-megatron")
"""The models whose output layer has the embedding's weight."""

FURTHER = ("deepseek", "glm-4.5")
"""The models whose files have a layer for the prediction of further tokens."""
NO_DIST = ("qwen2", "mistral", "gpt2", "gemma-3")
"""The models whose folder of Megatron-core no test writes."""


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


@pytest.fixture(autouse=True)
def on_the_processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes from Megatron-core the need for a GPU and for Transformer Engine."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda *_: nullcontext())
    router = "megatron.core.transformer.moe.moe_utils.te_general_gemm"
    monkeypatch.setattr(router, None, raising=False)
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)
    if "nemotron-h" not in request.node.name:
        return
    pytest.importorskip("einops", reason="Megatron-core's Mamba layers need it")
    with monkeypatch.context() as importing:
        if find_spec("triton") is None:  # for kernels that are not called
            importing.setitem(sys.modules, "triton", MagicMock())
            importing.setitem(sys.modules, "triton.language", MagicMock())
        block, mixer = (import_module(f"megatron.core.ssm.mamba_{n}") for n in ("block", "mixer"))
    monkeypatch.setattr(block, "TENorm", WrappedTorchNorm)
    monkeypatch.setattr(mixer, "HAVE_MAMBA_SSM", True)
    monkeypatch.setattr(mixer, "ExtendedRMSNorm", GatedNorm)
    monkeypatch.setattr(mixer, "mamba_split_conv1d_scan_combined", scan, raising=False)


def megatron_model(name: str, **more: Any) -> torch.nn.Module:
    """A GPTModel with local layers, on the CPU."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    _, _, mapping, options = MODELS[name]
    is_gpt2, is_gemma = name == "gpt2", name == "gemma-3"
    is_latent = "multi_latent_attention" in options
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        num_layers=options.get("num_layers", LAYERS),
        hidden_size=HIDDEN,
        ffn_hidden_size=4 * HIDDEN if is_gpt2 else FFN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        layernorm_epsilon=1e-5,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **{key: one for key, one in options.items() if key != "num_layers"},
        **more,
    )
    if name == "nemotron-h":
        local = partial(get_gpt_layer_local_spec, normalization="RMSNorm")
        return mamba_model(config, "ME*-", local).eval()
    spec = (
        get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization="RMSNorm",
            qk_l2_norm=config.qk_l2_norm,
        )
        if "moe_layer_freq" in options
        else get_gpt_layer_local_spec(
            num_experts=options.get("num_moe_experts"),
            moe_grouped_gemm=False,
            qk_layernorm=options.get("qk_layernorm", False),
            normalization=options.get("normalization"),
        )
    )
    if is_gemma:
        spec = with_norms_behind(spec)
    if name == "olmoe":
        spec = with_norms_of_all_heads(spec)
    if is_latent:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CoreAttention
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        share_embeddings_and_output_weights=mapping in SHARED,
        rotary_percent=0.5 if name == "glm-4.5" else 1.0,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False) if more else None,
    )
    if is_gemma:
        model.embedding.register_forward_hook(lambda _, __, out: out * HIDDEN**0.5)
    return model.eval()


def pretrained(name: str, folder: Path) -> Any:
    """The model of transformers, which it saves in a folder, with random weights."""
    cls, sizes, _, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, cls).config_class(**sizes)).eval()
    with torch.no_grad():
        biases = (one for key, one in model.named_buffers() if "correction_bias" in key)
        for parameter in [*model.parameters(), *biases]:
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, parallel_state: None) -> None:
    model, there = pretrained(name, tmp_path / "hf"), megatron_model(name)
    mapping = [MODELS[name][2], "megatron-te-local"]
    ckpt.convert(tmp_path / "hf", tmp_path / "m.pt", mapping=mapping)
    state: Any = torch.load(tmp_path / "m.pt", weights_only=True)
    missing = there.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all("_extra_state" in key for key in missing.missing_keys)
    ids = torch.randint(VOCAB, (2, LENGTH))
    places = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad(), OnTheProcessor():
        torch.testing.assert_close(
            there(ids, places, mask), model(ids).logits, atol=5e-5, rtol=1e-4
        )


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_both_directions_give_each_bit_back_also_to_ranks_that_load_shards(
    name: str, ranks: int, clusters: Callable[[int], Cluster], tmp_path: Path
) -> None:
    pretrained(name, tmp_path / "hf")
    there, back = [MODELS[name][2], "megatron-te-local"], ["megatron-local-te", "auto-megatron-hf"]
    ckpt.convert(tmp_path / "hf", tmp_path / "m.pt", mapping=there, verify=True)
    ckpt.convert(
        tmp_path / "m.pt",
        tmp_path / "b",
        to="hf",
        mapping=back,
        config=tmp_path / "hf",
        verify=True,
    )
    assert ckpt.diff(tmp_path / "hf", tmp_path / "b").equal
    model, source, target = MODELS[name][2].split("-")
    back[1] = f"{model}-{target}-{source}"
    known = ckpt.read_mapping(back[1]).size_names
    sizes = {one: size for one, size in (("heads", HEADS), ("kv_heads", GROUPS)) if one in known}
    every = clusters(ranks)
    for places in (
        (tmp_path / "hf", tmp_path / "m.pt", there),
        (tmp_path / "m.pt", tmp_path / "hf", back),
    ):
        assert every.run(differing_shards, *places, sizes) == [[]] * ranks


@pytest.mark.parametrize("name", FURTHER)
def test_the_layer_for_further_tokens_has_the_names_of_megatron(
    name: str, tmp_path: Path, parallel_state: None
) -> None:
    """transformers has no such layer: its tensors are those of the last layer, and new ones."""
    pretrained(name, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors, last = load_file(file), f"model.layers.{LAYERS - 1}."
    further = {key.removeprefix(last): one for key, one in tensors.items() if key.startswith(last)}
    norms = {f"{key}.weight": torch.randn(HIDDEN) for key in ("enorm", "hnorm", "shared_head.norm")}
    further |= norms | {"eh_proj.weight": torch.randn(HIDDEN, 2 * HIDDEN)}
    tensors |= {f"model.layers.{LAYERS}.{key}": one.clone() for key, one in further.items()}
    save_file(tensors, file)
    there = [MODELS[name][2], "megatron-te-local", "megatron-decoder-mtp"]
    ckpt.convert(tmp_path / "hf", tmp_path / "m.pt", mapping=there, verify=True)
    wanted = megatron_model(name, mtp_num_layers=1).state_dict()
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    assert {key: one.shape for key, one in state.items()} == {
        key: one.shape for key, one in wanted.items() if "_extra_state" not in key
    }
    back = ["megatron-mtp-decoder", "megatron-local-te", "auto-megatron-hf"]
    ckpt.convert(tmp_path / "m.pt", tmp_path / "b", to="hf", mapping=back, config=tmp_path / "hf")
    assert ckpt.diff(tmp_path / "hf", tmp_path / "b").equal


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_layers_together_have_the_names_and_shapes_of_torch_dist(
    name: str, tmp_path: Path, parallel_state: None
) -> None:
    model = megatron_model(name)
    state = {key: value for key, value in model.state_dict().items() if "_extra_state" not in key}
    torch.save(state, tmp_path / "m.pt")
    norms = [LOCAL_NORMS.inverse()] if "num_moe_experts" in MODELS[name][3] else []
    mapping = ["megatron-local-te", *norms, "megatron-layers-dist"]
    ckpt.convert(tmp_path / "m.pt", tmp_path / "d.pt", mapping=mapping)
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


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", sorted({*MODELS} - {*NO_DIST}))
def test_a_torch_dist_folder_becomes_the_hugging_face_folder(
    name: str, single: bool, tmp_path: Path, parallel_state: None
) -> None:
    from megatron.core import dist_checkpointing

    _, _, mapping, options = MODELS[name]
    pretrained(name, tmp_path / "hf")
    ckpt.convert(tmp_path / "hf", tmp_path / "m.pt", mapping=[mapping, "megatron-te-local"])
    model = megatron_model(name)
    model.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True), strict=False)
    (tmp_path / "dist").mkdir()
    metadata = {"singleton_local_shards": True} if single else None
    state = model.sharded_state_dict(metadata=metadata)
    dist_checkpointing.save(state, str(tmp_path / "dist"))
    norms = [LOCAL_NORMS] if "num_moe_experts" in options else []
    between = ["megatron-dist-layers", *norms, "auto"]
    if "moe_layer_freq" in options or name == "nemotron-h":
        parts = ["megatron-dist-mamba"] if name == "nemotron-h" else []
        between = ["megatron-dist-experts", *parts, "megatron-local-te", "auto"]
    if single:
        between = ["megatron-single-gated", *between[1:]]
    ckpt.convert(
        tmp_path / "dist",
        tmp_path / "back",
        to="hf",
        mapping=between,
        config=tmp_path / "hf",
        verify=True,
    )
    assert ckpt.diff(tmp_path / "hf", tmp_path / "back").equal
