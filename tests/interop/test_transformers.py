"""Hugging Face models: what transformers saves loads into a model, what we write it opens."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from tests.old_torch import runs_fsdp2

TOKENS = torch.arange(24).reshape(2, 12) % 96


def llama(tied: bool, seed: int) -> LlamaForCausalLM:
    """A tiny Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    """What the model says of some tokens."""
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("shard_size", ["5GB", "40KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_saved_by_transformers_loads_into_a_model(
    tmp_path: Path, tied: bool, shard_size: str
) -> None:
    saved, fresh = llama(tied, 0), llama(tied, 1)
    saved.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert not torch.equal(logits(saved), logits(fresh))
    ckpt.load(tmp_path, fresh)
    assert torch.equal(logits(saved), logits(fresh))


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 40_000], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_opens_the_model_of_a_training_checkpoint(
    tmp_path: Path, tied: bool, max_shard_bytes: int
) -> None:
    trained = llama(tied, 0)
    optimizer = torch.optim.AdamW(trained.parameters())
    trained(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    ckpt.save(tmp_path / "run", {"model": trained, "optim": optimizer, "step": 1})
    ckpt.convert(
        tmp_path / "run",
        tmp_path / "hf",
        to="hf",
        select="model",
        max_shard_bytes=max_shard_bytes,
    )
    trained.config.save_pretrained(tmp_path / "hf")
    opened = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert torch.equal(logits(trained), logits(opened))


def load_sharded(folder: str, tied: bool) -> np.ndarray:
    """The logits of a model that fully_shard divided before it was loaded."""
    from torch.distributed.fsdp import fully_shard

    model = llama(tied, 7)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ckpt.load(folder, model)
    return logits(model).numpy()


@runs_fsdp2
@pytest.mark.thorough  # each rank imports transformers
@pytest.mark.parametrize(
    "tied", [pytest.param(False, marks=pytest.mark.slow), True], ids=["untied", "tied"]
)
def test_a_hugging_face_folder_loads_straight_into_a_sharded_model(
    clusters: Callable, tmp_path: Path, tied: bool
) -> None:
    saved = llama(tied, 0)
    saved.save_pretrained(tmp_path, max_shard_size="40KB")
    for result in clusters(3).run(load_sharded, str(tmp_path), tied):
        np.testing.assert_allclose(result, logits(saved).numpy(), rtol=1e-5, atol=1e-6)


def save_for_from_pretrained(folder: str) -> None:
    """On each rank: a tied Llama of 2 ranks is saved, and beside it a folder of shards."""
    from torch.distributed.fsdp import fully_shard

    model = llama(tied=True, seed=0)
    for layer in (*model.model.layers, model):
        fully_shard(layer)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters()), "step": 1}
    also = ckpt.HuggingFace(
        f"{folder}/hf", config=f"{folder}/base", dtype="bfloat16", max_shard_bytes=20_000
    )
    handle = ckpt.save(f"{folder}/run", state, also=also, blocking=False)
    assert handle is not None
    assert handle.result(60).also == f"{folder}/hf"


@pytest.mark.thorough
def test_from_pretrained_loads_the_second_output_of_ranks(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    saved = llama(tied=True, seed=0)
    saved.config.save_pretrained(tmp_path / "base")
    clusters(2).run(save_for_from_pretrained, str(tmp_path))
    found, info = LlamaForCausalLM.from_pretrained(
        tmp_path / "hf", dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    wanted = saved.bfloat16().state_dict()
    assert found.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.state_dict().items())
