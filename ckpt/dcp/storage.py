"""The storage protocol: torch's module, as it is."""

from torch.distributed.checkpoint.storage import *
