"""Stores values of Python types that JSON lacks, by a kind and plain parts: sets, paths, dates.

Rules:

1. A loaded value is equal to the saved one and of the same type, except for a file in memory. Only
   exact types count, because a subclass could have more content.
2. The table is closed: a load imports and calls nothing else that a checkpoint names.
3. Equal values have equal parts: the members of a set are sorted by their stored form.
"""

from __future__ import annotations

import json
import pathlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from io import BytesIO
from types import EllipsisType
from typing import Any, TypeGuard
from uuid import UUID

import numpy as np
import torch

from ckpt.state.memory import torch_dtype
from formats.catalog import Tree, TypedValue, map_tree
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
    def made(text: str, fold: int, zone: timezone | None) -> object:
        if zone is not None and type(zone) is not timezone:
            raise TypeError(f"{zone!r:.80} is not a timezone")
        return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)

    return made


def _moment_parts(moment: datetime | time) -> tuple[object, ...]:
    return moment.replace(tzinfo=None, fold=0).isoformat(), moment.fold, moment.tzinfo


def _zone(days: int, seconds: int, microseconds: int, *name: str) -> timezone:
    return timezone(timedelta(days, seconds, microseconds), *name)


def _zone_parts(zone: timezone) -> tuple[object, ...]:
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return offset.days, offset.seconds, offset.microseconds, *name


def _path(kind: type[pathlib.PurePath], pure: type[pathlib.PurePath]) -> Callable[[str], object]:
    def made(text: str) -> object:
        try:
            return kind(text)
        except NotImplementedError:  # pathlib's, for a path of another system
            return pure(text)

    return made


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


def typed(kind: Kind, parts: Sequence[Tree]) -> TypedValue:
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


def opened(tree: Tree) -> object:
    """Returns a tree with the values themselves: torch's dtypes and values of these kinds.

    Raises:
        FormatError: the parts of a stored value are not valid.
    """
    return map_tree(tree, _opened)


def _opened(value: Tree) -> object:
    if isinstance(value, DType):
        return torch_dtype(value.torch_name)
    if not isinstance(value, TypedValue):
        return value
    kind = _NAMED[value.kind]
    try:
        found = kind.made(*map(opened, value.parts))
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"{value} is not valid: {type(error).__name__}: {error}") from error
    return found
