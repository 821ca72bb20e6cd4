"""One root for all errors, one kind for each, and each that a docstring names within reach."""

from __future__ import annotations

import ast
import builtins
import copy
import errno
import importlib
import pickle
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import ckpt
import ckpt.errors
import formats
import sharding
from sharding.errors import CkptError

ROOT = Path(ckpt.__file__).parent.parent
PACKAGES = (ckpt, formats, sharding)
INTERNAL = {
    "RefusedError": "a server's answer, which becomes an error of the tree where it arrives",
    "_LiveVersionError": "leads an opening to the store of a version of a live state",
    "_SnapshotError": "leads an opening from a cache of Hugging Face to its snapshot",
    "AbandonedError": "ends the writing of a process whose trainer is gone, in that process",
}
"""Exceptions outside the tree: never raised to a caller."""
BUILT_IN = {
    ("ckpt/__init__.py", "AttributeError"): "Python's protocol of module attributes",
    ("ckpt/dcp/__init__.py", "AttributeError"): "Python's protocol of module attributes",
    ("ckpt/dcp/hf_storage.py", "AttributeError"): "Python's protocol of module attributes",
    (
        "ckpt/dcp/quantized_hf_storage.py",
        "AttributeError",
    ): "Python's protocol of module attributes",
    ("ckpt/integrations/__init__.py", "ModuleNotFoundError"): "Python's own, with a command added",
    ("sharding/__init__.py", "AttributeError"): "Python's protocol of module attributes",
    ("ckpt/installation.py", "ImportError"): "raised before the packages can be imported",
    ("sharding/supported.py", "ImportError"): "raised before the packages can be imported",
    ("ckpt/live/serve.py", "FileNotFoundError"): "becomes an answer in the same file",
    ("ckpt/live/http_server.py", "ConnectionResetError"): "ends one connection of a server",
    ("ckpt/live/wire.py", "ConnectionAbortedError"): "ends one connection of a server",
    ("ckpt/live/wire.py", "EOFError"): "ends one connection of a server",
    ("ckpt/mapping/other_names.py", "ValueError"): "then these names are no candidate, there",
    ("ckpt/state/typed_values.py", "TypeError"): "becomes a FormatError in the same file",
    ("ckpt/stores/azure_driver.py", "OSError"): "a driver's; the store explains it",
    ("ckpt/stores/fsspec_driver.py", "FileNotFoundError"): "a driver's; the store explains it",
    ("ckpt/stores/fsspec_driver.py", "OSError"): "a driver's; the store explains it",
    ("ckpt/stores/http_client.py", "ConnectionResetError"): "becomes an UnreachableError there",
    ("ckpt/live/store.py", "FileNotFoundError"): "as of a disk; the reader explains it",
    ("ckpt/live/stored_version.py", "FileNotFoundError"): "as of a disk; the reader explains it",
    ("ckpt/stores/served_store.py", "FileNotFoundError"): "as of a disk; the reader explains it",
    ("ckpt/stores/local_store.py", "FileExistsError"): "becomes an ExistsError in the same file",
    ("ckpt/stores/local_files.py", "FileNotFoundError"): "as of a disk; the reader explains it",
    ("ckpt/stores/s3_driver.py", "OSError"): "a driver's; the store explains it",
    ("ckpt/stores/object_writes.py", "OSError"): "an upload's; the store explains it",
    (
        "formats/safetensors/huggingface.py",
        "FileNotFoundError",
    ): "`ckpt.reading` makes a NotACheckpointError",
    ("formats/limits.py", "ValueError"): "becomes a FormatError in the same file",
    ("formats/zip_records.py", "ValueError"): "Python's protocol of files, for `zipfile`",
    ("sharding/agreement/channel.py", "TypeError"): "ends the connection that sent the message",
    ("sharding/agreement/rendezvous.py", "TimeoutError"): "becomes a RankError on all ranks",
    ("sharding/agreement/rendezvous.py", "ConnectionError"): "becomes a RankError on all ranks",
}
"""What is raised with a class of Python's own, by file and class, and why."""
PUBLIC = {
    name: one
    for name, one in vars(ckpt.errors).items()
    if name in ckpt.errors.__all__ and isinstance(one, type) and issubclass(one, Exception)
}
"""Every public error and warning."""
ARGUMENTS: Mapping[str, tuple[object, ...]] = {
    "DamagedLoadError": ("runs/step-1: chunk 7 was changed", ["w", "b"]),
    "FallbackWarning": ("runs/step-1", [ckpt.Skipped("runs/step-2", "corrupt", "w was changed")]),
    "ForeignFileError": ("a.h5", "an HDF5 file", "convert it with h5py"),
    "GoneError": ("runs/step-1/a.safetensors",),
    "MismatchError": ("runs/step-1", [ckpt.Difference("w", "missing", "the target wants it")]),
    "MismatchedLoadError": ("runs/step-1", [ckpt.Difference("w", "missing", "is wanted")], ["w"]),
    "PartialLoadError": ("OSError: no space", []),
    "RankError": ("loading", 1, "OSError", "ftp://me:secret@host/run: gone"),
    "ReplacedLoadError": ("runs/step-1 was replaced", ["w"]),
    "SizeError": ("a.safetensors", 7, 8),
    "TooLargeError": ("manifest.json", 1 << 40, 1 << 30),
    "UnverifiedWarning": ("ftp://me:secret@host/run", ["w"]),
    "VersionGoneError": ("live://host:1/state", 3, None),
}
"""The arguments of the classes that take others than a text."""


