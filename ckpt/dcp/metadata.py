"""DCP's description of a checkpoint: torch's module, as it is."""

from torch.distributed.checkpoint import metadata as _torch
from torch.distributed.checkpoint.metadata import *


def __getattr__(name: str) -> object:
    return getattr(_torch, name)  # private names, which trainers import too
