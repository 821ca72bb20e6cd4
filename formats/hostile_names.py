"""The names of attacks in a pickle: they run programs, load code, or reach files and networks.

Nothing in a pickle is ever called, so each of these names could be shown as other unknown names
are. The refusal tells a user that the file is an attack. A name is hostile if

1. its module is one of `_MODULES` or lies in a package of `_PACKAGES`, or the name passes through
   one of them, as in `torch.os.system`;
2. it is one of the `_NAMES` of its module, or lies below one of them;
3. it is a method of one of the `_CLASSES`, which reach files;
4. it has the form `__name__`: it reaches into Python's own machinery;
5. it is longer than `NAME_CHARS`, or cannot be printed.
"""

from __future__ import annotations

from formats.errors import HostileError

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
        raise refused(f"{module[:NAME_CHARS]}.{name[:NAME_CHARS]}")
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
        raise refused(f"{module}.{name}")


def refused(full: str) -> HostileError:
    """Returns the error for a hostile name."""
    return HostileError(
        f"the pickle asks for {_shown(full)}, which a checkpoint never needs; nothing was executed"
    )


def _prefixes(dotted: str) -> list[str]:
    """Returns the first part of a dotted name, the first two, ...

    >>> _prefixes("a.b.c")
    ['a', 'a.b', 'a.b.c']
    """
    parts = dotted.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _shown(name: str) -> str:
    # A hostile name may have control characters for the terminal, or a megabyte.
    return name if name.isprintable() and len(name) <= 200 else repr(name[:200])
