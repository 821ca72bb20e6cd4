"""The storage protocol: torch's module, as it is."""

from torch.distributed.checkpoint import storage as _torch
from torch.distributed.checkpoint.storage import *


def __getattr__(name: str) -> object:
    return getattr(_torch, name)  # private names, which trainers import too
