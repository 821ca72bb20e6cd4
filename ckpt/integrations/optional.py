"""Packages that an integration needs and ckpt does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Imports in this block that fail for want of `package` say how to install it.

    Raises ModuleNotFoundError, as without the block.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"ckpt.integrations.{package} needs the package {package}, which is not installed: "
            f"pip install {package}",
            name=error.name,
        ) from error
