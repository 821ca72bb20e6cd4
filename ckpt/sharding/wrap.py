"""Policies that choose the modules to wrap: `sharding.wrap`, see `ckpt.sharding`."""

from sharding.wrap import *  # noqa: F403
from sharding.wrap import __all__ as __all__
