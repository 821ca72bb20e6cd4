"""State dicts of models and optimizers: torch's module, as it is."""

from torch.distributed.checkpoint import state_dict as _torch
from torch.distributed.checkpoint.state_dict import *


def __getattr__(name: str) -> object:
    return getattr(_torch, name)  # private names, which trainers import too
