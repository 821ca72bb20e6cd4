"""Stores values of Python types that JSON lacks, by a kind and plain parts: sets, paths, dates.

Rules:

1. A loaded value is equal to the saved one and of the same type, except for a file in memory. Only
   exact types count, because a subclass could have more content.
2. The table is closed: a load imports and calls nothing else that a checkpoint names.
3. Equal values have equal parts: the members of a set are sorted by their stored form.

Advice for values that cannot be stored: the end of an error's text.

A checkpoint stores no value of a user's class, because a reader would have to import a class that a
file names. The plain parts of such a value can be stored.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import json
import pathlib
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from io import BytesIO, StringIO
from types import EllipsisType, ModuleType
from typing import Any, TypeGuard
from uuid import UUID

import numpy as np
import torch

from ckpt.state.memory import torch_dtype
from formats.catalog import Tree, TypedValue, change_dicts, map_tree, module_metadata
from formats.dtypes import BY_TORCH_NAME, DType
from formats.errors import FormatError
from formats.limits import KeysApart
from formats.native.tree import encode_value

NUMBERS = (np.bool_, np.integer, np.float16, np.float32, np.float64, np.complex64, np.complex128)
"""Scalars of numpy that Python's numbers hold exactly."""
ARRAYS = (np.ndarray, np.memmap, np.matrix, np.recarray)
"""Array classes without content beside the elements."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The stored form of values of one type."""

    name: str
    type: type
    parts: Callable[[Any], tuple[object, ...]]
    """Returns the parts of a value: plain values and values of these kinds."""
    made: Callable[..., object]
    """Makes the value from its parts."""
    is_set: bool = False


def _set(*members: Any) -> set[object]:
    apart, found = KeysApart(), set[object]()
    for member in members:
        apart.check(member, found)
        found.add(member)
    return found


def _deque(longest: int | None, items: list[object]) -> deque[object]:
    return deque(items, longest)


def _moment(kind: type[datetime] | type[time]) -> Callable[..., object]:
    def make(text: str, fold: int, zone: timezone | None) -> object:
        if zone is not None and type(zone) is not timezone:
            raise TypeError(f"{zone!r:.80} is not a timezone")
        return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)

    return make


def _moment_parts(moment: datetime | time) -> tuple[object, ...]:
    return moment.replace(tzinfo=None, fold=0).isoformat(), moment.fold, moment.tzinfo


def _zone(days: int, seconds: int, microseconds: int, *name: str) -> timezone:
    return timezone(timedelta(days, seconds, microseconds), *name)


def _zone_parts(zone: timezone) -> tuple[object, ...]:
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return offset.days, offset.seconds, offset.microseconds, *name


def _path(kind: type[pathlib.PurePath], pure: type[pathlib.PurePath]) -> Callable[[str], object]:
    def make(text: str) -> object:
        try:
            return kind(text)
        except NotImplementedError:  # pathlib's, for a path of another system
            return pure(text)

    return make


def _text(value: object) -> tuple[str]:
    return (str(value),)


def _bounds(value: range | slice) -> tuple[object, ...]:
    return value.start, value.stop, value.step


_POSIX, _WINDOWS = pathlib.PurePosixPath, pathlib.PureWindowsPath
KINDS = (
    Kind("set", set, tuple, _set, is_set=True),
    Kind("frozenset", frozenset, tuple, lambda *each: frozenset(_set(*each)), is_set=True),
    Kind("deque", deque, lambda queue: (queue.maxlen, list(queue)), _deque),
    Kind("bytearray", bytearray, lambda data: (bytes(data),), bytearray),
    Kind("range", range, _bounds, range),
    Kind("slice", slice, _bounds, slice),
    Kind("ellipsis", EllipsisType, lambda _: (), lambda: ...),
    Kind("PosixPath", pathlib.PosixPath, _text, _path(pathlib.PosixPath, _POSIX)),
    Kind("WindowsPath", pathlib.WindowsPath, _text, _path(pathlib.WindowsPath, _WINDOWS)),
    Kind("PurePosixPath", _POSIX, _text, _POSIX),
    Kind("PureWindowsPath", _WINDOWS, _text, _WINDOWS),
    Kind("datetime", datetime, _moment_parts, _moment(datetime)),
    Kind("time", time, _moment_parts, _moment(time)),
    Kind("date", date, lambda day: (day.isoformat(),), date.fromisoformat),
    Kind("timedelta", timedelta, lambda d: (d.days, d.seconds, d.microseconds), timedelta),
    Kind("timezone", timezone, _zone_parts, _zone),
    Kind("Decimal", Decimal, _text, Decimal),
    Kind("Fraction", Fraction, lambda f: (f.numerator, f.denominator), Fraction),
    Kind("UUID", UUID, _text, UUID),
    Kind("device", torch.device, _text, torch.device),
)
_NAMED = {kind.name: kind for kind in KINDS}
# A file in memory comes back as its bytes, or as a file where the target has one: `like_target`.
_FILE = Kind("bytearray", BytesIO, lambda file: (file.getvalue(),), bytearray)
OF_TYPE = {kind.type: kind for kind in (*KINDS, _FILE)}


