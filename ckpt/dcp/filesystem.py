"""FileSystemWriter and FileSystemReader with torch's arguments, on the native format."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch.distributed.checkpoint import filesystem as _torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from ckpt.dcp.storage_reader import CkptStorageReader
from ckpt.dcp.storage_writer import CkptStorageWriter
from ckpt.errors import ArgumentError

__all__ = ["FileSystem", "FileSystemBase", "FileSystemReader", "FileSystemWriter"]


class FileSystemWriter(CkptStorageWriter):
    """Writes the native format, at any path or URL, with the arguments of torch's class.

    Only `overwrite` has an effect. The other arguments tune torch's own files: here a rank writes
    one file, flushes it, and copies from a device block by block. Raises ArgumentError for
    extensions, which transform the bytes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[object] | None = None,
        serialization_format: object = None,
    ) -> None:
        if _extensions:
            raise ArgumentError(
                "_extensions transform the stream of a file, so that no reader of the format "
                "opens it; pass storage_writer=CkptStorageWriter(path, compress=True) for zstd, or "
                "torch's own FileSystemWriter"
            )
        super().__init__(path, overwrite=overwrite)


class FileSystemReader(CkptStorageReader):
    """Reads every format, at any path or URL, with the arguments of torch's class.

    Raises ArgumentError for a registry of extensions.
    """

    def __init__(
        self, path: str | os.PathLike[str], _extension_registry: object | None = None
    ) -> None:
        if _extension_registry is not None:
            raise ArgumentError(
                "_extension_registry transforms the stream of a file; read such a folder with "
                "torch's own FileSystemReader"
            )
        super().__init__(path)


def __getattr__(name: str) -> object:
    return getattr(_torch, name)  # private names, and `SerializationFormat`, which torch 2.6 lacks
