"""Conversions between torch.save files and checkpoints, with the names of torch's module."""

from __future__ import annotations

import os

from torch.distributed.checkpoint import format_utils as _torch
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
)

from ckpt.converting.convert import convert

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
]


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]
) -> None:
    """Converts a checkpoint of any format to a torch.save file; streams it, in little memory."""
    convert(dcp_checkpoint_dir, torch_save_path, to="torch", overwrite=True)


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Converts a torch.save file to the native format, which `ckpt.dcp.load` reads."""
    convert(torch_save_path, dcp_checkpoint_dir, to="ckpt", overwrite=True)


def __getattr__(name: str) -> object:
    return getattr(_torch, name)
