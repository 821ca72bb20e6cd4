"""DCP's own planners: torch's module, as it is."""

from torch.distributed.checkpoint.default_planner import *
