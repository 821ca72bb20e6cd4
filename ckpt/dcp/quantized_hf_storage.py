"""A reader of quantised Hugging Face folders: torch's module, as it is."""

from torch.distributed.checkpoint.quantized_hf_storage import *
