"""The exception that torch's functions raise, and ours never: torch's module, as it is."""

from torch.distributed.checkpoint.api import *
