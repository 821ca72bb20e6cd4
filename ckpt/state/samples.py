"""A few bytes of many tensors, spread over each: whether two hold the same, at hardly any cost.

Rules:

1. The sample of a tensor depends on its elements alone, in row-major order: not on strides, device
   or on where it lies. So replicas have equal samples whenever they are equal to the bit.
2. A tensor of at most `SAMPLE_BYTES` is sampled in whole. Of a larger one, runs of `WORD_BYTES` are
   taken at six `PLACES`, the first and the last among them. Each is a cache miss, and no more of
   them would fit into 3 µs.
3. What lies end to end in host memory is read by one numpy call for all tensors: 1 to 2 µs each.
   What lies on a device is gathered there, and comes by one copy for each device.
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
"""Where in a tensor the words are, as parts of its length: not at the beginnings of rows."""
SAMPLE_BYTES = WORD_BYTES * len(PLACES)
_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types in which elements of these sizes can be gathered on any device."""


class _HostMemory:
    """All memory of this process, for numpy; only addresses of live tensors are read."""

    __array_interface__ = {  # noqa: RUF012 - numpy's protocol wants a dict
        "version": 3,
        "data": (1, True),
        "shape": (1 << 62,),
        "typestr": "|u1",
    }


Bytes = npt.NDArray[np.uint8]


def sampled(tensors: Sequence[torch.Tensor]) -> Bytes:
    """A row of `SAMPLE_BYTES` bytes for each tensor; zeros for those without elements.

    The tensors are detached; reading them waits for what their device has been told to do.
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
    """Which bytes are taken of tensors of these lengths (rule 2), a row for each."""
    last = nbytes[:, None] - 1
    word = np.arange(WORD_BYTES, dtype=np.int64)
    starts = (np.maximum(last + 1 - WORD_BYTES, 0) * np.array(PLACES)).astype(np.int64)
    spread = (starts[:, :, None] + word).reshape(len(nbytes), SAMPLE_BYTES)
    whole = np.minimum(np.arange(SAMPLE_BYTES, dtype=np.int64), last)
    found: npt.NDArray[np.int64] = np.where(last < SAMPLE_BYTES, whole, spread)
    return found


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The sample of a tensor that is on a device, or not end to end in memory, where it is."""
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
