"""Flat parameters in the class that a module has: `sharding.composable`, see `ckpt.sharding`."""

from sharding.composable import *  # noqa: F403
from sharding.composable import __all__ as __all__
