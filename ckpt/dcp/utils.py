"""Lookups for planners: torch's module, as it is."""

from torch.distributed.checkpoint.utils import *
