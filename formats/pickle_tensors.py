"""torch's functions that rebuild tensors, as makers of records for the reader of pickles.

Rules:

1. A tensor whose elements lie in a storage is a `StoredTensor`: also a Parameter, and an instance
   of a subclass that adds methods or attributes.
2. A tensor that consists of others is an `Opaque` with its parts as attributes: quantised, sparse,
   nested, and subclasses that wrap tensors. A DTensor or ShardedTensor whose local tensor is the
   whole is a tensor.
3. A tensor without elements of its own in the file (on the meta device, or the conjugate of its
   bytes) is an `Opaque` without parts.

The originals are in torch/_utils.py and torch/_tensor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from formats.dtypes import DType
from formats.errors import FormatError
from formats.pickle_numpy import NumpyArray
from formats.pickle_records import Name, Opaque, Storage, StoredTensor, shape_of, view

Arguments = tuple[object, ...]

TENSOR = "torch.Tensor"
_BY_LAYOUT = {
    "torch.sparse_coo": ("indices", "values", "size", "is_coalesced"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values", "size"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values", "size"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values", "size"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values", "size"),
}
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_DTENSORS = ("torch.distributed.tensor.DTensor", "torch.distributed._tensor.api.DTensor")


def _of_storage(
    storage: object, dtype: DType | None, view_of: Sequence[object], metadata: object
) -> object:
    if isinstance(storage, Opaque):
        return Opaque(f"{TENSOR} of an unknown storage")
    if not isinstance(storage, Storage):
        raise FormatError("a tensor is built on a value that is not a storage")
    if metadata:
        return Opaque(f"{TENSOR}, the conjugate or negative of its bytes")
    return view(storage, storage.dtype if dtype is None else dtype, *view_of)


def _tensor(arguments: Arguments) -> object:
    storage, at, shape, strides, *rest = arguments
    return _of_storage(storage, None, (at, shape, strides), rest[2] if len(rest) > 2 else None)


def _tensor_of_dtype(arguments: Arguments) -> object:
    storage, at, shape, strides, _, _, dtype, *metadata = arguments
    if not isinstance(dtype, DType):
        raise FormatError("a tensor is built with a dtype that is not one of torch")
    return _of_storage(storage, dtype, (at, shape, strides), metadata[0] if metadata else None)


def _quantised(arguments: Arguments) -> object:
    storage, at, shape, strides, parameters, *_ = arguments
    if not isinstance(parameters, tuple) or len(parameters) not in (3, 4):
        raise FormatError("a quantised tensor has no scale and zero point")
    names: tuple[str, ...] = ("qscheme", "scale", "zero_point")
    if len(parameters) == 4:
        names = ("qscheme", "scales", "zero_points", "axis")
    state = dict(zip(names, parameters, strict=True))
    if isinstance(storage, Storage) and storage.numel < prod(shape_of(shape)):  # below 8 bits
        state = {"packed": storage, "size": shape, **state}
    else:
        state = {"int_repr": _of_storage(storage, None, (at, shape, strides), None), **state}
    return Opaque(f"{TENSOR}, quantised", (), state)


def _sparse(arguments: Arguments) -> object:
    layout, data = arguments
    names = _BY_LAYOUT.get(str(layout))
    if names is None or not isinstance(data, tuple) or len(data) not in (len(names), 3):
        raise FormatError("a sparse tensor has no known layout and parts")
    return Opaque(
        f"{TENSOR}, sparse", (), {"layout": layout, **dict(zip(names, data, strict=False))}
    )


def _nested(arguments: Arguments) -> object:
    names = ("values", "sizes", "strides", "storage_offsets")
    return Opaque(f"{TENSOR}, nested", (), dict(zip(names, arguments, strict=True)))


def _jagged(arguments: Arguments) -> object:
    (parts,) = arguments
    return Opaque(f"{TENSOR}, jagged", (), parts)


def _meta(arguments: Arguments) -> object:
    return Opaque(f"{TENSOR} on the meta device, without data")


def _of_device(arguments: Arguments) -> object:
    data, dtype, *_ = arguments
    if isinstance(data, StoredTensor | NumpyArray) and data.dtype == dtype:
        return data
    return Opaque(f"{TENSOR} of another device")


def _wrapper(arguments: Arguments) -> object:
    return Opaque(TENSOR, arguments)


def _parameter(arguments: Arguments) -> object:
    if isinstance(arguments[0], StoredTensor | Opaque | NumpyArray):
        return arguments[0]
    raise FormatError("a parameter is built on a value that is not a tensor")


def _with_attributes(arguments: Arguments) -> object:
    maker, kind, inner, state = arguments
    if not isinstance(maker, Name) or not isinstance(kind, Name) or type(inner) is not tuple:
        raise FormatError("a tensor is built without a function, a class and arguments")
    if maker.full == _FROM_TYPE:
        raise FormatError("a tensor is built of one that is built in the same way")
    made = TENSOR_MAKERS.get(maker.full, _unknown)(inner)
    if not isinstance(made, Opaque):
        return made
    if kind.full in _DTENSORS:
        local = _attribute(state, "_local_tensor")
        if isinstance(local, StoredTensor) and len(inner) > 2 and local.shape == inner[2]:
            return local
    if kind.full == _SHARDED and isinstance(state, tuple) and len(state) > 1:
        whole = _attribute(_state(state[1]), "size")
        shards = state[0] if isinstance(state[0], list) else []
        local = _attribute(_state(shards[0]), "tensor") if len(shards) == 1 else None
        if isinstance(local, StoredTensor) and local.shape == whole:
            return local
    return Opaque(kind.full, (), made.state or state)


def _unknown(arguments: Arguments) -> object:
    return Opaque(TENSOR, arguments)


def _state(value: object) -> object:
    return value.state if isinstance(value, Opaque) else None


def _attribute(state: object, name: str) -> object:
    """Returns an attribute in the state of an object: a dict, or two with its slots."""
    for part in state[:2] if isinstance(state, tuple) else (state,):
        if type(part) is dict and name in part:
            return part[name]
    return None


TENSOR_MAKERS: dict[str, Callable[[Arguments], object]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantised,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_device_tensor_from_numpy": _of_device,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _of_device,
    "torch._utils._rebuild_xla_tensor": _of_device,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
    _FROM_TYPE: _with_attributes,
}
"""Makes the value of a call of each function."""
