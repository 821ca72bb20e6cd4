"""A folder that transformers wrote fills its own model in memory, as `from_pretrained` does.

The names and shapes in memory are not those of the files in many families, and old files have other
names again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.conftest import Cluster
from tests.selection import thorough

transformers = pytest.importorskip("transformers", minversion="5.0")
pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("default")]

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LM = SMALL | {"num_key_value_heads": 2}
WIDE = LM | {"head_dim": 8}
LOCAL = WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = WIDE | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = MOE | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MLA = ROUTED | {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
IMAGE = {k: v for k, v in SMALL.items() if k.startswith(("hidden", "inter", "num"))} | {
    "image_size": 16,
    "patch_size": 8,
}
PAIR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
SOUND = {
    "conv_dim": [16, 16],
    "conv_kernel": [4, 3],
    "conv_stride": [2, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "group",
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
QWEN = {"text_config": WIDE | {"rope_parameters": SECTIONS}}
TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
SIGLIP = IMAGE | {"model_type": "siglip_vision_model"}
SAM_SIZES = {"hidden_size": 16, "image_size": 64, "patch_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "AlbertForMaskedLM": SMALL | {"embedding_size": 16},
    "BartForConditionalGeneration": PAIR,
    "BeitModel": IMAGE,
    "BertForMaskedLM": SMALL,
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "CLIPModel": {"text_config": SMALL, "vision_config": IMAGE, "projection_dim": 16},
    "CohereForCausalLM": LM,
    "ConvNextForImageClassification": {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_stages": 2,
    },
    "DebertaV2ForMaskedLM": SMALL,
    "DeepseekV2ForCausalLM": MLA,
    "DeepseekV3ForCausalLM": MLA,
    "DbrxForCausalLM": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "vocab_size": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeiTModel": IMAGE,
    "DetrForObjectDetection": {
        key: one for key, one in PAIR.items() if key[:3] not in ("voc", "pad")
    }
    | {
        "num_queries": 5,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": {
            "model_type": "resnet",
            "hidden_sizes": [8, 16, 16, 16],
            "depths": [1, 1, 1, 1],
            "embedding_size": 8,
            "out_features": ["stage4"],
        },
    },
    "Dinov2Model": IMAGE,
    "DistilBertForMaskedLM": {
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "vocab_size": 64,
    },
    "ElectraForPreTraining": SMALL | {"embedding_size": 16},
    "Ernie4_5_MoeForCausalLM": MOE | {"moe_num_experts": 4, "moe_k": 2},
    "FalconForCausalLM": SMALL,
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "GPTJForCausalLM": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 64,
        "rotary_dim": 4,
    },
    "GPTNeoXForCausalLM": SMALL,
    "Gemma3ForCausalLM": WIDE | TWO_KINDS,
    "Gemma3ForConditionalGeneration": {
        "text_config": WIDE | TWO_KINDS,
        "vision_config": IMAGE,
        "mm_tokens_per_image": 4,
    },
    "GemmaForCausalLM": WIDE,
    "Glm4ForCausalLM": WIDE,
    "Glm4MoeForCausalLM": ROUTED,
    "GptOssForCausalLM": LOCAL | TWO_KINDS,
    "GraniteForCausalLM": LM,
    "GraniteMoeForCausalLM": LOCAL,
    "GraniteMoeHybridForCausalLM": LOCAL
    | {
        "shared_intermediate_size": 16,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "layer_types": ["mamba", "attention"],
    },
    "InternVLForConditionalGeneration": {
        "text_config": LM | {"model_type": "qwen2"},
        "vision_config": IMAGE
        | {"image_size": [16, 16], "patch_size": [8, 8], "model_type": "internvl_vision"},
    },
    "JambaForCausalLM": MOE
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "Llama4ForCausalLM": LOCAL | {"intermediate_size_mlp": 48, "num_experts_per_tok": 1},
    "LlamaForCausalLM": LM,
    "LlavaForConditionalGeneration": {
        "text_config": LM | {"model_type": "llama"},
        "vision_config": IMAGE | {"model_type": "clip_vision_model"},
    },
    "Mamba2ForCausalLM": {
        "hidden_size": 32,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    },
    "MarianMTModel": PAIR,
    "MiniMaxForCausalLM": LOCAL | {"block_size": 8},
    "MistralForCausalLM": LM,
    "Mistral3ForConditionalGeneration": {
        "text_config": WIDE | {"model_type": "mistral"},
        "vision_config": IMAGE | {"model_type": "pixtral", "head_dim": 8},
    },
    "MixtralForCausalLM": LOCAL,
    "ModernBertForMaskedLM": SMALL | {"cls_token_id": 1, "sep_token_id": 2},
    "NemotronForCausalLM": LM,
    "OPTForCausalLM": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "OlmoForCausalLM": LM,
    "Olmo2ForCausalLM": LM,
    "OlmoeForCausalLM": MOE,
    "PaliGemmaForConditionalGeneration": {
        "text_config": WIDE | {"model_type": "gemma"},
        "vision_config": SIGLIP,
        "projection_dim": 32,
    },
    "PhiForCausalLM": LM,
    "Phi3ForCausalLM": LM,
    "PhimoeForCausalLM": LOCAL,
    "Qwen2ForCausalLM": LM,
    "Qwen2MoeForCausalLM": MOE | {"shared_expert_intermediate_size": 16},
    "Qwen2VLForConditionalGeneration": QWEN | {"vision_config": TOWER | {"embed_dim": 32}},
    "Qwen2_5_VLForConditionalGeneration": QWEN
    | {
        "vision_config": TOWER
        | {"intermediate_size": 48, "out_hidden_size": 32, "fullatt_block_indexes": [1]}
    },
    "Qwen3ForCausalLM": WIDE,
    "Qwen3MoeForCausalLM": MOE,
    "Qwen3NextForCausalLM": MOE
    | {
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "Qwen3VLForConditionalGeneration": QWEN
    | {
        "vision_config": TOWER
        | {
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        }
    },
    "RobertaForMaskedLM": SMALL,
    "SamModel": {
        "vision_config": SAM_SIZES
        | {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "output_channels": 16,
            "global_attn_indexes": [1],
            "window_size": 4,
        },
        "prompt_encoder_config": SAM_SIZES | {"image_embedding_size": 8},
        "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2},
    },
    "SegformerForImageClassification": {
        "hidden_sizes": [8, 8, 16, 32],
        "num_attention_heads": [1, 2, 4, 8],
        "depths": [1, 1, 1, 1],
        "decoder_hidden_size": 8,
    },
    "SiglipModel": {"text_config": SMALL, "vision_config": IMAGE},
    "StableLmForCausalLM": LM,
    "Starcoder2ForCausalLM": LM,
    "SwinForImageClassification": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
    "T5ForConditionalGeneration": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 64,
    },
    "ViTForImageClassification": IMAGE,
    "Wav2Vec2ForCTC": SMALL | SOUND,
    "WhisperForConditionalGeneration": PAIR | {"max_source_positions": 16},
}


def build(family: str, seed: int, **changes: object) -> Any:
    """A model with random weights, also where the class starts from ones or zeros."""
    kind = getattr(transformers, family)
    torch.manual_seed(seed)
    return kind(kind.config_class(**{**FAMILIES[family], **changes}))


def write(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Writes a model of random weights, and returns them as `from_pretrained` finds them."""
    model = build(family, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return dict(type(model).from_pretrained(folder).state_dict())


def differing(model: nn.Module, wanted: dict[str, torch.Tensor]) -> list[str]:
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    return [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize(
    "family", [thorough(one) if number % 6 else one for number, one in enumerate(FAMILIES)]
)
def test_a_folder_fills_its_model_as_from_pretrained_does(family: str, tmp_path: Path) -> None:
    wanted = write(family, tmp_path)
    target = build(family, 1)
    ckpt.load(tmp_path, target)
    assert differing(target, wanted) == []


Renaming = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
OLD: dict[str, tuple[str, Renaming]] = {
    "GPT-2 without its prefix, with masks": (
        "GPT2LMHeadModel",
        lambda old: {
            **{name.removeprefix("transformer."): old[name] for name in old},
            **{f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)},
        },
    ),
    "BERT with gamma and beta, and other heads": (
        "BertForMaskedLM",
        lambda old: {
            **{
                name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): old[
                    name
                ]
                for name in old
            },
            "cls.seq_relationship.weight": torch.zeros(2, 32),
            "bert.pooler.dense.weight": torch.zeros(32, 32),
        },
    ),
    "Llama with frequencies in each layer": (
        "LlamaForCausalLM",
        lambda old: {
            **old,
            **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)},
        },
    ),
    "DeepSeek-V3 with the layer for further tokens": (
        "DeepseekV3ForCausalLM",
        lambda old: {
            **old,
            **{
                name.replace("layers.1.", "layers.61."): old[name].clone()
                for name in old
                if "layers.1." in name
            },
            "model.layers.61.eh_proj.weight": torch.ones(32, 64),
            "model.layers.61.shared_head.norm.weight": torch.ones(32),
        },
    ),
    "GLM-4.5 with the layer for further tokens": (
        "Glm4MoeForCausalLM",
        lambda old: {
            **old,
            "model.layers.92.enorm.weight": torch.ones(32),
            "model.layers.92.eh_proj.weight": torch.ones(32, 64),
        },
    ),
    "Llama as its base model": (
        "LlamaForCausalLM",
        lambda old: {name.removeprefix("model."): old[name] for name in old},
    ),
}


