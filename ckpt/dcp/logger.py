"""The log of torch's functions: torch's module, as it is."""

from torch.distributed.checkpoint import logger as _torch


def __getattr__(name: str) -> object:
    return getattr(_torch, name)
