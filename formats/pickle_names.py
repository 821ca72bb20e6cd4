"""The names that a checkpoint's pickle may use, and the inert value of each.

A pickle names classes and functions by module and name, and an ordinary unpickler imports and calls
them. This reader only looks a name up in the tables below. Rules:

1. The reader imports nothing and calls nothing of the file. A name becomes a `Name`, a plain value
   or a record of `formats.pickle_records`; any other name is refused.
2. A value without a type in this package becomes the nearest plain one: an OrderedDict becomes a
   dict, a torch.Size a tuple, a device, a layout or a path its text.
3. The types of arguments are checked before use, and no argument is a size to allocate.

torch's own list of allowed names is in torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable

from formats.dtypes import BY_TORCH_NAME, DType
from formats.errors import FormatError, HostileError, UnsupportedError
from formats.keys import KeysApart
from formats.pickle_records import (
    RECORDS,
    Name,
    Storage,
    StorageType,
    StoredTensor,
    check_key,
    integer_of,
    shape_of,
    view,
)

# The makers: each takes the arguments in the file and returns the value of the call.

Arguments = tuple[object, ...]


def _ordered_dict(arguments: Arguments) -> object:
    pairs = arguments[0] if arguments else []
    if type(pairs) is dict:
        return dict(pairs)
    made: dict[object, object] = {}
    apart = KeysApart()
    for pair in _list(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise FormatError("an OrderedDict is not made of pairs")
        check_key(pair[0])
        apart.check(pair[0], made)
        made[pair[0]] = pair[1]
    return made


def _default_dict(arguments: Arguments) -> object:
    return _ordered_dict(arguments[1:])


def _set(arguments: Arguments) -> object:
    members = _list(arguments[0]) if arguments else []
    apart = KeysApart()
    for member in members:
        check_key(member)
        apart.check(member, members)
    return set(members)


def _complex(arguments: Arguments) -> object:
    real, imaginary = arguments
    if isinstance(real, int | float) and isinstance(imaginary, int | float):
        return complex(real, imaginary)
    raise FormatError("a complex number is not made of two numbers")


def _encode(arguments: Arguments) -> object:
    # Protocols before 3 write bytes as text with its encoding.
    text, encoding = arguments
    if isinstance(text, str) and encoding in ("latin1", "latin-1"):
        return text.encode("latin-1")
    raise FormatError("bytes are written as text in another encoding than latin-1")


def _bytes(arguments: Arguments) -> object:
    # bytes(n) and bytearray(n) would allocate n bytes.
    if not arguments:
        return b""
    if isinstance(arguments[0], bytes | bytearray):
        return bytes(arguments[0])
    return _encode(arguments)


def _size(arguments: Arguments) -> object:
    (shape,) = arguments
    return shape_of(tuple(_list(shape)))


def _text(arguments: Arguments) -> object:
    (text,) = arguments
    if not isinstance(text, str):
        raise FormatError(f"text is expected, not a {type(text).__name__}")
    return text


def _device(arguments: Arguments) -> object:
    kind, *index = arguments
    return ":".join([str(_text((kind,))), *(str(integer_of(each)) for each in index)])


def _path(arguments: Arguments) -> object:
    parts = [str(_text((part,))) for part in arguments]
    return posixpath.join(*parts) if parts else "."


def _memory_format(arguments: Arguments) -> object:
    (number,) = arguments
    return integer_of(number)


def _tensor(arguments: Arguments) -> object:
    storage, at, shape, strides, *_ = arguments
    metadata = arguments[6] if len(arguments) > 6 else None
    if not isinstance(storage, Storage):
        raise FormatError("a tensor is built on a value that is not a storage")
    return view(storage, storage.dtype, at, shape, strides, metadata)


def _tensor_of_dtype(arguments: Arguments) -> object:
    storage, at, shape, strides, _, _, dtype, *metadata = arguments
    if not isinstance(storage, Storage) or not isinstance(dtype, DType):
        raise FormatError("a tensor is built on a value that is not a storage")
    return view(storage, dtype, at, shape, strides, metadata[0] if metadata else None)


def _parameter(arguments: Arguments) -> object:
    data = arguments[0]
    if not isinstance(data, StoredTensor):
        raise FormatError("a parameter is built on a value that is not a tensor")
    return data


def _tensor_with_attributes(arguments: Arguments) -> object:
    maker, kind, inner, _ = arguments
    if not isinstance(maker, Name) or maker.full not in _TENSOR_MAKERS:
        raise FormatError("a tensor is built by a function that builds no tensors")
    if not isinstance(kind, Name) or kind.full not in _TENSOR_CLASSES or type(inner) is not tuple:
        raise FormatError("a tensor is built with a class that is not a class of tensors")
    return _TENSOR_MAKERS[maker.full](inner)


_TENSOR_MAKERS: dict[str, Callable[[Arguments], object]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}

_TENSOR_CLASSES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})

MAKERS: dict[str, Callable[[Arguments], object]] = {
    **_TENSOR_MAKERS,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _text,
    "torch.torch_version.TorchVersion": _text,
    "torch.distributed.checkpoint.metadata." + "_MEM_FORMAT_ENCODING": _memory_format,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": _memory_format,
    "collections.OrderedDict": _ordered_dict,
    "collections.Counter": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.complex": _complex,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "_codecs.encode": _encode,
    **{
        f"pathlib.{module}{name}": _path
        for module in ("", "_local.")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
"""Makes the value of a call of each known class or function."""

_ONLY_NAMED = _TENSOR_CLASSES | {f"builtins.{name}" for name in ("dict", "list", "int", "float")}
"""Names that occur only as arguments: the class of a tensor, the factory of a defaultdict."""

_UNREAD = {
    "torch._utils._rebuild_qtensor": "quantised tensors",
    "torch._utils._rebuild_sparse_tensor": "sparse tensors",
    "torch._utils._rebuild_nested_tensor": "nested tensors",
    "torch._utils._rebuild_meta_tensor_no_storage": "tensors on the meta device, without data",
    "torch._utils._rebuild_wrapper_subclass": "tensor subclasses",
    "torch._utils._rebuild_device_tensor_from_numpy": "tensors stored as numpy arrays",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "tensors of a foreign device",
    "torch.distributed.tensor.DTensor": "pickled DTensors",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": "pickled ShardedTensors",
}

_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}

STORAGE_NAMES = {dtype: name for name, dtype in _STORAGE_DTYPES.items() if name != "UntypedStorage"}
"""The typed storage class by the torch name of the dtype; other dtypes have untyped storages."""


def known(module: str, name: str) -> object:
    """Returns the inert value of a name in a pickle.

    Raises:
        HostileError: no checkpoint needs this name; the message has it.
        UnsupportedError: the name builds a kind of tensor that is not read.
    """
    full = f"{module.replace('__builtin__', 'builtins')}.{name}"
    if full in MAKERS or full in RECORDS or full in _ONLY_NAMED:
        return Name(full)
    if module == "torch" and name in BY_TORCH_NAME:
        return BY_TORCH_NAME[name]
    if module in ("torch", "torch.cuda", "torch.storage") and name in _STORAGE_DTYPES:
        return StorageType(BY_TORCH_NAME[_STORAGE_DTYPES[name]])
    if full in _UNREAD:
        raise UnsupportedError(
            f"the pickle builds {_UNREAD[full]} ({full}), which this reader cannot read; save them "
            "as plain tensors"
        )
    raise HostileError(
        f"the pickle asks for {_shown(full)}, which a checkpoint never needs; nothing was executed"
    )


def _shown(name: str) -> str:
    # A hostile name may have control characters for the terminal, or a megabyte.
    return name if name.isprintable() and len(name) <= 200 else repr(name[:200])


def storage(reference: object) -> Storage:
    """Returns the storage of a persistent id in a pickle."""
    match reference:
        case ("storage", StorageType(dtype), str(key), str(), int(numel)) if numel >= 0:
            return Storage(key, dtype, numel)
    raise FormatError("the pickle refers to an outside object that is not a storage")


def _list(value: object) -> list[object]:
    if isinstance(value, list | tuple):
        return list(value)
    raise FormatError(f"a list is expected, not a {type(value).__name__}")