@pytest.mark.parametrize("case", OLD)
def test_names_of_old_published_files_fill_the_model(case: str, tmp_path: Path) -> None:
    family, renaming = OLD[case]
    wanted, file = write(family, tmp_path), tmp_path / "model.safetensors"
    old = renaming(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in old.items()}, file)
    target = build(family, 1)
    with warnings.catch_warnings(record=True) as caught:
        ckpt.load(tmp_path, target)
    assert differing(target, wanted) == []
    told = [str(one.message) for one in caught if issubclass(one.category, ckpt.SkippedWarning)]
    assert len(told) == ("heads" in case)
    assert all("cls.seq_relationship.weight: belongs to a head" in text for text in told)


def test_a_model_in_a_dict_is_filled_too(tmp_path: Path) -> None:
    wanted = write("MixtralForCausalLM", tmp_path)
    target = build("MixtralForCausalLM", 1)
    ckpt.load(tmp_path, {"model": target})
    assert differing(target, wanted) == []


def test_one_layer_more_is_an_error(tmp_path: Path) -> None:
    write("MixtralForCausalLM", tmp_path)
    target = build("MixtralForCausalLM", 1, num_hidden_layers=1)
    with pytest.raises(ckpt.MismatchError, match=r"model\.layers\.1\.block_sparse_moe") as error:
        ckpt.load(tmp_path, target)
    assert {one.problem for one in error.value.differences} == {"unexpected"}
    assert "mapping=" not in str(error.value)


