"""A reader of quantized Hugging Face folders: torch's module, as it is."""

from contextlib import suppress

with suppress(ImportError):  # older versions of torch lack it
    from torch.distributed.checkpoint.quantized_hf_storage import *