class OwnError(ckpt.StateError):
    """An error of a user's own."""

    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} has no data")


def modules() -> Iterator[str]:
    for package in PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # Integrations import large libraries, and define no errors.
            if not found.name.endswith("__main__") and ".integrations." not in found.name:
                yield found.name


def own_exceptions() -> list[type[BaseException]]:
    """Every class of an exception that the packages define, warnings apart."""
    found: dict[type[BaseException], None] = {}
    for name in modules():
        try:
            module = importlib.import_module(name)
        except ImportError:  # a driver whose library is not installed
            continue
        for one in vars(module).values():
            is_own = isinstance(one, type) and one.__module__ in (name, "ckpt")
            if is_own and issubclass(one, Exception) and not issubclass(one, Warning):
                found[one] = None
    return list(found)


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def test_every_exception_of_ours_comes_from_one_root() -> None:
    for one in own_exceptions():
        assert issubclass(one, CkptError) or one.__name__ in INTERNAL, one


def test_all_packages_speak_of_the_same_root() -> None:
    assert ckpt.CkptError is sharding.CkptError is CkptError
    assert ckpt.RankError is sharding.RankError


def test_a_kind_is_the_name_of_its_class_in_snake_case() -> None:
    for one in own_exceptions():
        if not issubclass(one, CkptError):
            continue
        own = re.sub(r"(?<!^)(?=[A-Z])", "_", one.__name__.removesuffix("Error")).lower()
        inherited = {base.kind for base in one.__mro__[1:] if issubclass(base, CkptError)}
        assert one.kind == own or one.kind in inherited - {"ckpt"}, (one, one.kind)


@pytest.mark.thorough
def test_nothing_is_raised_with_a_class_of_python_s_own_but_what_no_caller_sees() -> None:
    found = set()
    for file, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(raised, ast.Name) and hasattr(builtins, raised.id):
                found.add((file, raised.id))
    assert found == BUILT_IN.keys()


@pytest.mark.thorough
def test_every_error_that_a_docstring_names_is_exported() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    missing = set()
    for file, tree in sources():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) or "" if isinstance(node, documented) else ""
            for name in re.findall(r"\b[A-Z]\w*(?:Error|Warning)\b", text):
                internal = (
                    "PastEndError",
                    "RefusedError",
                    "ShortAnswerError",
                    "UnflushedError",
                    "ChangedOnTheWayError",
                )
                is_internal = name in internal
                known = (builtins, ckpt, sharding)
                if not is_internal and not any(hasattr(package, name) for package in known):
                    missing.add((file, name))
    assert not missing


@pytest.mark.parametrize("package", [ckpt, sharding])
def test_every_exported_error_is_in_all(package: object) -> None:
    exported = package.__all__  # type: ignore[attr-defined]
    assert len(set(exported)) == len(exported)
    assert all(hasattr(package, name) for name in exported)


def test_a_traceback_has_the_name_by_which_a_user_catches_an_error() -> None:
    classes = [one for name in ckpt.errors.__all__ if isinstance(one := getattr(ckpt, name), type)]
    assert {one.__module__ for one in classes} == {"ckpt"}
    assert all(getattr(ckpt, one.__name__) is one for one in classes)


def test_bad_arguments_are_value_errors_and_of_the_root() -> None:
    with pytest.raises(ckpt.CkptError, match="replicas is") as raised:
        ckpt.load("nowhere", {}, replicas="all")  # type: ignore[call-arg]
    assert isinstance(raised.value, ValueError)
    assert raised.value.kind == "argument"


def test_an_error_of_any_package_shows_no_password_of_a_url() -> None:
    for kind in (ckpt.StoreError, ckpt.CorruptError, sharding.ShardingError, ckpt.ArgumentError):
        assert "secret" not in str(kind("ftp://me:secret@host/run: nothing there"))
    error = ckpt.RankError("loading", 1, "OSError", "ftp://me:secret@host/run: nothing there")
    assert "secret" not in f"{error} {error.message}"


def test_a_rank_error_tells_which_tensors_a_load_had_touched() -> None:
    error = ckpt.RankError("loading", 1, "OSError", "gone")
    error.touched = ("w",)
    assert str(error) == (
        "loading failed on rank 1 with OSError: gone. On this rank: The target may hold a mix of "
        "old and new bytes in: w"
    )


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_error_and_warning_survives_pickle_and_copy(name: str) -> None:
    error: Exception = PUBLIC[name](*ARGUMENTS.get(name, ("ftp://me:secret@host/w: gone",)))
    plain = dict(vars(error))
    for later in ({}, {"touched": ("w",), "__notes__": ["while 'optim' was loaded"]}):
        vars(error).update(later)
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is type(error)
            assert (str(again), again.args) == (str(error), error.args)
            assert vars(again) == {**plain, **later}


def test_an_error_of_the_system_keeps_its_number_and_file_in_another_process() -> None:
    again = pickle.loads(pickle.dumps(ckpt.StoreError(errno.ENOSPC, "the disk is full", "a.part")))
    assert (again.errno, again.strerror, again.filename) == (
        errno.ENOSPC,
        "the disk is full",
        "a.part",
    )


def test_an_error_of_a_user_s_own_class_survives_pickle() -> None:
    again = pickle.loads(pickle.dumps(OwnError(rank=3)))
    assert (type(again), str(again), again.rank) == (OwnError, "rank 3 has no data", 3)
