"""Readers and writers of Hugging Face folders: a reader of ours, torch's own writer."""

from __future__ import annotations

import os
from contextlib import suppress

from ckpt.dcp.storage_reader import CkptStorageReader

with suppress(ImportError):  # older versions of torch lack it
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]


class HuggingFaceStorageReader(CkptStorageReader):
    """Reads a Hugging Face folder, or any other checkpoint; `thread_count` has no effect."""

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1) -> None:
        super().__init__(path)
