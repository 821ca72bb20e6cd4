"""The error for a missing package that only an integration needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
