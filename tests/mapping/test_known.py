"""The mappings that ship give what the libraries' own code gives, in both directions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.mapping.changes import find_mapping, mapping_names
from ckpt.mapping.rules import Rule, TensorMapping, parse_mapping
from sharding.errors import ArgumentError
from tests.conftest import Cluster
from tests.mapping.shards import differing_shards

TORCHTITAN = Path(__file__).parents[1] / "data" / "torchtitan"
HF = TensorMapping("hf", (Rule(("hf",), ("",)),))
"""Takes the first part off the names of transformers in the kept files."""
HEADS = {"heads": 4, "kv_heads": 2}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
MOE = {"num_experts": 3, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama-tied": ("Llama", SIZES | {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", SIZES | MOE | {"head_dim": 16}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 3}),
    "mistral": ("Mistral", SIZES),
    "deepseek": (
        "DeepseekV3",
        SIZES
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt-oss": (
        "GptOss",
        SIZES
        | {"head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "llama-4": (
        "Llama4",
        SIZES
        | {"head_dim": 8, "num_local_experts": 3, "intermediate_size_mlp": 96}
        | {"interleave_moe_layer_step": 2, "tie_word_embeddings": False},
    ),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 64,
            "n_positions": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
}
"""Configurations of transformers: the prefix of the classes, and the sizes."""
CASES = [
    ("llama", "llama-hf-megatron"),
    ("llama", "llama-hf-torchtitan"),
    ("llama-tied", "llama-hf-megatron"),
    ("llama-biased", "llama-hf-megatron"),
    ("qwen2", "qwen2-hf-megatron"),
    ("qwen3", "qwen3-hf-megatron"),
    ("qwen3", "qwen3-hf-torchtitan"),
    ("qwen3-moe", "qwen3-hf-torchtitan"),
    ("qwen3-moe", "qwenmoe-hf-stacked"),
    ("mixtral", "mixtral-hf-megatron"),
    ("mixtral", "mixtral-hf-stacked"),
    ("gpt2", "gpt2-hf-megatron"),
    ("mistral", "llama-hf-megatron"),
    ("qwen3-moe", "qwen3moe-hf-megatron"),
    ("deepseek", "deepseekv3-hf-torchtitan"),
    ("gpt-oss", "gptoss-hf-torchtitan"),
    ("llama-4", "llama4-hf-torchtitan"),
]


def heads_of(mapping: str) -> dict[str, int]:
    """The parameters that a mapping has."""
    known = find_mapping(mapping).size_names
    return {name: size for name, size in HEADS.items() if name in known}


def turned(name: str) -> str:
    """The name of the mapping in the other direction."""
    model, source, target = name.split("-")
    return f"{model}-{target}-{source}"


def converted(
    tmp_path: Path, tensors: Mapping[str, torch.Tensor], mapping: str
) -> dict[str, torch.Tensor]:
    """What a conversion from file to file makes of tensors."""
    source, target = tmp_path / f"{mapping}.safetensors", tmp_path / f"{mapping}.out.safetensors"
    save_file(dict(tensors), source)
    ckpt.convert(source, target, mapping=mapping, parameters=heads_of(mapping), verify=True)
    return load_file(target)


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


ADAPTED = {
    "llama": "llama-hf-torchtitan",
    "qwen3": "qwen3-hf-torchtitan",
    "qwen3-moe": "qwen3-hf-torchtitan",
    "deepseek": "deepseekv3-hf-torchtitan",
}
"""The kept files of models that torchtitan's own adapter made, and the mapping that makes them."""


@pytest.mark.parametrize(("file", "mapping"), ADAPTED.items())
def test_torchtitan_s_own_adapter_made_the_same_tensors(
    file: str, mapping: str, tmp_path: Path
) -> None:
    every = load_file(TORCHTITAN / f"{file}.safetensors")
    hf, titan = (
        {name.removeprefix(side): tensor for name, tensor in every.items() if name.startswith(side)}
        for side in ("hf.", "torchtitan.")
    )
    assert_equal(converted(tmp_path, hf, mapping), titan)
    assert_equal(converted(tmp_path, titan, turned(mapping)), hf)


NAMES_03 = json.loads((TORCHTITAN / "names-0.3.json").read_text())


