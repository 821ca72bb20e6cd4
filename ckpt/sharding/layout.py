"""The layout algebra: `sharding.layout`, see `ckpt.sharding`."""

from sharding.layout import *  # noqa: F403
from sharding.layout import __all__ as __all__
