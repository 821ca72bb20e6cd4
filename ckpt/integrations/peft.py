"""PEFT: each adapter of a model as a checkpoint.

    save_adapter("run/adapter-1", model)
    save_adapter("run/adapter-2", model, base="run/adapter-1")     # only the changed chunks
    load_adapter("run/adapter-2", model)

A checkpoint holds the tensors of one adapter under PEFT's names, and the adapter's configuration.
It does not hold the base model, which is neither gathered nor read. PEFT computes the tensors of
some adapters (prompts) from the parameters of an encoder; a checkpoint also holds these parameters,
under `prompt_encoder`, and a load fills them.
`ckpt convert run/adapter-2 adapter_model.safetensors` makes the file that PEFT loads.
"""

from __future__ import annotations

import json
import os
from typing import Any

import ckpt
from ckpt.errors import ArgumentError
from ckpt.integrations import needs

with needs("peft"):
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict

__all__ = ["load_adapter", "save_adapter"]

CONFIG = "peft_config"
"""The key of the metadata for the configuration, in JSON."""
ENCODER = "prompt_encoder"
"""PEFT's name for the modules from whose parameters prompts are computed."""


def save_adapter(
    url: str | os.PathLike[str], model: PeftModel, *, adapter: str = "default", **options: Any
) -> ckpt.SaveHandle | None:
    """Saves the tensors and the configuration of one adapter. All ranks call this.

    `options` are those of `ckpt.save`; with an earlier checkpoint of the adapter as `base=`,
    unchanged chunks are not written again. Raises ArgumentError if the model has no such adapter.
    """
    config = _config(model, adapter)
    metadata = {**(options.pop("metadata", None) or {}), CONFIG: config}
    handle: ckpt.SaveHandle | None = ckpt.save(
        url, _tensors(model, adapter), metadata=metadata, **options
    )
    return handle


def load_adapter(
    url: str | os.PathLike[str], model: PeftModel, *, adapter: str = "default", **options: Any
) -> None:
    """Fills the tensors of one adapter of the model in place. All ranks call this.

    `options` are those of `ckpt.load`. Raises ArgumentError if the model has no such adapter, and
    MismatchError if its kind, rank or modules differ from those of the saved adapter.
    """
    _config(model, adapter)
    ckpt.load(url, _tensors(model, adapter), **options)


def _tensors(model: PeftModel, adapter: str) -> dict[str, Any]:
    """Returns the tensors of an adapter by PEFT's names, without a copy of a parameter."""
    own = model.state_dict(keep_vars=True)
    tensors = dict(get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter))
    if model.peft_config[adapter].is_prompt_learning:
        prefix = f"{ENCODER}.{adapter}."
        for name, tensor in own.items():
            if name.startswith(prefix):
                tensors[f"{ENCODER}.{name.removeprefix(prefix)}"] = tensor
    return tensors


def _config(model: PeftModel, adapter: str) -> str:
    if adapter not in model.peft_config:
        raise ArgumentError(
            f"adapter={adapter!r}: the model has the adapters {sorted(model.peft_config)}"
        )
    config = model.peft_config[adapter].to_dict()
    return json.dumps(config, default=lambda value: sorted(value, key=str), sort_keys=True)
