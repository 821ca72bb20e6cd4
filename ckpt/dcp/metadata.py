"""DCP's description of a checkpoint: torch's module, as it is."""

from torch.distributed.checkpoint.metadata import *
