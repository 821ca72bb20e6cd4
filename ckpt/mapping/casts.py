"""The dtypes that a conversion writes: one for all floats, and others for patterns of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from ckpt.arguments import DtypeName
from ckpt.state.patterns import expression, matches, no_name
from formats.catalog import TensorRecord
from formats.dtypes import DType, dtype_of_torch
from sharding.errors import ArgumentError

FLOATS = ("F64", "F32", "F16", "BF16")
"""The floats that are cast. Smaller ones mean little without their scales."""


@dataclass(frozen=True, slots=True)
class Casts:
    """The dtype of each name: that of the first pattern that matches it; None keeps the stored."""

    patterns: tuple[tuple[str, DType | None], ...]

    @classmethod
    def of(cls, dtype: str | Mapping[str, str | None] | None) -> Casts:
        """Makes the casts of a caller's `dtype`: one name, or patterns with a name each.

        Raises:
            ArgumentError: weights cannot be cast to a dtype, or a pattern has no meaning.

        >>> casts = Casts.of({"*.norm.weight": "float32", "*": "bfloat16"})
        >>> str(casts.of_name("a.norm.weight")), str(casts.of_name("a.weight"))
        ('float32', 'bfloat16')
        """
        every: dict[str, object] = {} if dtype is None else {"*": dtype}
        given = {**dtype} if isinstance(dtype, Mapping) else every
        for pattern in given:
            expression(pattern)  # raises for a regular expression that is none
        return cls(tuple((pattern, _check_dtype(name)) for pattern, name in given.items()))

    @property
    def of_all(self) -> DType | None:
        """The dtype of all floats; None if they keep theirs, or get several."""
        dtypes = {dtype for _, dtype in self.patterns}
        is_for_all = any(pattern == "*" for pattern, _ in self.patterns)
        return dtypes.pop() if is_for_all and len(dtypes) == 1 else None

    def of_name(self, name: str) -> DType | None:
        """Returns the dtype to which a tensor of floats is cast; None if it stays as it is."""
        return next((dtype for pattern, dtype in self.patterns if matches(pattern, name)), None)

    def names(self, name: str) -> bool:
        """Whether another pattern than `*` decides on a name."""
        found = next((pattern for pattern, _ in self.patterns if matches(pattern, name)), "*")
        return found != "*"

    def written_dtype(self, name: str, record: TensorRecord) -> DType:
        """Returns the dtype with which a tensor is written under a name."""
        target = self.of_name(name)
        return target if target is not None and record.dtype.name in FLOATS else record.dtype

    def check_all_match(self, names: Iterable[str], where: str) -> None:
        """Raises ArgumentError for a pattern that matches no name."""
        there = list(names)
        for pattern, _ in self.patterns:
            if pattern != "*" and not any(matches(pattern, name) for name in there):
                raise ArgumentError(f"{where}: dtype: {no_name(pattern, there)}")


NO_CASTS = Casts(())


def _check_dtype(name: object) -> DType | None:
    if name is None:
        return None
    if not isinstance(name, str) or name.removeprefix("torch.") not in get_args(DtypeName):
        raise ArgumentError(
            f"floating-point tensors cannot be cast to {name!r}; give dtype= as one of the names "
            f"{', '.join(get_args(DtypeName))}"
        )
    return dtype_of_torch(name, "dtype=")
