"""The parts of planners: torch's module, as it is."""

from torch.distributed.checkpoint.planner_helpers import *
