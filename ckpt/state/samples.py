"""Samples a few bytes of many tensors, for a cheap comparison of replicas.

Rules:

1. A sample depends only on the tensor's elements in row-major order, not on strides, device or
   address. Replicas with equal bits thus have equal samples.
2. The sample of a tensor of at most `SAMPLE_BYTES` is the whole tensor. The sample of a larger one
   has `WORD_BYTES` at each of six `PLACES`, among them the first and the last bytes. Each place is
   a cache miss, so more places would take more than 3 µs.
3. One numpy call reads all contiguous tensors in host memory: 1 to 2 µs each. Samples of tensors on
   a device are gathered there and copied once for each device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ckpt.state.memory import is_lazy

WORD_BYTES = 8
PLACES = (0.0, 0.1867, 0.4141, 0.6213, 0.8243, 1.0)
"""The places of the words, as fractions of a tensor's length: not at the beginnings of rows."""
SAMPLE_BYTES = WORD_BYTES * len(PLACES)
_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes in which elements of these sizes can be gathered on any device."""


class _HostMemory:
    """All memory of this process as a numpy array. Only addresses of live tensors are read."""

    __array_interface__ = {  # noqa: RUF012 - numpy's protocol wants a dict
        "version": 3,
        "data": (1, True),
        "shape": (1 << 62,),
        "typestr": "|u1",
    }


Bytes = npt.NDArray[np.uint8]


def sampled(tensors: Sequence[torch.Tensor]) -> Bytes:
    """Returns a row of `SAMPLE_BYTES` bytes for each tensor; zeros for a tensor without elements.

    The tensors are detached. Reading a device waits for its queued work.
    """
    rows = np.zeros((len(tensors), SAMPLE_BYTES), np.uint8)
    at: list[int] = []
    addresses: list[int] = []
    sizes: list[int] = []
    others: dict[torch.device, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
            nbytes = tensor.nbytes
            if nbytes:
                at.append(index)
                addresses.append(tensor.data_ptr())
                sizes.append(nbytes)
        elif tensor.numel():
            others[tensor.device].append(index)
    if at:
        memory = np.asarray(_HostMemory())
        lengths = np.array(sizes, np.int64)
        bytes_at = np.array(addresses, np.int64)[:, None] - 1 + _offsets(lengths)
        rows[at] = memory.take(bytes_at)
    for indexes in others.values():
        found = torch.stack([_gathered(tensors[index]) for index in indexes])
        rows[indexes] = found.cpu().numpy()
    return rows


def _offsets(nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the offsets of the sampled bytes in tensors of these lengths (rule 2), in rows."""
    last = nbytes[:, None] - 1
    word = np.arange(WORD_BYTES, dtype=np.int64)
    starts = (np.maximum(last + 1 - WORD_BYTES, 0) * np.array(PLACES)).astype(np.int64)
    spread = (starts[:, :, None] + word).reshape(len(nbytes), SAMPLE_BYTES)
    whole = np.minimum(np.arange(SAMPLE_BYTES, dtype=np.int64), last)
    found: npt.NDArray[np.int64] = np.where(last < SAMPLE_BYTES, whole, spread)
    return found


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sample of a tensor that is not contiguous host memory, on its own device."""
    itemsize, device = tensor.itemsize, tensor.device
    offsets = _offsets(np.array([tensor.nbytes]))[0]
    if not is_lazy(tensor) and itemsize in _ELEMENTS:
        tensor = tensor.view(_ELEMENTS[itemsize])
    shape = tuple(tensor.shape) or (1,)
    places = np.unravel_index(offsets // itemsize, shape)
    elements = tensor.reshape(shape)[tuple(torch.from_numpy(p).to(device) for p in places)]
    found = elements.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
    byte = torch.from_numpy(offsets % itemsize).to(device)
    return found.view(SAMPLE_BYTES, itemsize).gather(1, byte[:, None])[:, 0]
