"""The tensors of one rule: which names belong together, and the views that they become.

The tensors of a rule are one array over all of its axes. Each source holds a part of it: one index
of each axis in braces, a range of `*`, and all of the other axes. Each target is a part of the same
array. Sources and targets are therefore treated alike, and the inverse of a rule needs no code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise, product
from math import prod

from ckpt.mapping.rules import (
    PARTS,
    Dims,
    Rule,
    axes_of,
    expand,
    name_axes,
    name_with,
    names_matching,
    parameters_in,
    sizes_of,
    value_of,
    with_rank,
)
from ckpt.mapping.views import (
    Flattened,
    Joined,
    Narrowed,
    Permuted,
    Stored,
    Unflattened,
    View,
)
from formats.catalog import TensorRecord
from formats.dtypes import DType
from sharding.errors import ArgumentError

Texts = tuple[str, ...]
"""The texts in the place of the `*` and `?` of a rule's names."""
Indices = tuple[int, ...]
"""The indices of the axes in braces of a name, in their order in the name."""

SHOWN_NAMES = 3


@dataclass(frozen=True, slots=True)
class Member:
    """A name of a rule's source: which of its names it is, and the texts and indices in it."""

    part: int
    texts: Texts
    indices: Indices


def member_of(rule: Rule, name: str) -> Member | None:
    """Returns the place of a name among the sources of a rule with a rearrangement; None if none.

    >>> from ckpt.mapping.rules import Rearrange
    >>> rule = Rule(("w.*", "v.*"), ("x.*",), Rearrange.parse("* i -> * i", "rule"))
    >>> member_of(rule, "v.3")
    Member(part=1, texts=('3',), indices=())
    """
    for part, source in enumerate(rule.sources):
        match = names_matching(source).fullmatch(name)
        if match is not None:
            named = match.groupdict()
            spans = {match.span(axis) for axis in named}
            texts = [
                text
                for index, text in enumerate(match.groups(), 1)
                if match.span(index) not in spans
            ]
            axes = name_axes(rule.sources[0])
            return Member(part, tuple(texts), tuple(int(named[axis]) for axis in axes))
    return None


def shared_axes(rule: Rule) -> tuple[str, ...]:
    """Returns the axes that the names of both sides have: a target is of sources with its indices.

    >>> from ckpt.mapping.rules import Rearrange
    >>> shared_axes(Rule(("a.{e}",), ("b.{e}",), Rearrange.parse("i -> i", "rule")))
    ('e',)
    """
    axes = name_axes(rule.targets[0])
    return tuple(axis for axis in name_axes(rule.sources[0]) if axis in axes)


