"""A reader of quantized Hugging Face folders: torch's module, as it is."""

import importlib
from contextlib import suppress

with suppress(ImportError):  # older versions of torch lack it
    from torch.distributed.checkpoint.quantized_hf_storage import *


def __getattr__(name: str) -> object:
    try:
        theirs = importlib.import_module("torch.distributed.checkpoint.quantized_hf_storage")
        return getattr(theirs, name)
    except ImportError as error:  # an import asks this module for `__path__`
        raise AttributeError(f"this version of torch has no {name}: {error}") from error
