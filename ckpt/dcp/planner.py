"""The planners' protocol: torch's module, as it is."""

from torch.distributed.checkpoint.planner import *