@pytest.mark.parametrize("file", ADAPTED)
def test_torchtitan_0_3_has_the_same_tensors_under_other_names(file: str, tmp_path: Path) -> None:
    every = load_file(TORCHTITAN / f"{file}.safetensors")
    titan = {name[11:]: one for name, one in every.items() if name.startswith("torchtitan.")}
    found = converted(tmp_path, titan, "torchtitan-02-03")
    assert {name: int(tensor.flatten()[0]) for name, tensor in found.items()} == NAMES_03[file]
    assert_equal(converted(tmp_path, found, "torchtitan-03-02"), titan)


def test_grouped_experts_of_megatron_have_the_weights_of_an_mlp_each(tmp_path: Path) -> None:
    every = load_file(TORCHTITAN / "deepseek.safetensors")
    hf = {name[3:]: tensor for name, tensor in every.items() if name.startswith("hf.")}
    apart = converted(tmp_path, hf, "deepseekv3-hf-megatron")
    grouped = converted(tmp_path, apart, "megatron-experts-grouped")
    one = "decoder.layers.1.mlp.experts"  # the names of Megatron-Bridge 0.3
    own, there = f"{one}.local_experts.2.linear_fc1.weight", f"{one}.linear_fc1.weight2"
    assert torch.equal(grouped[there], apart[own])
    assert_equal(converted(tmp_path, grouped, "megatron-grouped-experts"), apart)
    single = converted(tmp_path, apart, "megatron-gated-single")
    parts = [single[f"{one}.experts.2.linear_fc1.weight_{part}"] for part in "wv"]
    assert torch.equal(torch.cat(parts), apart[own])
    assert_equal(converted(tmp_path, single, "megatron-single-gated"), apart)
    assert_equal(converted(tmp_path, apart, "deepseekv3-megatron-hf"), hf)


def test_tensors_of_mamba_layers_lie_in_parts_as_in_torch_dist(tmp_path: Path) -> None:
    sizes = {"mamba_heads": 4, "mamba_head": 2, "mamba_groups": 2, "mamba_state": 3}
    at, width = "decoder.layers.0.mixer", 5
    rows = {"z": 8, "x": 8, "B": 6, "C": 6, "dt": 4}
    whole = {f"{at}.in_proj.weight": torch.arange(float(sum(rows.values()) * width))}
    whole = {name: one.reshape(-1, width) for name, one in whole.items()}
    whole |= {f"{at}.conv1d.weight": torch.arange(80.0).reshape(20, 1, 4)}
    whole |= {f"{at}.conv1d.bias": torch.arange(20.0)}
    source, parts, back = (tmp_path / f"{name}.safetensors" for name in ("s", "p", "b"))
    save_file(whole, source)
    ckpt.convert(source, parts, mapping="megatron-mamba-dist", parameters=sizes, verify=True)
    found = load_file(parts)
    wanted = whole[f"{at}.in_proj.weight"].split([*rows.values()])
    for name, part in zip(rows, wanted, strict=True):
        assert torch.equal(found[f"{at}.in_proj.weight.{name}"], part)
    assert torch.equal(found[f"{at}.conv1d.bias.B"], torch.arange(8.0, 14.0))
    ckpt.convert(parts, back, mapping="megatron-dist-mamba")
    assert_equal(load_file(back), whole)


def test_gpt_oss_of_torchtitan_0_3_has_names_of_hugging_face(tmp_path: Path) -> None:
    state = {
        name: torch.zeros([min(size, 4) for size in shape])
        for name, shape in NAMES_03["gpt-oss"].items()
    }
    source, target = tmp_path / "titan.safetensors", tmp_path / "hf.safetensors"
    save_file(state, source)
    ckpt.convert(source, target, mapping=["torchtitan-03-02", "gptoss-torchtitan-hf"])
    experts = "model.layers.0.mlp.experts"
    assert {f"{experts}.gate_up_proj", f"{experts}.down_proj_bias"} < set(load_file(target))
    assert (
        ckpt.convert(
            target, tmp_path / "b.pt", mapping=["gptoss-hf-torchtitan", "torchtitan-02-03"]
        ).tensors
        == len(state) - 1
    )  # all but the bias that balances experts


