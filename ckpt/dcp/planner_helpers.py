"""The parts of planners: torch's module, as it is."""

from torch.distributed.checkpoint import planner_helpers as _torch
from torch.distributed.checkpoint.planner_helpers import *


def __getattr__(name: str) -> object:
    return getattr(_torch, name)  # private names, which trainers import too