def make_typed(kind: Kind, parts: Sequence[Tree]) -> TypedValue:
    """Returns the stored value of a kind. `parts` may have the members of a set in any order."""
    if kind.is_set:
        parts = sorted(parts, key=lambda part: json.dumps(encode_value(part)))
    return TypedValue(kind.name, tuple(parts))


def is_number(node: object) -> TypeGuard[np.generic]:
    """Whether a scalar of numpy is a number that a Python number holds exactly."""
    return isinstance(node, NUMBERS) and type(node) is not np.timedelta64


def is_plain_array(array: np.ndarray) -> bool:
    """Whether an array has only elements, of a dtype that torch has too."""
    return type(array) in ARRAYS and str(array.dtype) in BY_TORCH_NAME


def like_target(node: object, loaded: object) -> object:
    """Returns a loaded value in the target's type, if that type has the value.

    The types are those of numpy and torch, and files in memory, which stand at their first byte.
    """
    kind: Any = type(node)
    with suppress(OverflowError, TypeError, ValueError), np.errstate(over="ignore"):
        if isinstance(node, torch.Size) and isinstance(loaded, tuple):
            return torch.Size(loaded)
        if isinstance(node, BytesIO) and isinstance(loaded, bytes | bytearray):
            return BytesIO(loaded)
        if is_number(node) and isinstance(loaded, bool | int | float | complex):
            again = kind(loaded)
            if type(again.item()) is type(loaded) and repr(again.item()) == repr(loaded):
                return again
    return loaded


def restore_values(tree: Tree) -> object:
    """Returns a tree with the values themselves: torch's dtypes and values of these kinds.

    Raises:
        FormatError: the parts of a stored value are not valid.
    """
    return map_tree(tree, restore_value)


def restore_value(value: Tree) -> object:
    """As `restore_values`, of a leaf."""
    if isinstance(value, DType):
        return torch_dtype(value.torch_name)
    if not isinstance(value, TypedValue):
        return value
    kind = _NAMED[value.kind]
    try:
        found = kind.made(*map(restore_values, value.parts))
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"{value} is not valid: {type(error).__name__}: {error}") from error
    return found


def with_versions(nest: object, versions: Mapping[str, Mapping[str, int]]) -> object:
    """Returns a nest whose state dicts of modules tell torch's `load_state_dict` their versions.

    >>> with_versions({"m": {"0.weight": 1}}, {"m": {"0": 2}})["m"]._metadata
    {'': {'version': 1}, '0': {'version': 2}}
    """

    def add_version(entries: dict[Any, Any], path: str) -> object:
        state = OrderedDict(entries)
        state._metadata = module_metadata(entries, versions[path])  # type: ignore[attr-defined]
        return state

    return change_dicts(nest, versions.keys(), add_version) if versions else nest