def megatron_s(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The fused weight as tools/checkpoint/loader_mixtral_hf.py of Megatron-LM copies it."""
    groups = HEADS["kv_heads"]
    return torch.cat([part.reshape(groups, -1, q.shape[-1]) for part in (q, k, v)], 1).flatten(0, 1)


def test_query_groups_and_gates_lie_as_in_megatron(tmp_path: Path) -> None:
    hf = {
        name.removeprefix("hf."): tensor
        for name, tensor in load_file(TORCHTITAN / "llama.safetensors").items()
        if name.startswith("hf.")
    }
    found = converted(tmp_path, hf, "llama-hf-megatron")
    for layer in range(2):
        own, there = f"model.layers.{layer}", f"decoder.layers.{layer}"
        parts = [hf[f"{own}.self_attn.{name}_proj.weight"] for name in "qkv"]
        fused = found[f"{there}.self_attention.linear_qkv.weight"]
        assert torch.equal(fused, megatron_s(*parts))
        gates = torch.cat([hf[f"{own}.mlp.{name}_proj.weight"] for name in ("gate", "up")])
        assert torch.equal(found[f"{there}.mlp.linear_fc1.weight"], gates)
    assert_equal(converted(tmp_path, found, "llama-megatron-hf"), hf)
    local = converted(tmp_path, found, "megatron-te-local")
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in local
    stacked = converted(tmp_path, local, "megatron-layers-dist")
    assert stacked["decoder.layers.mlp.linear_fc2.weight"].shape[0] == 2
    assert not any("layers.0." in name for name in stacked)
    assert_equal(converted(tmp_path, stacked, "megatron-dist-layers"), local)


@pytest.mark.parametrize("mapping", ["llama-torchtitan-hf", "llama-megatron-hf"])
def test_a_mapping_without_its_parameters_names_them(tmp_path: Path, mapping: str) -> None:
    hf, path = TORCHTITAN / "llama.safetensors", tmp_path / "there.safetensors"
    ckpt.convert(hf, path, include="hf.*", mapping=[HF, turned(mapping)], parameters=HEADS)
    with pytest.raises(ArgumentError, match=r"parameters=\{'kv_heads': NUMBER}"):
        ckpt.convert(path, tmp_path / "back", mapping=mapping)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 2}')
    ckpt.convert(path, tmp_path / "back", mapping=mapping)
    assert ckpt.diff(hf, tmp_path / "back", include="model.*", rename={"hf": ""}).equal


def test_auto_is_the_one_mapping_that_fits_the_config(tmp_path: Path) -> None:
    every = load_file(TORCHTITAN / "deepseek.safetensors")
    hf = {name[3:]: tensor for name, tensor in every.items() if name.startswith("hf.")}
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(hf, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "deepseek_v3"}')
    titan = tmp_path / "titan.safetensors"
    ckpt.convert(folder, titan, mapping="auto-hf-torchtitan", verify=True)
    direct = ckpt.diff(folder, titan, mapping="deepseekv3-hf-torchtitan")
    assert direct.equal
    ckpt.convert(titan, tmp_path / "back", to="hf", mapping="auto", config=folder)
    assert ckpt.diff(folder, tmp_path / "back").equal
    rename = {"output": "head"}
    ckpt.convert(titan, tmp_path / "b.pt", mapping=["auto"], config=folder, rename={"lm_head": "h"})
    assert "h.weight" in torch.load(tmp_path / "b.pt")
    with pytest.raises(ArgumentError, match=r"config=, the folder of the model; or name a mapping"):
        ckpt.convert(titan, tmp_path / "c.pt", mapping="auto", rename=rename)


def test_auto_names_the_mappings_that_it_cannot_choose_from(tmp_path: Path) -> None:
    every = load_file(TORCHTITAN / "llama.safetensors")
    hf = {name[3:]: tensor for name, tensor in every.items() if name.startswith("hf.")}
    save_file(hf, tmp_path / "model.safetensors")
    config, there = tmp_path / "config.json", tmp_path / "there.pt"
    sizes = '{"num_attention_heads": 4, "num_key_value_heads": 2}'
    config.write_text(f'{{"model_type": "llama", "text_config": {sizes}}}')
    with pytest.raises(ArgumentError, match="name one: llama-hf-megatron, llama-hf-torchtitan"):
        ckpt.convert(tmp_path, there, mapping="auto")
    with pytest.raises(ArgumentError, match="llama-megatron-hf has no rule for"):
        ckpt.convert(tmp_path, there, mapping="auto-megatron-hf")
    with pytest.raises(ArgumentError, match=r"'llama' fits:\nllama-hf-megatron: rule 12"):
        ckpt.convert(tmp_path, there, mapping="auto", rename={}, exclude="model.norm.weight")
    config.write_text('{"model_type": "lama"}')
    with pytest.raises(ArgumentError, match=r"no mapping is for 'lama'; or name .*llama-hf-meg"):
        ckpt.convert(tmp_path, there, mapping="auto")
    with pytest.raises(ArgumentError, match="'auto-hf-titan' is neither"):
        ckpt.convert(tmp_path, there, mapping="auto-hf-titan")
    with pytest.raises(ArgumentError, match="mapping= also takes auto, auto-"):
        ckpt.read_mapping("auto")
    assert not there.exists()


def test_every_mapping_has_both_directions() -> None:
    assert {turned(name) for name in mapping_names()} == set(mapping_names())
    for name in mapping_names():
        assert find_mapping(name).rules
    with pytest.raises(
        ArgumentError, match="'lama' is neither a mapping nor a file; the mappings are any-"
    ):
        find_mapping("lama")


def test_the_document_names_every_mapping_and_its_file_is_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE)
    assert {*rows, *map(turned, rows)} == set(mapping_names())
    for example in re.findall(r"```toml\n(.*?)```", text, re.DOTALL):
        mapping = parse_mapping(example, "the example")
        assert mapping.inverse().inverse().rules == mapping.rules


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of `save_pretrained` for each model, with random weights."""
    transformers = pytest.importorskip("transformers", reason="the owner of the names")
    transformers.utils.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("pretrained")
    found = {}
    for name, (prefix, sizes) in MODELS.items():
        ending = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
        torch.manual_seed(0)
        model = getattr(transformers, prefix + ending)(
            getattr(transformers, prefix + ending).config_class(**sizes)
        )
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        model.save_pretrained(root / name)
        found[name] = root / name
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "mapping"), CASES)
def test_a_real_model_comes_back_to_the_bit(
    pretrained: dict[str, Path], tmp_path: Path, model: str, mapping: str
) -> None:
    ckpt.convert(pretrained[model], tmp_path / "there", mapping=mapping, verify=True)
    back, heads = turned(mapping), heads_of(mapping)
    ckpt.convert(tmp_path / "there", tmp_path / "back", mapping=back, parameters=heads, to="hf")
    found = ckpt.diff(pretrained[model], tmp_path / "back")
    extra = (
        {"lm_head.weight"} if (model, mapping) == ("llama-tied", "llama-hf-torchtitan") else set()
    )
    assert (set(found.only_a), set(found.only_b)) == (set(), extra)
    assert not found.tensors


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("model", "mapping"), CASES)
def test_ranks_load_their_shards_of_a_real_model(
    pretrained: dict[str, Path],
    clusters: Callable[[int], Cluster],
    tmp_path: Path,
    model: str,
    mapping: str,
    ranks: int,
) -> None:
    there, sizes = tmp_path / "there.pt", heads_of(mapping)
    ckpt.convert(pretrained[model], there, mapping=mapping)
    found = clusters(ranks).run(differing_shards, pretrained[model], there, [mapping], sizes)
    assert found == [[]] * ranks
    back = clusters(ranks).run(differing_shards, there, pretrained[model], [turned(mapping)], sizes)
    assert back == [[]] * ranks


@pytest.mark.thorough
@pytest.mark.parametrize("mapping", ["llama-hf-megatron", "llama-hf-torchtitan"])
def test_logits_are_equal_after_the_way_there_and_back(
    pretrained: dict[str, Path], tmp_path: Path, mapping: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="it computes the logits")
    ckpt.convert(pretrained["llama"], tmp_path / "there.pt", mapping=mapping)
    back = tmp_path / "back"
    ckpt.convert(tmp_path / "there.pt", back, mapping=turned(mapping), parameters=HEADS, to="hf")
    (back / "config.json").write_bytes((pretrained["llama"] / "config.json").read_bytes())
    ids = torch.arange(12).reshape(2, 6)
    a, b = (
        transformers.LlamaForCausalLM.from_pretrained(place)(ids).logits
        for place in (pretrained["llama"], back)
    )
    assert torch.equal(a, b)
