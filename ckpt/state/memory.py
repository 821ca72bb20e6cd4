"""The memory of torch tensors as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.autograd.graph import increment_version

from formats.catalog import TensorRecord
from formats.dtypes import DType
from formats.errors import UnsupportedError
from sharding.describe.local_part import LocalPart
from sharding.describe.sharded_tensor import is_sharded
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