@dataclass(frozen=True, slots=True)
class Group:
    """The tensors of a rule with the same texts in their names."""

    rule: Rule
    texts: Texts
    records: Mapping[tuple[int, Indices], TensorRecord]
    """By the number of the source, and the indices."""
    parameters: Mapping[str, int]

    def targets(self) -> dict[str, tuple[TensorRecord, Indices]]:
        """Returns the tensors by their new names, with the indices of `shared_axes` in these.

        Raises:
            ArgumentError: members are missing, or shapes, dtypes and sizes do not fit.
        """
        rearrange = self.rule.rearrange
        assert rearrange is not None
        axes = name_axes(self.rule.sources[0])
        every = [indices for _, indices in self.records]
        # The size of an axis in braces is one more than its largest index.
        counts = tuple(1 + max(each[number] for each in every) for number in range(len(axes)))
        self._check_complete(axes, counts)
        dtype = self._dtype()
        first = self.records[0, (0,) * len(axes)]
        left = with_rank(rearrange.left, len(first.shape), first.name)
        extra = len(left) - len([dim for dim in rearrange.left if dim != ("...",)])
        right = expand(rearrange.right, extra)
        known = self._given_sizes((*axes_of(left), *axes_of(rearrange.right)))
        array = self._array(left, axes, counts, known)
        return self._parts_of(array, right, dtype)

    def _check_complete(self, axes: Sequence[str], counts: Indices) -> None:
        whole = len(self.rule.sources) * prod(counts)
        if whole == len(self.records):
            return
        missing = [  # of a hostile file there are 10**18: no attribute has them all
            name_with(source, self.texts, dict(zip(axes, indices, strict=True)))
            for source, indices in islice(self._missing(counts), SHOWN_NAMES)
        ]
        count = whole - len(self.records)
        more = f" and {count - len(missing)} more" if count > len(missing) else ""
        present = next(iter(self.records.values())).name
        raise ArgumentError(
            f"{self.rule.where}: {present} is there, but {', '.join(missing)}{more} of the same "
            "rule is missing"
        )

    def _missing(self, counts: Indices) -> Iterator[tuple[str, Indices]]:
        """Yields the names that no member has, of which there may be a billion."""
        for part, source in enumerate(self.rule.sources):
            for indices in _every(counts):
                if (part, indices) not in self.records:
                    yield source, indices

    def _dtype(self) -> DType:
        first, *others = self.records.values()
        other = next((member for member in others if member.dtype != first.dtype), None)
        if other is not None:
            raise ArgumentError(
                f"{self.rule.where}: {first.name} is {first.dtype} and {other.name} is "
                f"{other.dtype}; tensors of one rule must have one dtype"
            )
        return first.dtype

    def _array(
        self, left: Dims, axes: Sequence[str], counts: Indices, known: Mapping[str, int]
    ) -> _Array:
        """Returns the array over all axes of the rule; `known` are sizes."""
        flat = axes_of(left)
        parts = []
        lengths: list[int] = []
        sizes: dict[str, int] = {}
        for part in range(len(self.rule.sources)):
            stacked, own = self._stack(part, left, known, counts)
            for axis, size in own.items():
                if axis != PARTS and sizes.setdefault(axis, size) != size:
                    raise ArgumentError(
                        f"{self.rule.where}: the axis {axis} is {sizes[axis]} in "
                        f"{self._name(0)} and {size} in {self._name(part)}"
                    )
            parts.append(stacked)
            lengths.append(own.get(PARTS, 1))
        self._check_ratio(lengths)
        order = (*axes, *flat)
        if len(parts) == 1:
            return _Array(parts[0], order)
        return _Array(Joined(tuple(parts), order.index(PARTS)), order)

    def _check_ratio(self, lengths: Sequence[int]) -> None:
        """Raises ArgumentError if `parts` with known values contradict the lengths along `*`."""
        parts = self.rule.parts
        needed = {name for part in parts for name in parameters_in(part)}
        if len(parts) != len(lengths) or not needed <= set(self.parameters):
            return
        ratio = [value_of(part, self.parameters, self.rule.where) for part in parts]
        each = zip(lengths, ratio, strict=True)
        if any(length * ratio[0] != lengths[0] * own for length, own in each):
            names = ", ".join(self._name(part) for part in range(len(lengths)))
            raise ArgumentError(
                f"{self.rule.where}: {names} have the sizes {' : '.join(map(str, lengths))} along "
                f"`*`, and `parts` are {' : '.join(map(str, ratio))}: give the parameters of this "
                f"model, not {dict(self.parameters)}"
            )

    def _stack(
        self, part: int, left: Dims, known: Mapping[str, int], counts: Indices
    ) -> tuple[View, dict[str, int]]:
        """Returns the tensors of one source over its axes, with the sizes of these."""
        sizes: dict[str, int] = {}
        views: list[View] = []
        for indices in product(*map(range, counts)):
            record = self.records[part, indices]
            if len(record.shape) != len(left):
                raise self._unlike(record, 0)
            own = sizes_of(left, record.shape, known, f"{self.rule.where}: {record.name}")
            other = next((axis for axis in own if sizes.get(axis, own[axis]) != own[axis]), None)
            if other is not None:
                raise self._unlike(record, part)
            sizes = own
            views.append(_unflatten(Stored(record), left, own))
        for depth in range(len(counts) - 1, -1, -1):
            size = counts[depth]
            rows = [Flattened(view, 0, 0) for view in views]
            views = [
                Joined(tuple(rows[at : at + size]), 0) if size > 1 else rows[at]
                for at in range(0, len(rows), size)
            ]
        return views[0], sizes

    def _unlike(self, record: TensorRecord, part: int) -> ArgumentError:
        return ArgumentError(
            f"{self.rule.where}: {record.name} has shape {list(record.shape)}, {self._name(part)} "
            "has another: they cannot be put together"
        )

    def _parts_of(
        self, array: _Array, right: Dims, dtype: DType
    ) -> dict[str, tuple[TensorRecord, Indices]]:
        """Returns the targets: parts of the array, in the order of their axes."""
        targets: dict[str, tuple[TensorRecord, Indices]] = {}
        axes, shared = name_axes(self.rule.targets[0]), shared_axes(self.rule)
        counts = [array.size(axis) for axis in axes]
        for number, (lo, hi) in enumerate(self._ranges(array)):
            for indices in product(*map(range, counts)):
                named = dict(zip(axes, indices, strict=True))
                part = array.part(named, lo, hi)
                view = _flatten(part.permute(axes_of(right)), right)
                name = name_with(self.rule.targets[number], self.texts, named)
                if name in targets:
                    raise ArgumentError(f"{self.rule.where}: two tensors get the name {name}")
                record = TensorRecord(name, view.shape, dtype, view)
                targets[name] = record, tuple(named[axis] for axis in shared)
        return targets

    def _ranges(self, array: _Array) -> list[tuple[int, int]]:
        """Returns the range of `*` of each target; of all indices if it has no list of names."""
        if PARTS not in array.axes:
            return [(0, 0)]
        total, count = array.size(PARTS), len(self.rule.targets)
        if count == 1:
            return [(0, total)]
        parts = self.rule.parts or (1,) * count
        ratio = [value_of(part, self.parameters, self.rule.where) for part in parts]
        if total % sum(ratio):
            raise ArgumentError(
                f"{self.rule.where}: {total} along `*` of {self._name(0)} is not divided into "
                f"{' + '.join(map(str, ratio))} equal parts"
            )
        ends = list(accumulate([each * (total // sum(ratio)) for each in ratio], initial=0))
        return list(pairwise(ends))

    def _given_sizes(self, axes: Sequence[str]) -> dict[str, int]:
        """Returns the sizes that the rule or a parameter gives."""
        sizes = {axis: axis for axis in axes if axis in self.parameters} | dict(self.rule.sizes)
        return {
            axis: value_of(size, self.parameters, self.rule.where) for axis, size in sizes.items()
        }

    def _name(self, part: int) -> str:
        return next(record.name for (own, _), record in self.records.items() if own == part)


def _every(counts: Indices) -> Iterator[Indices]:
    """Yields all indices. `itertools.product` would first list those of each axis."""
    if not counts:
        yield ()
        return
    for first in range(counts[0]):
        for rest in _every(counts[1:]):
            yield first, *rest


@dataclass(frozen=True, slots=True)
class _Array:
    """A view whose dimensions are axes."""

    view: View
    axes: tuple[str, ...]

    def size(self, axis: str) -> int:
        return self.view.shape[self.axes.index(axis)]

    def part(self, indices: Mapping[str, int], lo: int, hi: int) -> _Array:
        """Returns one index of each of these axes, and the range `[lo, hi)` of `*`, if any."""
        view, axes = self.view, self.axes
        for axis, index in indices.items():
            dim = axes.index(axis)
            view = Unflattened(Narrowed(view, dim, index, index + 1), dim, ())
            axes = (*axes[:dim], *axes[dim + 1 :])
        if PARTS in axes and hi - lo != view.shape[axes.index(PARTS)]:
            view = Narrowed(view, axes.index(PARTS), lo, hi)
        return _Array(view, axes)

    def permute(self, axes: Sequence[str]) -> View:
        order = tuple(self.axes.index(axis) for axis in axes)
        return self.view if order == tuple(range(len(order))) else Permuted(self.view, order)


def _unflatten(view: View, dims: Dims, sizes: Mapping[str, int]) -> View:
    """Returns the view with a dimension for each axis."""
    at = 0
    for dim in dims:
        if len(dim) > 1:
            view = Unflattened(view, at, tuple(sizes[axis] for axis in dim))
        at += len(dim)
    return view


def _flatten(view: View, dims: Dims) -> View:
    """Returns the view, with a dimension for each axis, in these dimensions."""
    for at, dim in enumerate(dims):
        if len(dim) > 1:
            view = Flattened(view, at, len(dim))
    return view
