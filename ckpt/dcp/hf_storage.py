"""Readers and writers of Hugging Face folders: a reader of ours, torch's own writer."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

from ckpt.dcp.storage_reader import CkptStorageReader
from formats.catalog import Catalog
from formats.joined import under

with suppress(ImportError):  # older versions of torch lack it
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]


class HuggingFaceStorageReader(CkptStorageReader):
    """Reads a Hugging Face folder, or any other checkpoint; `thread_count` has no effect.

    Of a training's folder, such as Trainer's `checkpoint-500`, it reads the weights.
    """

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1) -> None:
        super().__init__(path)

    def _part_of(self, catalog: Catalog) -> Catalog:
        return under(catalog, catalog.weights) if catalog.weights else catalog


def __getattr__(name: str) -> object:
    try:
        return getattr(importlib.import_module("torch.distributed.checkpoint.hf_storage"), name)
    except ImportError as error:  # an import asks this module for `__path__`
        raise AttributeError(f"this version of torch has no {name}: {error}") from error
