"""Optimizer state by way of ShardedTensors: torch's module, as it is."""

from torch.distributed.checkpoint import optimizer as _torch
from torch.distributed.checkpoint.optimizer import *


def __getattr__(name: str) -> object:
    return getattr(_torch, name)  # private names, which trainers import too
