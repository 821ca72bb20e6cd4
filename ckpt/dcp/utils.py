"""Lookups for planners: torch's module, as it is."""

from torch.distributed.checkpoint import utils as _torch
from torch.distributed.checkpoint.utils import *


def __getattr__(name: str) -> object:
    return getattr(_torch, name)  # private names, which trainers import too
