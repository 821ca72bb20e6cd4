"""The memory of torch tensors: as bytes, as streams for writers, and where it lacks the elements.

Rules:

1. A tensor can be stored if its memory holds its elements. Classes with `__torch_dispatch__`, and
   tensors inside torch's function transforms, compute their elements instead.
2. A Parameter, or a subclass that only adds methods, is stored by its elements. Its class and its
   attributes belong to the program.

[Note: samples]
A sample has a few bytes of a tensor, for a cheap comparison of replicas. It depends only on the
elements in row-major order, not on strides, device or address, so replicas with equal bits have
equal samples. The sample of a tensor of at most `SAMPLE_BYTES` is the whole tensor. That of a
larger one has `WORD_BYTES` at each of six `PLACES`, among them the first and the last bytes. Each
place is a cache miss, so more places would take more than 3 µs. One numpy call reads all contiguous
tensors in host memory: 1 to 2 µs each. Samples of tensors on a device are gathered there and copied
once for each device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt.errors import StateError
from ckpt.plan.save_plan import WriteItem
from ckpt.state.subclass_state import is_composed
from formats.catalog import OutgoingTensor, TensorRecord
from formats.dtypes import DType
from formats.errors import UnsupportedError
from sharding.describe.dtensor import ORDINARY as ORDINARY
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


def is_conj_or_neg(tensor: torch.Tensor) -> bool:
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
    if type(tensor) not in ORDINARY:
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
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(
            f"torch {torch.__version__} has no dtype {name}; install a newer torch"
        )
    return dtype


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
        flat = (torch.split(tensor.view(-1), CHECKED_ELEMENTS) for tensor in (source, target))
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


def take_samples(tensors: Sequence[torch.Tensor]) -> Bytes:
    """Returns a row of `SAMPLE_BYTES` bytes for each tensor; zeros for a tensor without elements.

    The tensors are detached. Reading a device waits for its queued work.
    """
    return start_samples(tensors)()


def start_samples(tensors: Sequence[torch.Tensor]) -> Callable[[], Bytes]:
    """Returns a function that returns the samples of now, as `take_samples`.

    The function alone waits for the work that is queued on CUDA devices now.
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
    arriving: list[tuple[list[int], torch.Tensor, torch.cuda.Event | None]] = []
    for device, indexes in others.items():
        samples, arrival = torch.stack([_gather_sample(tensors[i]) for i in indexes]), None
        if device.type == "cuda":
            host = torch.empty(samples.shape, dtype=samples.dtype, pin_memory=True)
            samples = host.copy_(samples, non_blocking=True)
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record(torch.cuda.current_stream(device))
        arriving.append((indexes, samples, arrival))

    def finish() -> Bytes:
        while arriving:
            indexes, samples, arrival = arriving.pop()
            if arrival is not None:
                arrival.synchronize()
            rows[indexes] = samples.cpu().numpy()
        return rows

    return finish


