"""Training libraries: one file for each turns the library's hooks into saves and loads of ckpt.

Here are parts of several: the error for a missing package, and removal of checkpoints.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import ckpt
from ckpt.errors import CorruptError, NotACheckpointError
from ckpt.transfer.bases import check_unused


@contextmanager
def needs(package: str, distribution: str = "") -> Iterator[None]:
    """Adds the command that installs `package` to errors of imports in the block.

    `distribution` is its name in the package index, if that is another one. Raises
    ModuleNotFoundError, as without the block.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"ckpt.integrations.{package} needs the package {package}, which is not installed: "
            f"pip install {distribution or package}",
            name=error.name,
        ) from error


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
