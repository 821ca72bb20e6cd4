"""Writes the names of torchtitan 0.3, each with the first number of its tensor: names-0.3.json.

Run by hand beside the files of write.py, with torchtitan==0.3.0, triton and their dependencies:
`python tests/data/torchtitan/write_03.py`. Of gpt-oss, for which no file is there, the shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.gpt_oss import gptoss_configs
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

HERE = Path(__file__).parent
ADAPTERS = {
    "llama": Llama3StateDictAdapter,
    "qwen3": Qwen3StateDictAdapter,
    "qwen3-moe": Qwen3StateDictAdapter,
    "deepseek": DeepSeekV3StateDictAdapter,
}


def main() -> None:
    """Write the file."""
    attention = SimpleNamespace(n_heads=4, n_kv_heads=2, head_dim=4, q_lora_rank=3)
    experts = SimpleNamespace(num_experts=3)
    moe = SimpleNamespace(num_experts=3, routed_experts=SimpleNamespace(inner_experts=experts))
    layer = SimpleNamespace(attention=attention, moe=moe)
    config = SimpleNamespace(layers=[layer] * 2, dim=16, enable_weight_tying=False, mtp_layers=[])
    found: dict[str, object] = {}
    for name, kind in ADAPTERS.items():
        every = load_file(HERE / f"{name}.safetensors")
        hf = {key.removeprefix("hf."): one for key, one in every.items() if key.startswith("hf.")}
        kind._validate_hf_rope_config = lambda *_: None
        made = kind(config, None).from_hf(hf)
        found[name] = {key: int(tensor.flatten()[0]) for key, tensor in sorted(made.items())}
    with torch.device("meta"):
        model = gptoss_configs["debugmodel"]("standard").build()
    layers = ("layers.0.", "tok", "norm", "lm")
    shapes = {key: list(one.shape) for key, one in model.state_dict().items()}
    found["gpt-oss"] = {key: shape for key, shape in shapes.items() if key.startswith(layers)}
    (HERE / "names-0.3.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
