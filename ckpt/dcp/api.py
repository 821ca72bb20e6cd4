"""The exception that torch's functions raise, and ours never: torch's module, as it is."""

from torch.distributed.checkpoint import api as _torch
from torch.distributed.checkpoint.api import *


def __getattr__(name: str) -> object:
    return getattr(_torch, name)  # private names, which trainers import too
