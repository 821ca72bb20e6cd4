"""DCP's own planners: torch's module, as it is."""

from torch.distributed.checkpoint import default_planner as _torch
from torch.distributed.checkpoint.default_planner import *


def __getattr__(name: str) -> object:
    return getattr(_torch, name)  # private names, which trainers import too
