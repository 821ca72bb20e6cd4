"""Writes the state dicts that torchtitan's own adapters make of Hugging Face's, with integers.

Run by hand, with torchtitan==0.2.2 and its dependencies: `python tests/data/torchtitan/write.py`.
Each file has the tensors of transformers under `hf.` and those of torchtitan under `torchtitan.`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB, EXPERTS = 16, 4, 2, 4, 6, 5, 3


def shapes(experts: int, norms: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of a model with two layers, as transformers stores them."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for number in range(2):
        layer = f"model.layers.{number}"
        for name, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        found[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        for name in ("q_norm", "k_norm") if norms else ():
            found[f"{layer}.self_attn.{name}.weight"] = (HEAD,)
        places = [f"experts.{expert}." for expert in range(experts)] or [""]
        for place in places:
            found[f"{layer}.mlp.{place}gate_proj.weight"] = (FFN, HIDDEN)
            found[f"{layer}.mlp.{place}up_proj.weight"] = (FFN, HIDDEN)
            found[f"{layer}.mlp.{place}down_proj.weight"] = (HIDDEN, FFN)
        if experts:
            found[f"{layer}.mlp.gate.weight"] = (experts, HIDDEN)
        found[f"{layer}.input_layernorm.weight"] = (HIDDEN,)
        found[f"{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def latent_shapes(experts: int) -> dict[str, tuple[int, ...]]:
    """The tensors of DeepSeek-V3: a dense layer, and one of experts, with latent attention."""
    rank, rope = 3, 2
    found = shapes(0, norms=False)
    for number in range(2):
        attention, mlp = (f"model.layers.{number}.{part}" for part in ("self_attn", "mlp"))
        for name in "qkv":
            del found[f"{attention}.{name}_proj.weight"]
        found[f"{attention}.q_a_proj.weight"] = (rank, HIDDEN)
        found[f"{attention}.q_a_layernorm.weight"] = (rank,)
        found[f"{attention}.q_b_proj.weight"] = (HEADS * (HEAD + rope), rank)
        found[f"{attention}.kv_a_proj_with_mqa.weight"] = (rank + rope, HIDDEN)
        found[f"{attention}.kv_a_layernorm.weight"] = (rank,)
        found[f"{attention}.kv_b_proj.weight"] = (HEADS * 2 * HEAD, rank)
        for name in ("gate_proj", "up_proj", "down_proj") if number else ():
            shape = found.pop(f"{mlp}.{name}.weight")
            for place in ("shared_experts", *(f"experts.{expert}" for expert in range(experts))):
                found[f"{mlp}.{place}.{name}.weight"] = shape
    return found | {
        f"{mlp}.gate.weight": (experts, HIDDEN),
        f"{mlp}.gate.e_score_correction_bias": (experts,),
    }


def numbered(every: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors of these shapes with consecutive numbers."""
    found, start = {}, 0
    for name, shape in every.items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(start, start + count, dtype=torch.int16).reshape(shape)
        start += count
    return found


def main() -> None:
    """Write the files."""
    llama = Llama3StateDictAdapter(
        TransformerModelArgs(dim=HIDDEN, n_layers=2, n_heads=HEADS, n_kv_heads=KV_HEADS), None
    )
    args = Qwen3ModelArgs(dim=HIDDEN, n_layers=2, n_heads=HEADS, n_kv_heads=KV_HEADS)
    args.moe_args = MoEArgs(num_experts=EXPERTS)
    qwen = Qwen3StateDictAdapter(args, None)
    latent = DeepSeekV3ModelArgs(dim=HIDDEN, n_layers=2, n_heads=HEADS, q_lora_rank=3)
    latent.moe_args = MoEArgs(num_experts=EXPERTS)
    for name, adapter, every in (
        ("llama", llama, shapes(0, norms=False)),
        ("qwen3", qwen, shapes(0, norms=True)),
        ("qwen3-moe", qwen, shapes(EXPERTS, norms=True)),
        ("deepseek", DeepSeekV3StateDictAdapter(latent, None), latent_shapes(EXPERTS)),
    ):
        there = numbered(every)
        made = adapter.from_hf(dict(there))
        tensors = {f"hf.{key}": value for key, value in there.items()}
        tensors |= {f"torchtitan.{key}": value.clone().contiguous() for key, value in made.items()}
        save_file(tensors, Path(__file__).with_name(f"{name}.safetensors"))


if __name__ == "__main__":
    main()
