"""Hooks that replace the reduction of gradients: `sharding.comm_hooks`, see `ckpt.sharding`."""

from sharding.comm_hooks import *  # noqa: F403
from sharding.comm_hooks import __all__ as __all__
