"""The casts that a load allows from a checkpoint's dtype to a target's.

Rules:

1. By default another dtype is a difference.
2. With `dtype="target"` a tensor keeps its kind. Floats and complex numbers may get another
   precision; a number beyond the range is an error of the load. Integers may become a type that
   holds all of their values.
3. Floats of 8 bits have so little range that weights need a scale beside them. A load casts to
   them only if the caller asks for it.
4. `casting="unsafe"` allows every cast that torch has. Torch casts no packed 4-bit floats.
"""

from __future__ import annotations

from enum import Enum

import torch

from formats.dtypes import BY_TORCH_NAME, DType
from sharding.errors import ArgumentError


class Casting(Enum):
    """The casts that `dtype="target"` allows, in numpy's words."""

    SAME_KIND = "same_kind"
    UNSAFE = "unsafe"


PACKED = "F4_E2M1X2"


def casting_of(dtype: str | None, casting: str) -> Casting | None:
    """Returns the casts that the arguments of a load allow; None allows no cast.

    Raises:
        ArgumentError: an argument has another value, or `casting` is set without `dtype`.
    """
    known = [one.value for one in Casting]
    if dtype not in (None, "target"):
        raise ArgumentError(f"dtype is 'target' or None, not {dtype!r}")
    if casting not in known:
        raise ArgumentError(f"casting is one of {', '.join(known)}, not {casting!r}")
    if dtype is None and casting != Casting.SAME_KIND.value:
        raise ArgumentError(
            f"casting={casting!r} casts nothing by itself; pass dtype='target' as well"
        )
    return None if dtype is None else Casting(casting)


def dtype_problem(stored: DType, wanted: torch.dtype, casting: Casting | None) -> str | None:
    """Returns why a stored tensor cannot fill a target of dtype `wanted`; None if it can."""
    name = str(wanted).removeprefix("torch.")
    if stored.torch_name == name:
        return None
    said = f"the checkpoint has dtype {stored}, the target has {name}"
    if casting is None:
        return f"{said}; pass dtype='target' to cast"
    target = BY_TORCH_NAME.get(name)
    if target is None or PACKED in (stored.name, target.name):
        return f"{said}; torch cannot cast one to the other: load into a tensor of dtype {stored}"
    if casting is Casting.UNSAFE or keeps_values(stored, target):
        return None
    return (
        f"{said}, and a cast may change values: load into a tensor of dtype {stored}, or pass "
        "casting='unsafe' to cast nevertheless"
    )


def keeps_values(source: DType, target: DType) -> bool:
    """Whether a cast keeps every value, apart from the precision of floats (rules 2 and 3).

    >>> from formats.dtypes import BY_NAME
    >>> keeps_values(BY_NAME["F64"], BY_NAME["BF16"]), keeps_values(BY_NAME["I64"], BY_NAME["I32"])
    (True, False)
    """
    if source == target:
        return True
    kinds = _kind(source) + _kind(target)
    if kinds in ("FF", "CC"):
        return target.itemsize > 1
    return kinds in ("II", "UU", "UI") and target.itemsize > source.itemsize


def _kind(dtype: DType) -> str:
    """Returns the first letter of float, complex, integer, unsigned or boolean."""
    return "F" if dtype.name.startswith(("F", "BF")) else dtype.name[0]


def narrows(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a cast of floats, or of complex numbers, has fewer numbers in its range."""
    kinds = (stored, wanted)
    if stored == wanted or not all(one.is_floating_point or one.is_complex for one in kinds):
        return False
    return torch.finfo(wanted).max < torch.finfo(stored).max
