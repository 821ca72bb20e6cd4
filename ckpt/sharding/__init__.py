"""The training runtime, by the name that an installation has.

The wheel has the repository's `sharding` here, in place of this package: others use `sharding` as a
name at the top level (docs/decisions/038-one-package-is-installed.md). Names are imported when they
are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sharding

if TYPE_CHECKING:
    from sharding import *  # noqa: F403

__all__ = sharding.__all__


def __getattr__(name: str) -> object:
    return getattr(sharding, name)
