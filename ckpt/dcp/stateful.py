"""Objects with a state dict: torch's module, as it is."""

from torch.distributed.checkpoint import stateful as _torch
from torch.distributed.checkpoint.stateful import *


def __getattr__(name: str) -> object:
    return getattr(_torch, name)  # private names, which trainers import too
