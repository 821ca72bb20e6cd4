"""Advice for values that cannot be stored: the end of an error's text.

A checkpoint stores no value of a user's class, because a reader would have to import a class that a
file names. The plain parts of such a value can be stored.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, time, tzinfo
from enum import Enum
from io import StringIO
from types import ModuleType

import numpy as np
import torch

from formats.dtypes import BY_TORCH_NAME

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


def shown(path: tuple[object, ...]) -> str:
    """Returns a key path as Python code: `state["optim"][0]`."""
    return "state" + "".join(f"[{key!r}]" for key in path)


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
