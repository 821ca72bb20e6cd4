"""Optimizer state by way of ShardedTensors: torch's module, as it is."""

from torch.distributed.checkpoint.optimizer import *
