"""The memory of torch tensors, as arrays that bytes are placed into."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ckpt.transfer import Array
from formats.catalog import TensorRecord

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def array_over(tensor: torch.Tensor) -> Array:
    """The elements of a contiguous CPU tensor as a one-dimensional array over its own memory.

    The array's type is only as wide as an element, it does not interpret it.
    """
    if tensor.numel() == 0:
        return np.empty(0, dtype=_UNSIGNED[tensor.element_size()])
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().view(_UNSIGNED[tensor.element_size()])


def torch_can_share(array: np.ndarray) -> bool:
    """True when `torch.from_numpy` gives a tensor over the array's own memory."""
    return array.flags.writeable and all(
        stride >= 0 and stride % array.itemsize == 0 for stride in array.strides
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """True when `array_over` can give the tensor's own memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy(tensor)


def is_lazy(tensor: torch.Tensor) -> bool:
    """True for a view whose memory holds other bits than its values: conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()


def empty_for(record: TensorRecord, shape: Sequence[int]) -> torch.Tensor:
    """A new tensor of the record's dtype and this shape, its elements undefined.

    Raises the error of the checkpoint where torch has no memory for a size that no file holds.
    """
    dtype = torch_dtype(record.dtype.torch_name)
    try:
        return torch.empty(tuple(shape), dtype=dtype)
    except RuntimeError:
        list(record.pieces)  # opening the files shows whether they have as much
        raise


def torch_dtype(name: str) -> torch.dtype:
    """The torch type with this name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no dtype {name}; install a newer one")
    return found
