"""State dicts of models and optimizers: torch's module, as it is."""

from torch.distributed.checkpoint.state_dict import *
