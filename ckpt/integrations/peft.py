"""PEFT: the adapters of a model as checkpoints of their own.

    save_adapter("run/adapter-1", model)
    save_adapter("run/adapter-2", model, base="run/adapter-1")     # only what has changed
    load_adapter("run/adapter-2", model)

A checkpoint holds the tensors of one adapter under the names that PEFT gives them, and its
configuration. The base model is not in it, and is neither gathered nor read.
`ckpt convert run/adapter-2 adapter_model.safetensors` makes the file of it that PEFT loads.
"""

from __future__ import annotations

import json
import os
from typing import Any

import ckpt
from ckpt.errors import ArgumentError
from ckpt.integrations.optional import needs

with needs("peft"):
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict

__all__ = ["load_adapter", "save_adapter"]

CONFIG = "peft_config"
"""The key of the metadata that has the configuration, in JSON."""


def save_adapter(
    url: str | os.PathLike[str], model: PeftModel, *, adapter: str = "default", **options: Any
) -> ckpt.SaveHandle | None:
    """Store the tensors and the configuration of one adapter. To be called by all ranks.

    `options` are those of `ckpt.save`; with `base=` an earlier checkpoint of the adapter, what has
    not changed since is not written again. Raises ArgumentError where the model has no such
    adapter.
    """
    config = _config(model, adapter)
    metadata = {**options.pop("metadata", {}), CONFIG: config}
    handle: ckpt.SaveHandle | None = ckpt.save(
        url, _tensors(model, adapter), metadata=metadata, **options
    )
    return handle


def load_adapter(
    url: str | os.PathLike[str], model: PeftModel, *, adapter: str = "default", **options: Any
) -> None:
    """Fill the tensors of one adapter of the model in place. To be called by all ranks.

    `options` are those of `ckpt.load`. Raises ArgumentError where the model has no such adapter,
    and MismatchError where it is not of the same kind, rank or modules as the one that was saved.
    """
    _config(model, adapter)
    ckpt.load(url, _tensors(model, adapter), **options)


def _tensors(model: PeftModel, adapter: str) -> dict[str, Any]:
    """The tensors of an adapter, as they lie in memory, by PEFT's names."""
    own = model.state_dict(keep_vars=True)
    return dict(get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter))


def _config(model: PeftModel, adapter: str) -> str:
    if adapter not in model.peft_config:
        raise ArgumentError(
            f"adapter={adapter!r}: the model has the adapters {sorted(model.peft_config)}"
        )
    config = model.peft_config[adapter].to_dict()
    return json.dumps(config, default=lambda value: sorted(value, key=str), sort_keys=True)