def _offsets(nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the offsets of the sampled bytes in tensors of these lengths (rule 2), in rows."""
    last = nbytes[:, None] - 1
    word = np.arange(WORD_BYTES, dtype=np.int64)
    starts = (np.maximum(last + 1 - WORD_BYTES, 0) * np.array(PLACES)).astype(np.int64)
    spread = (starts[:, :, None] + word).reshape(len(nbytes), SAMPLE_BYTES)
    whole = np.minimum(np.arange(SAMPLE_BYTES, dtype=np.int64), last)
    found: npt.NDArray[np.int64] = np.where(last < SAMPLE_BYTES, whole, spread)
    return found


def _gather_sample(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sample of a tensor that is not contiguous host memory, on its own device."""
    itemsize, device = tensor.itemsize, tensor.device
    offsets = _offsets(np.array([tensor.nbytes]))[0]
    if not is_conj_or_neg(tensor) and itemsize in _ELEMENTS:
        tensor = tensor.view(_ELEMENTS[itemsize])
    shape = tuple(tensor.shape) or (1,)
    places = np.unravel_index(offsets // itemsize, shape)
    # The numbers are in pageable memory, which CUDA has read when a copy returns.
    at = tuple(torch.from_numpy(place).to(device, non_blocking=True) for place in places)
    elements = tensor.reshape(shape)[at]
    found = elements.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
    byte = torch.from_numpy(offsets % itemsize).to(device, non_blocking=True)
    return found.view(SAMPLE_BYTES, itemsize).gather(1, byte[:, None])[:, 0]


_PYTHON = torch._C.DispatchKey.Python
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_KINDS = {
    "MaskedTensor": "store get_data() and get_mask() under keys of their own",
    "FakeTensor": "a fake tensor has a shape and no elements: build the state outside of "
    "FakeTensorMode",
    "FunctionalTensor": "store the tensor that it represents, outside of torch's tracing",
}
"""The advice by the name of a class of torch."""


def check_mode() -> None:
    """Raises StateError inside torch's FakeTensorMode."""
    if torch._C._get_dispatch_mode(_FAKE) is not None:
        raise StateError(
            "a FakeTensorMode is active: tensors made in it have no elements; save and load "
            "outside of it"
        )


def wait_for(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself, after the wait for a collective that produces it."""
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return tensor.wait()  # type: ignore[attr-defined, no-any-return]
    return tensor


def kind_problem(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor of this kind cannot be stored or filled, with advice; None if it can."""
    if (
        type(tensor) in ORDINARY
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
    ):
        return None
    if is_lazy(tensor):
        return "a lazy module has no values yet; run it once"
    if is_sharded(tensor):
        return None
    if tensor.is_nested:
        return "a nested tensor cannot be stored: store unbind(), a list"
    if tensor.is_quantized:
        return (
            "a quantised tensor cannot be stored: store int_repr(), its scales and zero points, or "
            "dequantize()"
        )
    if tensor.layout != torch.strided:
        return (
            f"a {tensor.layout} tensor cannot be stored: store its indices and values, or "
            "to_dense()"
        )
    if is_composed(tensor) or is_composed(getattr(tensor, "_local_tensor", None)):
        return (
            f"a {type(tensor).__qualname__} wraps other tensors, and is stored only as an "
            "optimizer's state of a parameter: store its inner tensors"
        )
    if _answers_for_itself(tensor):
        todo = _KINDS.get(type(tensor).__name__, "store its inner tensors")
        return (
            f"a {type(tensor).__qualname__} does not have its elements in memory of its own: {todo}"
        )
    return None


def address_of(tensor: torch.Tensor) -> int:
    """Returns the address of a dense tensor that has all its elements in order; 0 in any doubt."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return 0
    try:
        nbytes, held_bytes = tensor.nbytes, tensor.untyped_storage().nbytes()
        reach = tensor.storage_offset() * tensor.itemsize + nbytes
        if nbytes and held_bytes >= reach and tensor.is_contiguous():
            return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # torch's, for a tensor without a storage
        pass
    return 0


def host_address(tensor: object) -> int:
    """Returns `address_of` an ordinary tensor whose values are bits of host memory; else 0."""
    if type(tensor) not in ORDINARY or not tensor.is_cpu or is_conj_or_neg(tensor):  # type: ignore[attr-defined, arg-type]
        return 0
    return address_of(tensor)  # type: ignore[arg-type]


def memory_problem(local: torch.Tensor) -> str | None:
    """Returns why a tensor's memory lacks elements, with advice; None if it has them all."""
    count = local.numel()
    if local.is_meta:
        return "a tensor on the meta device has no data to store"
    if not count:
        return None
    try:
        is_there = local.data_ptr() != 0 and not local._is_zerotensor()
        held_bytes = local.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # torch's, for a tensor without a storage
        return (
            "a tensor inside a function transform (vmap, grad, jvp) has no memory of its own: "
            "return it from the function, or save and load outside of it"
        )
    if local.is_contiguous():
        reach = int(local.storage_offset()) + count
    else:
        steps = zip(local.shape, local.stride(), strict=True)
        reach = int(local.storage_offset()) + 1 + sum((size - 1) * step for size, step in steps)
    needed_bytes = reach * local.element_size()
    if held_bytes < needed_bytes:
        return (
            f"the memory of this tensor was freed: its storage has {held_bytes} bytes, and "
            f"{needed_bytes} are needed for its shape {tuple(local.shape)}; save and load while "
            "the tensor has its memory"
        )
    if not is_there:
        return (
            "a functional tensor, or one of zeros without memory, has no elements of its own; "
            "store a clone() that is made outside of torch's tracing"
        )
    return None


def _answers_for_itself(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class computes its elements. DTensors do not count."""
    return (
        type(tensor) not in ORDINARY
        and not hasattr(tensor, "_local_tensor")
        and (torch._C._dispatch_keys(tensor).has(_PYTHON) or is_traceable_wrapper_subclass(tensor))
    )


STAGE_BYTES = 16 << 20
"""Bytes that are copied at once of a tensor whose memory cannot be written as it lies."""


def outgoing(item: WriteItem, local: torch.Tensor) -> OutgoingTensor:
    """Returns an item for a format's writer, without a copy if the tensor's memory allows it.

    `local` is the rank's part of the tensor, detached.
    """
    name, _, dtype, lo, hi, shape, _ = item
    if is_plain(local):
        data = memory_of(local)
        if hi - lo < local.numel():
            data = data[lo * dtype.itemsize : hi * dtype.itemsize]
        return OutgoingTensor(name, shape, dtype, lambda: iter((data,)), stable=True)
    return OutgoingTensor(name, shape, dtype, lambda: _stage(local, lo, hi, dtype))


def outgoing_whole(name: str, dtype: DType, local: torch.Tensor) -> OutgoingTensor:
    """Returns all elements of a tensor for a format's writer."""
    numel, shape = local.numel(), tuple(local.shape)
    return outgoing(WriteItem(name, 0, dtype, 0, numel, shape, 0), local)


def blocks(local: torch.Tensor, lo: int, hi: int, dtype: DType) -> Iterator[memoryview]:
    """Returns elements `[lo, hi)` of a tensor in row-major order, as blocks of host memory.

    The blocks are the tensor's own memory if possible; else copies, made one at a time.
    """
    if is_plain(local):
        return iter((memory_of(local)[lo * dtype.itemsize : hi * dtype.itemsize],))
    return _stage(local, lo, hi, dtype)


def _stage(local: torch.Tensor, lo: int, hi: int, dtype: DType) -> Iterator[memoryview]:
    """Yields elements `[lo, hi)` of a tensor in row-major order, copied to the CPU in blocks."""
    if local.is_contiguous() and not is_conj_or_neg(local):
        flat = local.reshape(-1)
        step = max(1, STAGE_BYTES // dtype.itemsize)
        for start in range(lo, hi, step):
            yield memory_of(flat[start : min(start + step, hi)].cpu())
        return
    from sharding.torch_versions import movable  # imports torch's DTensor

    # A block is whole rows: a strided view cannot be flattened without a copy of all of it.
    rows = local.shape[0] if local.ndim else 1
    inner = local.numel() // rows
    step = max(1, STAGE_BYTES // max(1, inner * dtype.itemsize))
    for first in range(lo // inner, -(-hi // inner), step):
        last = min(first + step, rows)
        block = local[first:last] if local.ndim else local
        whole = movable(block).resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        start, stop = max(lo - first * inner, 0), min(hi - first * inner, whole.numel())
        yield memory_of(whole[start:stop])
