"""torch.distributed.checkpoint on `ckpt`: only the import line changes.

    import ckpt.dcp as dcp  # was: import torch.distributed.checkpoint as dcp

Programs that use DCP write the native format, with its atomic commit and checksums, and read every
format. The modules have the names of torch's: `ckpt.dcp.state_dict` is
`torch.distributed.checkpoint.state_dict`. docs/dcp.md lists for each function and argument whether
it is the same, better or refused.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from torch.distributed import checkpoint as _torch

from ckpt.dcp.api import CheckpointException
from ckpt.dcp.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from ckpt.dcp.filesystem import FileSystemReader, FileSystemWriter
from ckpt.dcp.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from ckpt.dcp.optimizer import load_sharded_optimizer_state_dict
from ckpt.dcp.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from ckpt.dcp.state_dict_loader import load, load_state_dict
from ckpt.dcp.state_dict_saver import async_save, save, save_state_dict
from ckpt.dcp.storage import StorageReader, StorageWriter
from ckpt.dcp.storage_reader import CkptStorageReader
from ckpt.dcp.storage_writer import CkptStorageWriter

__all__ = [
    "BytesStorageMetadata",
    "CheckpointException",
    "ChunkStorageMetadata",
    "CkptStorageReader",
    "CkptStorageWriter",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "async_save",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "save",
    "save_state_dict",
]

_OF_HF_STORAGE = ("HuggingFaceStorageReader", "HuggingFaceStorageWriter")


def __getattr__(name: str) -> object:
    """Returns modules of this package, names that only this version of torch has, and its modules.

    Modules that torch keeps private, such as `_version`, are attributes here, not to be imported.
    """
    if name.startswith("__") or not hasattr(_torch, name):
        raise AttributeError(f"module 'ckpt.dcp' has no attribute {name!r}, nor has torch's")
    if name in _OF_HF_STORAGE:
        return getattr(importlib.import_module("ckpt.dcp.hf_storage"), name)
    if find_spec(f"ckpt.dcp.{name}") is not None:
        return importlib.import_module(f"ckpt.dcp.{name}")
    return getattr(_torch, name)
