"""The rival: torch.distributed.checkpoint as its documentation uses it."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as torch_dcp


def save(folder: str, state: dict[str, object]) -> None:
    """One save with default settings: files are flushed, and carry CRC32s that no load checks."""
    torch_dcp.save(state, checkpoint_id=folder)


def save_without_checksums(folder: str, state: dict[str, object]) -> None:
    """The same without the CRC32s."""
    torch.serialization.set_crc32_options(False)
    try:
        torch_dcp.save(state, checkpoint_id=folder)
    finally:
        torch.serialization.set_crc32_options(True)


def load(folder: str, state: dict[str, object]) -> None:
    """One load into the tensors of the state dicts."""
    torch_dcp.load(state, checkpoint_id=folder)
