"""Removes checkpoints of ckpt and of the libraries that it is integrated with."""

from __future__ import annotations

import os
import shutil

import ckpt
from ckpt.errors import CorruptError, NotACheckpointError
from ckpt.transfer.bases import check_unused


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint of ckpt at a path or URL, or on a disk any other file, folder or link.

    Raises InUseError for a folder from which a checkpoint beside it borrows, CorruptError for a
    damaged checkpoint in a bucket, whose files are unknown.
    """
    if os.path.islink(path):
        os.remove(path)
        return
    try:
        ckpt.delete(path)
    except (NotACheckpointError, CorruptError) as error:
        if os.path.isdir(path):
            check_unused(path)
            shutil.rmtree(path)
        elif os.path.exists(path):
            os.remove(path)
        elif isinstance(error, CorruptError):
            raise
