"""The table of folder formats: pure, by the names of entries."""

from __future__ import annotations

from importlib import import_module

import pytest

import formats
from formats.detect import FOLDERS, folder_format, sign_of_another_format

SHARD = "0123456789abcdef-00000.safetensors"


@pytest.mark.parametrize(
    ("entries", "name", "sign"),
    [
        ([], None, None),
        (["config.json", "tokenizer.json"], None, None),
        ([SHARD], None, None),
        ([".metadata", "__0_0.distcp"], "dcp", ".metadata"),
        (["__0.metadata", "__0_0.distcp"], "dcp", "__0.metadata"),
        ([".metadata", "__0_0.distcp", "meta.pt"], "lightning", "meta.pt"),
        (["model.safetensors", "config.json"], "huggingface", "model.safetensors"),
        (["shard-00001-model-00001-of-00001.safetensors"], "huggingface", None),
        (["pytorch_model.bin"], "huggingface", "pytorch_model.bin"),
        (["pytorch_model.bin.index.json"], "huggingface", "pytorch_model.bin.index.json"),
        (["adapter_config.json", "adapter_model.bin"], "huggingface", "adapter_model.bin"),
        (["consolidated.00.pth", "params.json"], "consolidated", "consolidated.00.pth"),
        # Names that no reader of these formats takes.
        (["consolidated.0.pth"], None, None),
        (["mp_rank_0000000000_model_states.pt"], None, None),
        # A Trainer that saved only the model, or its final model, is a folder of weights.
        (["model.safetensors", "trainer_state.json"], "huggingface", "model.safetensors"),
        (["model.safetensors", "trainer_state.json", "optimizer.pt"], "trainer", None),
        (["pytorch_model_fsdp_0/", "optimizer_0/", "trainer_state.json"], "trainer", None),
        (["model.safetensors", "optimizer.bin", "random_states_0.pkl"], "accelerate", None),
        (["training_args.bin", "optimizer.pt"], None, None),
        (["model_index.json", "unet/", "all.safetensors"], "diffusers", "model_index.json"),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], "gguf", "m-00001-of-00002.gguf"),
        (["m.gguf"], None, None),
    ],
)
def test_the_entries_of_a_folder_decide_its_format(
    entries: list[str], name: str | None, sign: str | None
) -> None:
    found = folder_format(entries)
    assert (found.name if found else None) == name
    shown = sign_of_another_format(entries)
    assert (shown is None) == (name is None)
    assert sign is None or shown == sign


@pytest.mark.parametrize("row", FOLDERS, ids=lambda row: f"{row.name}-{row.reader}")
def test_every_row_has_a_reader(row) -> None:
    module, name = row.reader.split(":")
    assert callable(getattr(import_module(f"{formats.__name__}.{module}"), name))