KEYS = "keys are strings, numbers, None or tuples of these"
STATES = (
    "a state holds tensors, numbers, strings, bytes, None, dicts, lists, tuples, sets, deques, "
    "paths, dates, torch dtypes and devices, and objects with state_dict() and load_state_dict()"
)
_ADVICE: tuple[tuple[Callable[[object], bool], str], ...] = (
    (lambda v: isinstance(v, Enum), "store its .value, or its .name"),
    (
        lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type),
        "store dataclasses.asdict() of it",
    ),
    (lambda v: isinstance(v, tuple) and hasattr(v, "_asdict"), "store its _asdict()"),
    (lambda v: isinstance(v, np.datetime64), "store .astype('int64') and its unit, or str() of it"),
    (lambda v: isinstance(v, np.timedelta64), "store .astype('int64') and its unit"),
    (lambda v: isinstance(v, np.void), "store its .tobytes(), or its fields by name"),
    (lambda v: isinstance(v, np.longdouble | np.clongdouble), "store str() of it, or a float"),
    (lambda v: isinstance(v, bool | int), "store int() of it"),
    (lambda v: isinstance(v, float), "store float() of it"),
    (lambda v: isinstance(v, complex), "store complex() of it"),
    (lambda v: isinstance(v, str), "store str() of it"),
    (lambda v: isinstance(v, bytes | bytearray | memoryview), "store bytes() of it"),
    (lambda v: isinstance(v, StringIO), "store its getvalue()"),
    (lambda v: isinstance(v, Mapping), "store dict() of it"),
    (lambda v: isinstance(v, tuple), "store tuple() of it"),
    (lambda v: isinstance(v, list), "store list() of it"),
    (lambda v: isinstance(v, set | frozenset), "store set() of it"),
    (lambda v: isinstance(v, datetime | time), "store its isoformat()"),
    (lambda v: isinstance(v, tzinfo), "store its name, or the moment with a datetime.timezone"),
    (lambda v: isinstance(v, torch.Generator), "store its get_state()"),
    (lambda v: isinstance(v, np.random.Generator), "store its bit_generator.state"),
    (lambda v: isinstance(v, np.random.BitGenerator), "store its .state"),
    (lambda v: isinstance(v, np.random.RandomState), "store its get_state()"),
    (lambda v: isinstance(v, random.Random), "store its getstate()"),
    (
        lambda v: isinstance(v, torch.UntypedStorage | torch.TypedStorage),
        "store a tensor over it: torch.tensor([]).set_(storage)",
    ),
    (lambda v: isinstance(v, np.dtype | torch.layout | torch.memory_format), "store str() of it"),
    (lambda v: isinstance(v, array.array), "store torch.tensor() of it"),
    (lambda v: isinstance(v, functools.partial), "store its arguments; a checkpoint holds no code"),
    (lambda v: isinstance(v, type | ModuleType), "store its name; a checkpoint holds no code"),
    (lambda v: isinstance(v, Iterator), "store list() of it"),
    (callable, "store its name; a checkpoint holds no code"),
)


def instead_of(value: object) -> str:
    """Returns the advice for a value that cannot be stored."""
    return next((advice for test, advice in _ADVICE if test(value)), STATES)


def instead_of_key(key: object) -> str:
    """Returns the advice for a key that cannot be stored."""
    if isinstance(key, Enum):
        return f"use its .value or its .name; {KEYS}"
    if isinstance(key, str | int | float):
        kind = next(kind for kind in (str, int, float) if isinstance(key, kind))
        return f"use {kind.__name__}() of it; {KEYS}"
    return KEYS


def instead_of_array(found: np.ndarray) -> str:
    """Returns the advice for an array that cannot be stored."""
    if isinstance(found, np.ma.MaskedArray):
        return "store its .data and its .mask under keys of their own"
    kind = found.dtype.kind
    if str(found.dtype) in BY_TORCH_NAME:
        return "store numpy.asarray() of it, and its attributes under keys of their own"
    if found.dtype.names is not None:
        return "store its fields by name: {name: a[name] for name in a.dtype.names}"
    if not found.dtype.isnative:
        return "store a.astype(a.dtype.newbyteorder('='))"
    advice = {
        "M": "store a.view('int64') and its unit",
        "m": "store a.view('int64') and its unit",
        "S": "store a.tolist()",
        "U": "store a.tolist()",
        "T": "store a.tolist()",
        "O": "store a.tolist()",
        "V": "store a.view('uint8')",
        "f": "store a.astype('float64'), or its parts",
        "c": "store a.astype('complex128'), or its parts",
    }
    return advice.get(kind, "store a tensor of it")
