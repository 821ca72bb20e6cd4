"""The names in a checkpoint's pickle, and the inert value of each.

A pickle names classes and functions by module and name, and an ordinary unpickler imports and calls
them. This reader only looks a name up in the tables below. Rules:

1. The reader imports nothing and calls nothing of the file. A known name becomes a `Name` with a
   maker here, a plain value or a record of `formats.pickles.records`.
2. A call of any other name makes an `Opaque`: an object that is shown but never rebuilt.
3. A value without a type in this package becomes the nearest plain one: an OrderedDict becomes a
   dict, a torch.Size a tuple, a deque a list, a device, a layout or a path its text.
4. The types of arguments are checked before use, and no argument is a size to allocate.
5. The names of attacks are refused, so that a user learns that the file is an attack: they run
   programs, load code, or reach files and networks. A name is one of them if its module is one of
   `_MODULES` or lies in a package of `_PACKAGES`, or the name passes through one of them, as in
   `torch.os.system`; if it is one of the `_NAMES` of its module, or lies below one; if it is a
   method of one of the `_CLASSES`, which reach files; if it has the form `__name__`, which reaches
   into Python's own machinery; if it is longer than `NAME_CHARS`, or cannot be printed.

torch's own list of allowed names is in torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable

from formats.dtypes import BY_TORCH_NAME
from formats.errors import FormatError, HostileError, UnsupportedError
from formats.limits import KeysApart
from formats.pickles.records import (
    RECORDS,
    Name,
    Opaque,
    Storage,
    StorageType,
    check_key,
    integer_of,
    shape_of,
)
from formats.pickles.values import TENSOR_MAKERS, from_buffer, numpy_dtype, reconstruct, scalar

# The makers: each takes the arguments in the file and returns the value of the call.

Arguments = tuple[object, ...]


def _make_ordered_dict(arguments: Arguments) -> object:
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
    return _make_ordered_dict(arguments[1:])


def _deque(arguments: Arguments) -> object:
    return _list(arguments[0]) if arguments else []


def _set(arguments: Arguments) -> set[object]:
    members = _list(arguments[0]) if arguments else []
    apart = KeysApart()
    for member in members:
        check_key(member)
        apart.check(member, members)
    return set(members)


def _frozen_set(arguments: Arguments) -> object:
    return frozenset(_set(arguments))


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


def _member(arguments: Arguments) -> object:
    # Members of enums, by Python 3.11, and bound methods.
    owner, name = arguments if len(arguments) == 2 else (None, None)
    if isinstance(owner, Name | Opaque) and type(name) is str:
        inside = owner.full if isinstance(owner, Name) else owner.type
        check_harmless(inside, name)
        return Opaque(f"{inside}.{name}")
    raise hostile_error("builtins.getattr")


def _type(arguments: Arguments) -> object:
    if arguments == (None,):
        return Opaque("builtins.NoneType")
    raise hostile_error("builtins.type")


def _first(arguments: Arguments) -> object:
    # TorchScript says the types of its lists.
    return arguments[0]


_TYPED = (
    *("restore_type_tag", "build_intlist", "build_tensorlist", "build_doublelist"),
    "build_boollist",
)


def _old_object(arguments: Arguments) -> object:
    if not arguments or not isinstance(arguments[0], Name):
        raise FormatError("copyreg makes an object of a value that is not a class")
    return Opaque(arguments[0].full)


MAKERS: dict[str, Callable[[Arguments], object]] = {
    **TENSOR_MAKERS,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _text,
    "torch.torch_version.TorchVersion": _text,
    "torch.distributed.checkpoint.metadata." + "_MEM_FORMAT_ENCODING": _memory_format,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": _memory_format,
    "collections.OrderedDict": _make_ordered_dict,
    "collections.Counter": _make_ordered_dict,
    "collections.defaultdict": _default_dict,
    "collections.deque": _deque,
    "builtins.getattr": _member,
    "builtins.type": _type,
    "copyreg._reconstructor": _old_object,
    **{f"torch.jit._pickle.{name}": _first for name in _TYPED},
    "builtins.set": _set,
    "builtins.frozenset": _frozen_set,
    "builtins.complex": _complex,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "_codecs.encode": _encode,
    "numpy.dtype": numpy_dtype,
    **{
        f"numpy.{core}.{name}": maker
        for core in ("core", "_core")
        for name, maker in (
            ("multiarray._reconstruct", reconstruct),
            ("multiarray.scalar", scalar),
            ("numeric._frombuffer", from_buffer),
        )
    },
    **{
        f"pathlib.{module}{name}": _path
        for module in ("", "_local.")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
"""Makes the value of a call of each known class or function."""

_CONSTANTS = frozenset(
    f"torch.{name}"
    for name in (
        *("per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams"),
        *("per_tensor_symmetric", "per_channel_symmetric"),
    )
)
"""Values of torch that are named, and become their names."""

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
}

STORAGE_NAMES = {dtype: name for name, dtype in _STORAGE_DTYPES.items()}
"""The typed storage class by the torch name of the dtype; other dtypes have untyped storages."""

_STORAGE_DTYPES |= {
    "UntypedStorage": "uint8",
    "QInt8Storage": "int8",
    "QUInt8Storage": "uint8",
    "QInt32Storage": "int32",
    "QUInt4x2Storage": "uint8",
    "QUInt2x4Storage": "uint8",
}

_RENAMED = {"__builtin__": "builtins", "exceptions": "builtins", "copy_reg": "copyreg"}
"""The names of modules in Python 2, which protocol 2 still has."""


def resolve(module: str, name: str) -> object:
    """Returns the inert value of a name in a pickle: a dtype, a class of storages or a `Name`.

    Raises HostileError, with the name, by the rule of `formats.pickles.names`.
    """
    module = _RENAMED.get(module, module)
    full = f"{module}.{name}" if len(module) + len(name) <= NAME_CHARS else ""
    if full in MAKERS or full in RECORDS:
        return Name(full)
    if module == "torch" and name in BY_TORCH_NAME:
        return BY_TORCH_NAME[name]
    if module in ("torch", "torch.cuda", "torch.storage") and name in _STORAGE_DTYPES:
        return StorageType(BY_TORCH_NAME[_STORAGE_DTYPES[name]])
    if full in _CONSTANTS:
        return full
    check_harmless(module, name)
    return Name(full)


def storage(reference: object) -> Storage | Opaque | Name:
    """Returns the storage of a persistent id in a pickle.

    The older format of torch.save also has ids of classes of modules, with their source.
    """
    match reference:
        case ("storage", StorageType(dtype), str(key), str(), int(numel), *rest) if numel >= 0:
            if rest not in ([], [None]):
                raise UnsupportedError("a storage is a part of another one, as before torch 0.4")
            return Storage(key, dtype, numel)
        case ("storage", Name(full), str(), str(), int(), *_):
            return Opaque(full)
        case ("module", Name() as kind, *_):
            return kind
    raise FormatError("the pickle refers to an outside object that is not a storage")


def _list(value: object) -> list[object]:
    if isinstance(value, list | tuple):
        return list(value)
    raise FormatError(f"a list is expected, not a {type(value).__name__}")


NAME_CHARS = 250
"""Characters of a class or function with its module."""

_MODULES = frozenset(
    (
        *("os", "posix", "nt", "subprocess", "_posixsubprocess", "popen2", "pty"),
        *("sys", "imp", "runpy", "pkgutil", "zipimport", "codeop", "pdb", "bdb"),
        *("cProfile", "timeit", "doctest", "pydoc", "_ctypes", "shutil", "tempfile"),
        *("fileinput", "webbrowser", "antigravity", "socket", "_socket", "ssl", "urllib2"),
        *("httplib", "ftplib", "smtplib", "telnetlib", "signal", "pickle", "_pickle", "cPickle"),
        *("marshal", "winreg", "_winreg"),
    )
)
_PACKAGES = frozenset(
    (
        *("importlib", "ctypes", "asyncio", "http", "xmlrpc", "urllib.request", "distutils"),
        *("ensurepip", "venv", "pip", "torch.hub", "torch.package", "torch.utils.cpp_extension"),
        *("torch.utils.model_zoo", "torch.distributed.rpc", "torch.distributed.launcher"),
        *("numpy.f2py", "numpy.testing", "numpy.distutils"),
    )
)
_CLASSES = frozenset(
    f"pathlib.{module}{name}"
    for module in ("", "_local.")
    for name in ("Path", "PosixPath", "WindowsPath")
)
_NAMES = {
    "builtins": frozenset(
        (
            *("eval", "exec", "execfile", "compile", "open", "file", "input", "raw_input", "apply"),
            *("setattr", "delattr", "globals", "locals", "vars", "dir", "help", "breakpoint"),
            *("reload", "exit", "quit", "memoryview"),
        )
    ),
    "code": frozenset(("InteractiveConsole", "InteractiveInterpreter", "interact")),
    "commands": frozenset(  # protocol 2 calls subprocess so
        (
            *("Popen", "call", "check_call", "check_output", "run"),
            *("getoutput", "getstatusoutput", "getstatus"),
        )
    ),
    "profile": frozenset(("run", "runctx", "Profile")),
    "trace": frozenset(("Trace",)),
    "urllib": frozenset(("urlopen", "urlretrieve")),
    "io": frozenset(("open", "open_code", "FileIO")),
    "_io": frozenset(("open", "open_code", "FileIO")),
    "operator": frozenset(("methodcaller", "attrgetter")),
    "types": frozenset(("CodeType", "FunctionType", "LambdaType", "MethodType", "ModuleType")),
    "numpy": frozenset(("load", "loads", "fromfile", "save")),
    "torch": frozenset(("load",)),
    "torch._utils": frozenset(("_import_dotted_name",)),
    "torch.classes": frozenset(("load_library",)),
    "torch.jit": frozenset(("load", "CompilationUnit")),
    "torch.ops": frozenset(("load_library",)),
    "torch.serialization": frozenset(("load",)),
}


def check_harmless(module: str, name: str) -> None:
    """Raises HostileError, with the name, if the rule of this file refuses it."""
    if len(module) + len(name) > NAME_CHARS or not f"{module}{name}".isprintable():
        raise hostile_error(f"{module[:NAME_CHARS]}.{name[:NAME_CHARS]}")
    parts = name.split(".")
    starts = [module] if "." not in module else _prefixes(module)
    is_special = len(parts[-1]) > 4 and parts[-1].startswith("__") and parts[-1].endswith("__")
    if (
        is_special
        or module in _MODULES
        or not _MODULES.isdisjoint(parts[:-1])
        or not _PACKAGES.isdisjoint(starts)
        or not _PACKAGES.isdisjoint(f"{module}.{each}" for each in _prefixes(name))
        or not _CLASSES.isdisjoint(_prefixes(f"{module}.{name}")[:-1])
        or not _NAMES.get(module, frozenset()).isdisjoint(_prefixes(name))
    ):
        raise hostile_error(f"{module}.{name}")


def hostile_error(full: str) -> HostileError:
    return HostileError(
        f"the pickle asks for {_format_name(full)}, which a checkpoint never needs; nothing "
        "was executed"
    )


def _prefixes(dotted: str) -> list[str]:
    """Returns the first part of a dotted name, the first two, ...

    >>> _prefixes("a.b.c")
    ['a', 'a.b', 'a.b.c']
    """
    parts = dotted.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _format_name(name: str) -> str:
    # A hostile name may have control characters for the terminal, or a megabyte.
    return name if name.isprintable() and len(name) <= 200 else repr(name[:200])
