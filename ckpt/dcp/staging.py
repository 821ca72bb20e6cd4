"""Stagers: torch's module, as it is."""

from torch.distributed.checkpoint.staging import *
