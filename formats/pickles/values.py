"""The values in a pickle: arrays of numpy, tensors of torch, and parts of other objects.

Neither numpy nor torch is needed. Rules:

1. An array of numpy whose dtype is one of tensors, little-endian and not structured, has its bytes
   here. Any other array is shown and not read. A scalar becomes Python's own value, equal to it, as
   in `ckpt.save`.
2. A tensor whose elements lie in a storage is a `StoredTensor`: also a Parameter, and an instance
   of a subclass that adds methods or attributes.
3. A tensor that consists of others is an `Opaque` with its parts as attributes: quantised, sparse,
   nested, and subclasses that wrap tensors. A DTensor or ShardedTensor whose local tensor is the
   whole is a tensor.
4. A tensor without elements of its own in the file (on the meta device, or the conjugate of its
   bytes) is an `Opaque` without parts.
5. An object that nothing makes shows its parts by the first of these rules that fits; otherwise it
   is an opaque value of the tree. An object that was filled with items is a dict or list of them. A
   module (`_parameters`, `_buffers`, `_modules`) is its state dict, from FQNs to parameters and
   persistent buffers. An optimizer (`param_groups`, `state`) is its state dict, with parameters
   numbered. An object of a TorchScript program is a dict of its attributes, or, if its class is one
   of C++, the state that the class gave. An object of which an argument is a tensor, such as a
   namedtuple, is the tuple of its arguments. An object of which an attribute is a tensor is the
   dict of its attributes. A file in memory is its bytes.
6. Nothing is copied here. A walk counts the parts that it takes, so objects may repeat.

The originals are in torch/_utils.py and torch/_tensor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from struct import unpack

from formats.dtypes import BY_NAME, BY_TORCH_NAME, DType
from formats.errors import FormatError, HostileError
from formats.limits import ELEMENTS
from formats.pickles.records import Name, Opaque, Storage, StoredTensor, shape_of, view

_CODES = {
    **{f"f{size}": f"F{8 * size}" for size in (2, 4, 8)},
    **{f"i{size}": f"I{8 * size}" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"U{8 * size}" for size in (1, 2, 4, 8)},
    "b1": "BOOL",
    "c8": "C64",
    "c16": "C128",
}
_CODE_CHARS = 40
_UNPACKED = {"f2": "<e", "f4": "<f", "f8": "<d", "b1": "?", "c8": "<2f", "c16": "<2d"}
ARRAYS = frozenset(
    f"numpy.{name}"
    for name in ("ndarray", "memmap", "matrix", "core.memmap.memmap", "matrixlib.defmatrix.matrix")
)
"""Classes of arrays without content beside the elements."""


def dtype_of_code(code: str) -> DType | None:
    """Returns the dtype of a tensor for numpy's text for a dtype; None if tensors have none.

    >>> str(dtype_of_code("<f4")), dtype_of_code(">f4"), dtype_of_code("|O")
    ('float32', None, None)
    """
    order, kind = (code[:1], code[1:]) if code[:1] in "<>|=" else ("", code)
    name = _CODES.get(kind)
    return None if name is None or (order == ">" and not kind.endswith("1")) else BY_NAME[name]


def code_of(dtype: DType) -> str | None:
    """Returns numpy's text for the dtype of a tensor; None if numpy has none.

    >>> from formats.dtypes import BY_NAME
    >>> code_of(BY_NAME["F16"]), code_of(BY_NAME["U8"]), code_of(BY_NAME["BF16"])
    ('<f2', '|u1', None)
    """
    for kind, name in _CODES.items():
        if name == dtype.name:
            return f"{'|' if kind.endswith('1') else '<'}{kind}"
    return None


@dataclass(slots=True, eq=False)
class NumpyDType:
    """`numpy.dtype`, of which `build` sets the byte order."""

    code: str
    """numpy's text, such as `f4` or `U3`; of a dtype of `ml_dtypes` its name."""
    order: str = ""

    def build(self, state: object) -> None:
        """Sets the state of the pickle: version, order, base and shape, names, fields, ..."""
        if type(state) is not tuple or len(state) < 8 or state[1] not in ("<", ">", "|", "="):
            raise FormatError("the state of a numpy dtype is not one of numpy")
        self.order = str(state[1])
        if state[2] is not None or state[3] is not None:
            self.code = "V"  # structured

    @property
    def dtype(self) -> DType | None:
        """The dtype of a tensor with such elements; None if there is none."""
        if self.code in BY_TORCH_NAME:
            return BY_TORCH_NAME[self.code]
        return dtype_of_code(self.order + self.code)

    def __repr__(self) -> str:
        return f"{self.order}{self.code}".strip("|")


