"""The gradient scaler of sharded modules: `sharding.sharded_grad_scaler`, see `ckpt.sharding`."""

from sharding.sharded_grad_scaler import *  # noqa: F403
from sharding.sharded_grad_scaler import __all__ as __all__
