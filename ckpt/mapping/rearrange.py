"""Rearrangements in the notation of einops: `(heads two half) ... -> (heads half two) ...`.

Rules:

1. A dimension is an axis, or axes in parentheses, the last the fastest. `...` stands for all other
   dimensions. Both sides have the same axes, each once.
2. Names of tensors may have axes in braces: `experts.{expert}.w1` stands for the tensors 0, 1, 2 …
   along the axis `expert`, which its side of the arrow therefore does not have.
3. `*` is the axis along which the names of a list lie: `* ... -> * ...` is `torch.cat`, and
   `(groups *) ... -> (groups *) ...` takes rows of each tensor in turn.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from sharding.errors import ArgumentError
from sharding.layout import Shape

ELLIPSIS = "..."
PARTS = "*"
"""The axis along which the names of a list lie."""

Dims = tuple[tuple[str, ...], ...]
"""The axes of each dimension."""

_TOKEN = re.compile(r"\s*(\.\.\.|\*|\(|\)|[A-Za-z_][A-Za-z_0-9]*|\S)")
_AXIS = re.compile(r"\*|[A-Za-z_][A-Za-z_0-9]*")


@dataclass(frozen=True, slots=True)
class Rearrange:
    """The dimensions of the tensors on both sides of the arrow."""

    left: Dims
    right: Dims

    @classmethod
    def parse(cls, text: str, where: str) -> Rearrange:
        """Returns the rearrangement that a text describes.

        Raises:
            ArgumentError: the text breaks rule 1, apart from axes in names. `where` names the rule.

        >>> Rearrange.parse("(heads two) i -> two heads i", "rule 1").right
        (('two',), ('heads',), ('i',))
        """
        sides = text.split("->")
        if len(sides) != 2:
            raise ArgumentError(f"{where}: {text!r} is no rearrangement: write one `->`")
        left, right = (_dims(side, f"{where}: {text!r}") for side in sides)
        if ((ELLIPSIS,) in left) != ((ELLIPSIS,) in right):
            raise ArgumentError(f"{where}: {text!r} has `...` on one side of the arrow only")
        return cls(left, right)

    @property
    def inverse(self) -> Rearrange:
        """The rearrangement from the right to the left."""
        return Rearrange(self.right, self.left)

    def __str__(self) -> str:
        return f"{_text(self.left)} -> {_text(self.right)}"


def _dims(text: str, where: str) -> Dims:
    found: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(text):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group:
            found.append(tuple(group))
            group = None
        elif token == ELLIPSIS and group is None:
            found.append((ELLIPSIS,))
        elif _AXIS.fullmatch(token):
            if group is None:
                found.append((token,))
            else:
                group.append(token)
        else:
            raise ArgumentError(f"{where} is no rearrangement: {token!r} has no meaning there")
    if group is not None:
        raise ArgumentError(f"{where} is no rearrangement: a parenthesis is not closed")
    flat = [axis for dim in found for axis in dim]
    twice = next((axis for axis in flat if flat.count(axis) > 1), None)
    if twice is not None:
        raise ArgumentError(f"{where} has the axis {twice} twice on one side")
    return tuple(found)


def axes_of(dims: Dims) -> tuple[str, ...]:
    """Returns all axes in order, without `...`."""
    return tuple(axis for dim in dims for axis in dim if axis != ELLIPSIS)


def with_rank(dims: Dims, rank: int, where: str) -> Dims:
    """Returns the dimensions of a tensor of this rank, with axes in the place of `...`.

    Raises:
        ArgumentError: no tensor of this rank has these dimensions.

    >>> with_rank((("a",), ("...",)), 3, "w")
    (('a',), ('...0',), ('...1',))
    """
    extra = rank - sum(dim != (ELLIPSIS,) for dim in dims)
    if extra < 0 or (extra and (ELLIPSIS,) not in dims):
        raise ArgumentError(f"{where} has {rank} dimensions, the rule has `{_text(dims)}`")
    return expanded(dims, extra)


def expanded(dims: Dims, extra: int) -> Dims:
    """Returns the dimensions with so many axes in the place of `...`."""

    def each() -> Iterator[tuple[str, ...]]:
        for dim in dims:
            if dim == (ELLIPSIS,):
                yield from ((f"{ELLIPSIS}{number}",) for number in range(extra))
            else:
                yield dim

    return tuple(each())


def sizes_of(dims: Dims, shape: Shape, known: Mapping[str, int], where: str) -> dict[str, int]:
    """Returns the size of each axis of a tensor of this shape.

    Raises:
        ArgumentError: a known size does not divide its dimension, or two sizes are unknown.

    >>> sizes_of((("heads", "half"), ("i",)), (8, 3), {"heads": 2}, "w")
    {'heads': 2, 'half': 4, 'i': 3}
    """
    found: dict[str, int] = {}
    for dim, size in zip(dims, shape, strict=True):
        unknown = [axis for axis in dim if axis not in known]
        if len(unknown) > 1:
            raise ArgumentError(
                f"{where}: a dimension of {size} is ({' '.join(dim)}), and the sizes of "
                f"{' and '.join(unknown)} are unknown; give all but one: with "
                f"parameters={{'{unknown[0]}': NUMBER}}, by a config.json beside the "
                "checkpoint, or in `sizes` of the rule"
            )
        others = prod(known[axis] for axis in dim if axis in known)
        rest = size // others if others and unknown else 1
        if others * rest != size:
            given = ", ".join(f"{axis} = {known[axis]}" for axis in dim if axis in known)
            raise ArgumentError(
                f"{where}: a dimension of {size} of shape {list(shape)} is not ({' '.join(dim)}) "
                f"with {given}"
            )
        found.update({axis: known.get(axis, rest) for axis in dim})
    return found


def check_axes(
    rearrange: Rearrange, left: Collection[str], right: Collection[str], where: str
) -> None:
    """Raises ArgumentError unless both sides have the same axes, with those in the names."""
    sides = (rearrange.left, left, "left"), (rearrange.right, right, "right")
    for dims, named, side in sides:
        both = next((axis for axis in axes_of(dims) if axis in named), None)
        if both is not None:
            raise ArgumentError(f"{where}: {{{both}}} is in a name of the {side} and in its shape")
    here, there = ({*axes_of(dims), *named} for dims, named, _ in sides)
    lone = sorted(here ^ there)
    if lone:
        raise ArgumentError(
            f"{where}: `{rearrange}` has {', '.join(lone)} on one side only: both sides have the "
            "same axes, in the shapes or in braces in the names"
        )


def _text(dims: Dims) -> str:
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)