@dataclass(slots=True, eq=False)
class NumpyArray:
    """`numpy.ndarray`, of which `build` sets the content."""

    shape: tuple[int, ...] = ()
    numpy_dtype: NumpyDType | None = None
    is_fortran: bool = False
    data: bytes | None = None
    """The elements; None for an array of objects."""

    def build(self, state: object) -> None:
        """Sets the state of the pickle: version, shape, dtype, order and bytes."""
        if type(state) is not tuple or len(state) != 5 or not isinstance(state[2], NumpyDType):
            raise FormatError("the state of a numpy array is not one of numpy")
        self.fill(state[1], state[2], state[4], bool(state[3]))

    def fill(self, shape: object, dtype: NumpyDType, data: object, is_fortran: bool) -> None:
        """Sets the content. Raises FormatError if the bytes are not those of the shape."""
        self.shape, self.numpy_dtype, self.is_fortran = shape_of(shape), dtype, is_fortran
        self.data = bytes(data) if isinstance(data, bytes) else None
        known = self.dtype
        if prod(size or 1 for size in self.shape) >= ELEMENTS:
            raise HostileError(f"a numpy array of shape {self.shape} has absurdly many elements")
        if known is not None and len(self.data or b"") != known.nbytes(self.shape):
            raise FormatError(
                f"a numpy array of shape {self.shape} and dtype {dtype!r} has "
                f"{len(self.data or b'')} bytes, {known.nbytes(self.shape)} are needed"
            )

    @property
    def dtype(self) -> DType | None:
        """The dtype of a tensor with these elements; None if there is none."""
        return None if self.numpy_dtype is None else self.numpy_dtype.dtype

    @property
    def is_numeric(self) -> bool:
        """Whether the elements are numbers, also of a dtype that no tensor has."""
        code = "" if self.numpy_dtype is None else self.numpy_dtype.code
        return self.data is not None and code.lstrip("<>|=")[:1] in ("b", "i", "u", "f", "c", "V")

    @property
    def strides(self) -> tuple[int, ...]:
        found, step = [], 1
        for size in self.shape if self.is_fortran else reversed(self.shape):
            found.append(step)
            step *= size
        return tuple(found if self.is_fortran else reversed(found))

    def __repr__(self) -> str:
        return f"numpy.ndarray of {self.numpy_dtype!r}"


def numpy_dtype(arguments: tuple[object, ...]) -> object:
    """Makes `numpy.dtype(code, align, copy)`."""
    code = arguments[0]
    if isinstance(code, Name):
        return NumpyDType(code.full.rpartition(".")[2])
    if type(code) is not str or len(code) > _CODE_CHARS:
        raise FormatError(f"a numpy dtype is made of a {type(code).__name__}")
    return NumpyDType(code)


def reconstruct(arguments: tuple[object, ...]) -> object:
    """Makes an empty array of a class, whose state follows."""
    kind = arguments[0]
    if not isinstance(kind, Name):
        raise FormatError("a numpy array is made of a value that is not a class")
    return NumpyArray() if kind.full in ARRAYS else Opaque(kind.full)


def from_buffer(arguments: tuple[object, ...]) -> object:
    """Makes an array of its bytes, as pickles of protocol 5 have it."""
    data, dtype, shape, order = arguments
    if not isinstance(dtype, NumpyDType):
        raise FormatError("a numpy array has no dtype")
    made = NumpyArray()
    made.fill(shape, dtype, data, order == "F")
    return made


def scalar(arguments: tuple[object, ...]) -> object:
    """Makes Python's value of a scalar; an opaque one of a scalar that Python lacks."""
    dtype, data = arguments
    if not isinstance(dtype, NumpyDType):
        raise FormatError("a numpy scalar has no dtype")
    code = dtype.code
    if code == "O":
        return data
    if isinstance(data, bytes) and dtype.order != ">":
        if code[:1] == "S":
            return data.rstrip(b"\0")
        if code[:1] == "U":
            return data.decode("utf-32-le").rstrip("\0")
        if code[:1] in ("i", "u") and code in _CODES and len(data) == int(code[1:]):
            return int.from_bytes(data, "little", signed=code[0] == "i")
        if code in _UNPACKED:
            real, *imaginary = unpack(_UNPACKED[code], data)
            return complex(real, *imaginary) if imaginary else real
    return Opaque(f"numpy scalar of {dtype!r}")


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


def _make_quantised(arguments: Arguments) -> object:
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


def _make_nested(arguments: Arguments) -> object:
    names = ("values", "sizes", "strides", "storage_offsets")
    return Opaque(f"{TENSOR}, nested", (), dict(zip(names, arguments, strict=True)))


def _make_jagged(arguments: Arguments) -> object:
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
    made = TENSOR_MAKERS.get(maker.full, _wrapper)(inner)
    if not isinstance(made, Opaque):
        return made
    if kind.full in _DTENSORS:
        local = _attribute(state, "_local_tensor")
        is_whole = isinstance(local, StoredTensor) and len(inner) > 2 and local.shape == inner[2]
        if is_whole and not _has_summands(_attribute(state, "_spec")):
            return local
    if kind.full == _SHARDED and isinstance(state, tuple) and len(state) > 1:
        whole = _attribute(_state(state[1]), "size")
        shards = state[0] if isinstance(state[0], list) else []
        local = _attribute(_state(shards[0]), "tensor") if len(shards) == 1 else None
        if isinstance(local, StoredTensor) and local.shape == whole:
            return local
    return Opaque(kind.full, (), made.state or state)


