"""Finds tensors that cannot be stored or filled, because their memory does not have their elements.

Rules:

1. A tensor can be stored if its memory holds its elements. Classes with `__torch_dispatch__`, and
   tensors inside torch's function transforms, compute their elements instead.
2. A Parameter, or a subclass that only adds methods, is stored by its elements. Its class and its
   attributes belong to the program.
"""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt.errors import StateError
from ckpt.state.subclass_state import is_composed
from sharding.describe.dtensor import ORDINARY as ORDINARY
from sharding.describe.dtensor import is_sharded

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


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself, after the wait for a collective that produces it."""
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return tensor.wait()  # type: ignore[attr-defined, no-any-return]
    return tensor


def kind_problem(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor of this kind cannot be stored or filled, with advice; None if it can."""
    if type(tensor) in ORDINARY and _is_dense(tensor):
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


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether an ordinary tensor is neither sparse, nested nor quantised."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _answers_for_itself(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class computes its elements. DTensors do not count."""
    return (
        type(tensor) not in ORDINARY
        and not hasattr(tensor, "_local_tensor")
        and (torch._C._dispatch_keys(tensor).has(_PYTHON) or is_traceable_wrapper_subclass(tensor))
    )