def test_a_head_that_the_folder_lacks_is_an_error_whose_advice_works(tmp_path: Path) -> None:
    wanted = write("BertForMaskedLM", tmp_path)
    kind = transformers.BertForSequenceClassification
    target = kind(kind.config_class(**SMALL))
    with pytest.raises(ckpt.MismatchError) as error:
        ckpt.load(tmp_path, target)
    names = sorted(one.name for one in error.value.differences)
    assert names == [
        f"{part}.{end}"
        for part in ("bert.pooler.dense", "classifier")
        for end in ("bias", "weight")
    ]
    assert f"by the names of transformers {transformers.__version__} for Bert" in str(error.value)
    with pytest.warns(ckpt.SkippedWarning, match=r"a load by the names .* skips 5: cls\.pred"):
        ckpt.load(tmp_path, target, exclude=["classifier.*", "bert.pooler.*"])
    found = target.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in found if name in wanted)


def load_sharded(folder: Path, family: str) -> list[str]:
    """The names that differ after a load into a model that FSDP shards."""
    wanted = getattr(transformers, family).from_pretrained(folder).state_dict()
    target = build(family, 1)
    for layer in [one for one in target.modules() if type(one).__name__.endswith("DecoderLayer")]:
        fully_shard(layer)
    fully_shard(target)
    ckpt.load(folder, target)
    found = {name: tensor.full_tensor() for name, tensor in target.state_dict().items()}
    return [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("family", ["MixtralForCausalLM", "PaliGemmaForConditionalGeneration"])
def test_ranks_fill_their_shards(
    clusters: Callable[[int], Cluster], family: str, tmp_path: Path
) -> None:
    write(family, tmp_path)
    assert clusters(2).run(load_sharded, tmp_path, family) == [[], []]
