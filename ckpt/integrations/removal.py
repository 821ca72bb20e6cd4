"""Removes checkpoints of ckpt and of the libraries that it is integrated with."""

from __future__ import annotations

import os
import shutil

import ckpt
from ckpt.errors import NotACheckpointError


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint of ckpt at a path or URL, or on a disk any other file or folder."""
    try:
        ckpt.delete(path)
    except NotACheckpointError:
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.exists(path):
            os.remove(path)
