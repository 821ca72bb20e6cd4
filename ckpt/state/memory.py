"""The memory of torch tensors as bytes.

Samples a few bytes of many tensors, for a cheap comparison of replicas.

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
from torch.autograd.graph import increment_version

from formats.catalog import TensorRecord
from formats.dtypes import DType
from formats.errors import UnsupportedError
from sharding.describe.dtensor import is_sharded
from sharding.describe.members import LocalPart
from sharding.errors import ArgumentTypeError

_AS_THEY_ARE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16}
    | {torch.int8, torch.uint8, torch.bool}
)
"""Dtypes that numpy has too."""
CHECKED_ELEMENTS = 1 << 21
"""The elements whose range is checked at once: they stay in the cache for the cast."""


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor's elements: its own memory, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    if tensor.dtype in _AS_THEY_ARE:  # nearly all tensors; the other way takes three times as long
        return tensor.numpy().data.cast("B")
    # A tensor of one element is contiguous with any strides, and `view` wants a stride of 1.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def torch_can_share(array: np.ndarray) -> bool:
    """Whether `torch.from_numpy` gives a tensor over the array's own memory."""
    return array.flags.writeable and all(
        stride >= 0 and stride % array.itemsize == 0 for stride in array.strides
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether `memory_of` can give the tensor's own memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a view is conjugated or negated: its memory has other bits than its values."""
    return tensor.is_conj() or tensor.is_neg()


def will_change(tensor: torch.Tensor | LocalPart) -> None:
    """Tells torch that the memory of a target is about to change, as torch does not see it.

    A backward pass that needs the old values then raises an error, and a background save that has
    not copied them yet notices the change.
    """
    if isinstance(tensor, LocalPart):
        increment_version(tensor.local)
        return
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        if is_sharded(tensor):
            for shard in tensor.local_shards():
                increment_version(shard.tensor)
            return
        local = getattr(tensor, "_local_tensor", None)
        if isinstance(local, torch.Tensor):
            increment_version(local)
    increment_version(tensor)


def empty_for(record: TensorRecord, shape: Sequence[int]) -> torch.Tensor:
    """Returns a new tensor of the record's dtype and this shape; its elements are undefined.

    Raises the checkpoint's error if torch lacks memory for a size that the files do not have.
    """
    dtype = torch_dtype(record.dtype.torch_name)
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    except RuntimeError:
        list(record.pieces)  # opens the files, which shows whether they have so many bytes
        raise


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype with this name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ArgumentTypeError(
            f"torch {torch.__version__} has no dtype {name}; install a newer one"
        )
    return found


def cast_into(
    name: str, source: memoryview, stored: DType, target: memoryview, dtype: DType
) -> None:
    """Fills `target` with the elements of `source`, a part of a tensor, cast to another dtype.

    Both are writable memory for equally many elements, aligned to them. Raises as `check_range`.
    """
    elements = torch.frombuffer(source, dtype=torch_dtype(stored.torch_name))
    cast = torch.frombuffer(target, dtype=torch_dtype(dtype.torch_name))
    remedy = "choose another dtype for this name, or keep its own, by a pattern in dtype="
    copy_in_range(name, elements, cast, remedy)


def copy_in_range(name: str, source: torch.Tensor, target: torch.Tensor, remedy: str) -> None:
    """Copies elements into a tensor of another dtype. Raises as `check_range`."""
    parts = [(source, target)]
    if source.is_contiguous() and is_plain(target):  # each part is checked, and then in the cache
        flat = (torch.split(one.view(-1), CHECKED_ELEMENTS) for one in (source, target))
        parts = list(zip(*flat, strict=True))
    for some, into in parts:
        check_range(name, some, into.dtype, remedy)
        into.detach().copy_(some)  # a view of an inference tensor takes no copy outside its mode


def check_range(name: str, elements: torch.Tensor, dtype: torch.dtype, remedy: str) -> None:
    """Raises UnsupportedError if a float, or a complex number, is beyond the range of `dtype`.

    A cast would make such a number infinite, NaN or the largest one of `dtype`, or lose infinity.
    """
    flat, shown = elements.reshape(-1), str(dtype).removeprefix("torch.")
    most = torch.finfo(dtype).max
    if flat.is_complex():
        flat, dtype = torch.view_as_real(flat.resolve_conj()).reshape(-1), dtype.to_real()
    for at in range(0, len(flat), CHECKED_ELEMENTS):
        chunk = flat[at : at + CHECKED_ELEMENTS]
        some = chunk.float() if chunk.itemsize == 1 else chunk
        lo, hi = some.aminmax()
        if lo.item() >= -most and hi.item() <= most:  # false if any is NaN or infinite
            continue
        lost = some[~_in_range(some, dtype) & ~some.isnan()]
        if len(lost):
            raise UnsupportedError(
                f"{name}: its element {lost[0].item():.6g} is beyond the range of {shown}; {remedy}"
            )


def _in_range(elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether each element is finite or infinite after a cast as before; False for NaN."""
    cast = elements.to(dtype).double()
    kept = ~cast.isnan() & (cast.isinf() == elements.isinf())
    # Torch makes larger numbers 448. Those up to 464 are nearest to it.
    return kept & (elements.abs() <= 464) if dtype is torch.float8_e4m3fn else kept


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
