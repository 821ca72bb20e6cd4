"""Objects with a state dict: torch's module, as it is."""

from torch.distributed.checkpoint.stateful import *