def _has_summands(spec: object) -> bool:
    """Whether a DTensor's local tensor is one rank's summand: it is `Partial` along an axis."""
    placements = _attribute(_state(spec), "placements")
    found = placements if isinstance(placements, tuple) else ()
    return any(isinstance(each, Opaque) and each.type.endswith("Partial") for each in found)


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
    "torch._utils._rebuild_qtensor": _make_quantised,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _make_nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_device_tensor_from_numpy": _of_device,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _of_device,
    "torch._utils._rebuild_xla_tensor": _of_device,
    "torch.nested._internal.nested_tensor._rebuild_njt": _make_jagged,
    _FROM_TYPE: _with_attributes,
}
"""Makes the value of a call of each function."""

_MODULE = ("_parameters", "_buffers", "_modules")
_OPTIMIZER = ("param_groups", "state")
FILE = "_io.BytesIO"
SCRIPT = "__torch__."
"""The beginning of the names of classes in TorchScript programs."""

Count = Callable[[int], None]
"""Counts parts that are looked at, and raises an error if they are too many."""


@dataclass(frozen=True, slots=True)
class Entries:
    """The keys and parts of an object that a tree shows as a dict. A part may be an `Entries`."""

    items: Iterator[tuple[object, object]]
    is_merged: bool = False
    """Whether the entries belong to the dict around, with the key and a dot before their names."""


def parts_of(value: Opaque, count: Count) -> object:
    """Returns the list, tuple, dict, `Entries` or bytes in a tree; None for an opaque value."""
    if value.items:
        return value.items
    if value.type == FILE and isinstance(value.state, tuple) and value.state:
        content = value.state[0]
        return content if isinstance(content, bytes) else None
    state = attributes(value)
    if is_module(value):
        return Entries(_module(value))
    if all(name in state for name in _OPTIMIZER) and isinstance(state["param_groups"], list):
        return Entries(_optimizer(state, count))
    if value.type.startswith(SCRIPT):
        return state if value.state is None or state else value.state
    several = value.state if isinstance(value.state, tuple) else ()
    for part in (value.arguments, several, state, several[1] if len(several) == 2 else None):
        members = part.values() if isinstance(part, dict) else part
        if isinstance(part, dict | tuple):
            count(len(part))
            if any(map(_is_tensor, members or ())):
                return part
    return None


def attributes(value: Opaque) -> dict[object, object]:
    """Returns the `__dict__` of an object; empty without one."""
    state = value.state
    if state is None and value.arguments:
        state = value.arguments[0]  # a module of torch.fx is made of its attributes
    if isinstance(state, tuple) and state:
        state = state[0]
    return state if isinstance(state, dict) else {}


def is_module(value: object) -> bool:
    """Whether an object has the attributes of a `torch.nn.Module`."""
    if not isinstance(value, Opaque):
        return False
    state = attributes(value)
    return all(isinstance(state.get(name), dict) for name in _MODULE)


def _module(value: Opaque) -> Iterator[tuple[object, object]]:
    """Yields the entries of a module's state dict, and those of modules in it as `Entries`."""
    state = attributes(value)
    passing = state.get("_non_persistent_buffers_set")
    passing = passing if isinstance(passing, set | frozenset) else ()
    for kind in _MODULE:
        parts = state[kind]
        for name, part in parts.items() if isinstance(parts, dict) else ():
            if part is None or (kind == "_buffers" and name in passing):
                continue
            yield name, Entries(_module(part), is_merged=True) if is_module(part) else part


def _optimizer(state: dict[object, object], count: Count) -> Iterator[tuple[object, object]]:
    """Yields the entries of an optimizer's state dict."""
    numbers: dict[int, int] = {}
    groups, entries = state["param_groups"], state["state"]
    assert isinstance(groups, list)
    count(len(groups))
    for group in groups:
        parameters = _parameters_of(group)
        count(len(parameters))
        for parameter in parameters:
            numbers.setdefault(id(parameter), len(numbers))
    if isinstance(entries, dict):
        pairs = ((numbers.get(id(key), key), entry) for key, entry in entries.items())
        yield "state", Entries(pairs)
    yield "param_groups", [Entries(_group(group, numbers)) for group in groups]


def _group(group: object, numbers: dict[int, int]) -> Iterator[tuple[object, object]]:
    for key, part in group.items() if isinstance(group, dict) else ():
        if key != "params":
            yield key, part
    yield "params", [numbers[id(parameter)] for parameter in _parameters_of(group)]


def _parameters_of(group: object) -> list[object]:
    found = group.get("params") if isinstance(group, dict) else None
    return found if isinstance(found, list) else []


def _is_tensor(value: object) -> bool:
    return isinstance(value, StoredTensor | Storage) or (
        isinstance(value, NumpyArray) and value.dtype is not None
    )
