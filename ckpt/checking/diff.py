"""Compares two checkpoints of any format: names, shapes, dtypes, elements and values.

Rules:

1. Without a tolerance bits are compared: a NaN equals the same NaN, and 0.0 differs from -0.0. With
   a tolerance, elements are close if `|a - b| <= atol + rtol * |b|`, and NaNs equal each other.
2. Both sides are read block by block in row-major order. Two blocks of `BLOCK_BYTES` and their
   numbers are in memory, never a whole model.
3. Each tied name is looked up by itself. A pair of stored tensors is compared once.
4. Plain values, and the kinds of containers and keys (see the note), are compared if
   both formats can hold them. DCP makes all keys text, so its keys are not compared with other
   formats.
5. Where both sides have checksums of the same chunks, only chunks whose checksums differ are read.
   All checksums of what is read are compared too, also if a tensor is a part of a record. A wrong
   checksum is an error, not a difference.
6. A pattern must match a name of one of the two (`ckpt.state.patterns`). A mistyped pattern would
   otherwise find no difference.

[Note: structure]
Containers and keys can be of different kinds in two checkpoints with equal names.

Different nests can give one name: `a.0` names the first entry of a list, the first of a tuple, and
a dict's entry under 0 or under "0". Rules:

1. Two containers are compared if they have the same name: first their kinds, then, for two dicts,
   the keys behind equal names.
2. An empty container is a plain value and is not compared here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, TypeVar

import numpy as np

from ckpt.checking.elements import (
    Numbers,
    Tolerance,
    compare,
    decade_name,
    read_elements,
    same_value,
    unlike_ranges,
)
from ckpt.mapping.changes import Changes, MappingName
from ckpt.opening.sources import Source, open_source
from ckpt.state.patterns import Selection
from ckpt.state.saved import Missing, Saved, by_name
from ckpt.stores.store import Options
from ckpt.transfer.read import RangeReader
from ckpt.transfer.record_sums import RecordSums, run_twice
from formats.catalog import (
    Key,
    OpaqueValue,
    TensorRecord,
    TensorRef,
    Tree,
    iter_leaves,
    join,
    str_of,
)
from formats.joined import under
from sharding.errors import ArgumentError, format_names, without_secrets

__all__ = ["Comparison", "TensorDifference", "ValueDifference", "diff"]

_T = TypeVar("_T")

BLOCK_BYTES = 16 << 20
"""Bytes of a tensor that are read and compared in one step."""
FLAT_FORMATS = ("safetensors", "huggingface", "npz", "npy")
"""Formats that hold only tensors."""
GGUF = "gguf"
"""A format with values about its model, under names of its own."""
SHOWN_NAMES = 3


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor of both checkpoints that differs."""

    name: str
    problem: Literal["shape", "dtype", "values"]
    detail: str
    """The difference as text, with the values of both sides."""
    elements: int = 0
    """The number of elements of the tensor."""
    differing: int = 0
    """The number of elements that differ by more than the tolerance."""
    first: tuple[int, ...] | None = None
    """The index of the first such element."""
    max_abs: float = 0.0
    """The largest |a - b|. Infinite if only one is NaN or infinite, or the dtype is opaque."""
    max_rel: float = 0.0
    """The largest |a - b| / max(|a|, |b|)."""
    histogram: tuple[tuple[str, int], ...] = ()
    """The number of elements with different bits by the power of ten of |a - b|: `("1e-3", 5)` are
    five elements from 0.001 up to 0.01. "0" are equal numbers, "inf" are not numbers."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A plain value that differs."""

    name: str
    a: str | None
    """The value in A as text; None if A does not have it."""
    b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcome of `diff`."""

    a: str
    b: str
    only_a: tuple[str, ...]
    """Tensors that only A has."""
    only_b: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    structure: tuple[StructureDifference, ...]
    """Containers and keys of different kinds under equal names."""
    equal_tensors: tuple[str, ...]
    """Tensors whose elements are equal, or close, in the order of A."""
    compared_tensors: int
    """The number of pairs whose elements were compared."""
    compared_bytes: int
    unread_bytes: int
    """Those of them that have equal checksums in both, and were not read."""
    close_tensors: int
    """The number of pairs that are within the tolerance and not equal to the bit."""
    max_abs: float
    """The largest |a - b| among all compared pairs."""
    notes: tuple[str, ...]
    """Parts of the checkpoints that were not compared, with the reasons."""

    @property
    def equal(self) -> bool:
        """Whether the comparison found no difference."""
        differences = (self.only_a, self.only_b, self.tensors, self.values, self.structure)
        return not any(differences)


def is_random(name: str) -> bool:
    """Whether a tensor is by its name the state of a random generator, whose bytes always differ.

    >>> is_random("rng.rank0.torch"), is_random("rng_state.cpu"), is_random("model.rngs.w")
    (True, True, False)
    """
    first = name.partition(".")[0]
    return first in ("rng", "random") or first.startswith(("rng_", "random_"))


def size_order(difference: TensorDifference) -> tuple[bool, bool, bool, bool, float]:
    """A sort key: shapes and dtypes; weights, then states of optimizers, each by |a - b|.

    Then single numbers, such as an optimizer's `step`, and random states.
    """
    is_number, is_state = difference.elements == 1, ".state." in f".{difference.name}"
    return (
        is_random(difference.name),
        difference.problem == "values",
        is_number,
        is_state,
        -difference.max_abs,
    )


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    select: str | None = None,
    mapping: MappingName | Sequence[MappingName] = (),
    rename: Mapping[str, str] | None = None,
    parameters: Mapping[str, int] | None = None,
    config: str | os.PathLike[str] | None = None,
    values: bool = True,
    dtype: bool = True,
    read_all: bool = False,
    progress: Callable[[int], None] | None = None,
    storage_options: Options = None,
    b_storage_options: Options = None,
) -> Comparison:
    """Returns the differences of two checkpoints, of any format each.

    One process calls this. It compares names, shapes, dtypes, elements, values and structure.

    Args:
        rtol, atol: the tolerance `|a - b| <= atol + rtol * |b|`. If both are 0, bits are compared.
        include, exclude: patterns of the names of tensors and values to compare: `*` and `?`, or a
            regular expression between slashes.
        select: a key path. In a checkpoint with names below it, only these count, and they lose it:
            `model` compares a training checkpoint with an exported file.
        mapping, rename, parameters, config: changes of A's names and shapes, as for `ckpt.convert`.
            First `select` counts, then these, then `include` and `exclude`.
        values: whether plain values, and the kinds of containers and keys, are compared too.
        dtype: whether different dtypes are a difference. If False, elements are compared as
            numbers.
        read_all: whether all elements are read and all their checksums compared. By default chunks
            that have equal checksums in both are not read: `ckpt.verify` finds later damage.
        progress: called with numbers of bytes of A's tensors as they are compared.
        storage_options: options of the fsspec drivers of both URLs.
        b_storage_options: options of the driver of `b` in place of `storage_options`.

    Raises:
        NotACheckpointError: no checkpoint is at `a` or `b`.
        CorruptError, FormatError: a checksum is wrong, or a tensor is not whole.
        ArgumentError: no name lies below `select`, a pattern matches no name of either checkpoint,
            the selection is empty, `config` has no effect, or a tolerance is negative.
        StateError: two entries of a checkpoint have one name.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(f"{folder}/a", {"w": torch.zeros(4)})
    ...     ckpt.save(f"{folder}/b", {"w": torch.tensor([0.0, 0, 0.5, 0])})
    ...     found = ckpt.diff(f"{folder}/a", f"{folder}/b")
    ...     found.equal, found.tensors[0].first, found.tensors[0].max_abs
    (False, (2,), 0.5)
    """
    chosen = Selection.of(include, exclude)
    changes = Changes(mapping=mapping, rename=rename, parameters=parameters, config=config)
    changes.check_config_is_used()
    b_options = storage_options if b_storage_options is None else b_storage_options
    with open_source(a, storage_options) as left, open_source(b, b_options) as right:
        left, right = _alike(left, right), _alike(right, left)
        sides = (_apply_changes(left, select, changes), _Side.of(right, select))
        if select is not None and not any(side.selected for side in sides):
            raise ArgumentError(
                without_secrets(f"neither {left.url} nor {right.url} has anything below {select!r}")
            )
        names = {
            name for side in sides for name in (*side.tensors, *(side.values if values else ()))
        }
        chosen.check_chooses(names, without_secrets(f"{left.url} and {right.url}"))
        one, other = (side.chosen(chosen) for side in sides)
        tolerance = Tolerance(rtol, atol)
        # Blocks of a record that were compared before its checksum was wrong are read again too.
        return run_twice(
            lambda: _compare(one, other, tolerance, values, dtype, read_all, progress),
            one.engine.sums,
            other.engine.sums,
        )


@dataclass(frozen=True)
class _Side:
    """The compared part of one checkpoint, by the names of the comparison."""

    source: Source
    engine: RangeReader
    """Reads all tensors: several tensors may share a record and its checksum."""
    tensors: Mapping[str, TensorRecord]
    """Under all names, including tied ones."""
    values: Mapping[str, Tree]
    structure: Mapping[str, Container]
    select: str | None
    """The key path that the names of the source's tree have below it; None if they have none."""
    selected: bool
    """Whether the checkpoint has names below the selected key path."""

    @classmethod
    def of(cls, source: Source, select: str | None) -> _Side:
        catalog = source.catalog
        records = dict(catalog.tensors)
        records |= {alias: catalog.tensors[name] for alias, name in catalog.aliases.items()}
        values = by_name(plain_values(catalog.tree), source.url)
        by_name([*records.items(), *values.items()], source.url)  # a tensor and a value may clash
        engine = RangeReader(source.store, RecordSums("all"))
        prefix = f"{select}."
        if select is not None and any(name.startswith(prefix) for name in (*records, *values)):
            records, values = _below(records, prefix), _below(values, prefix)
            return cls(source, engine, records, values, {}, select, True)
        return cls(source, engine, records, values, {}, None, False)

    def chosen(self, selection: Selection) -> _Side:
        """Returns the part that a selection chooses."""
        prefix = f"{self.select}." if self.select is not None else ""
        return replace(
            self,
            tensors={name: entry for name, entry in self.tensors.items() if name in selection},
            values={name: entry for name, entry in self.values.items() if name in selection},
            structure=containers(self.source.catalog.tree, selection.__contains__, prefix),
        )


def _alike(side: Source, other: Source) -> Source:
    """Returns the weights of a training's folder, if the other side is a checkpoint of weights."""
    weights = side.catalog.weights
    if not weights or other.catalog.weights or other.catalog.format not in (*FLAT_FORMATS, GGUF):
        return side
    return replace(side, catalog=under(side.catalog, weights))


def _apply_changes(source: Source, select: str | None, changes: Changes) -> _Side:
    """Returns the compared part of A, after the changes."""
    if not changes.mappings:
        return _Side.of(source, select)
    is_there = select is not None and not isinstance(Saved(source.catalog).node(select), Missing)
    chosen = replace(changes, select=select if is_there else None)
    side = _Side.of(replace(source, catalog=chosen.apply(source).catalog), None)
    return replace(side, selected=is_there)


def _below(entries: Mapping[str, _T], prefix: str) -> dict[str, _T]:
    return {
        name.removeprefix(prefix): entry
        for name, entry in entries.items()
        if name.startswith(prefix)
    }


def plain_values(tree: Tree) -> Iterator[tuple[str, Tree]]:
    """Yields the values of a tree with their names, without tensors. Empty containers are values.

    >>> list(plain_values({"step": 3, "w": TensorRef("w"), "lr": [0.1, ()]}))
    [('step', 3), ('lr.0', 0.1), ('lr.1', ())]
    """
    return (pair for pair in iter_leaves(tree) if not isinstance(pair[1], TensorRef))


def _compare(
    a: _Side,
    b: _Side,
    tolerance: Tolerance,
    with_values: bool,
    with_dtype: bool,
    read_all: bool,
    progress: Callable[[int], None] | None,
) -> Comparison:
    differences: list[TensorDifference] = []
    pairs: set[tuple[str, str]] = set()
    equal: list[str] = []
    compared_bytes = unread_bytes = compared = close = 0
    max_abs = 0.0
    for name, left in a.tensors.items():
        right = b.tensors.get(name)
        if right is None or (left.name, right.name) in pairs:
            continue
        pairs.add((left.name, right.name))
        if left.shape != right.shape:
            detail = f"shape {list(left.shape)} in A, {list(right.shape)} in B"
            differences.append(TensorDifference(name, "shape", detail))
            continue
        if with_dtype and left.dtype != right.dtype:
            detail = f"dtype {left.dtype} in A, {right.dtype} in B"
            differences.append(TensorDifference(name, "dtype", detail))
            continue
        ranges = [(0, prod(left.shape))] if read_all else unlike_ranges(left, right)
        numbers = compare_elements(a.engine, left, b.engine, right, ranges, tolerance, progress)
        compared += 1
        compared_bytes += left.nbytes
        unread_bytes += left.nbytes - sum(hi - lo for lo, hi in ranges) * left.dtype.itemsize
        max_abs = max(max_abs, numbers.max_abs)
        if numbers.differing:
            differences.append(_values_difference(name, left, numbers))
            continue
        equal.append(name)
        close += bool(numbers.unequal)
    for side in (a, b):
        side.engine.finish()
    values, notes = _compare_values(a, b, tolerance) if with_values else ((), ())
    structure: tuple[StructureDifference, ...] = ()
    kinds = {side.source.catalog.format for side in (a, b)}
    is_flat = any(_is_flat_beside(kind, other) for kind in kinds for other in kinds)
    if with_values and not is_flat:
        with_keys = "dcp" not in kinds or len(kinds) == 1
        structure = compare_structure(a.structure, b.structure, with_keys)
    return Comparison(
        a=a.source.url,
        b=b.source.url,
        only_a=tuple(name for name in a.tensors if name not in b.tensors),
        only_b=tuple(name for name in b.tensors if name not in a.tensors),
        tensors=tuple(differences),
        values=values,
        structure=structure,
        equal_tensors=tuple(equal),
        compared_tensors=compared,
        compared_bytes=compared_bytes,
        unread_bytes=unread_bytes,
        close_tensors=close,
        max_abs=max_abs,
        notes=notes,
    )


def _values_difference(name: str, record: TensorRecord, found: Numbers) -> TensorDifference:
    elements = prod(record.shape)
    first = tuple(map(int, np.unravel_index(found.first, record.shape)))
    at = f", first at {list(first)}" if first else ""
    detail = (
        f"{found.differing} of {elements} elements differ{at}: {found.first_a} in A, "
        f"{found.first_b} in B; the largest difference is {found.max_abs:.6g} (relative "
        f"{found.max_rel:.6g})"
    )
    histogram = tuple((decade_name(decade), number) for decade, number in found.decades.items())
    return TensorDifference(
        name,
        "values",
        detail,
        elements,
        found.differing,
        first,
        found.max_abs,
        found.max_rel,
        histogram,
    )


def compare_elements(
    a: RangeReader,
    left: TensorRecord,
    b: RangeReader,
    right: TensorRecord,
    ranges: Sequence[tuple[int, int]],
    tolerance: Tolerance,
    progress: Callable[[int], None] | None = None,
) -> Numbers:
    """Compares ranges of elements of two tensors of one shape. Reads each once."""
    numbers, itemsize, reported = Numbers(), left.dtype.itemsize, 0
    step = max(1, BLOCK_BYTES // max(itemsize, right.dtype.itemsize))
    for first, end in ranges:
        for lo in range(first, end, step):
            hi = min(lo + step, end)
            a_elements = read_elements(a, left, lo, hi)
            b_elements = read_elements(b, right, lo, hi)
            numbers = numbers.then(
                compare(a_elements, left.dtype, b_elements, right.dtype, tolerance), lo
            )
            if progress is not None:
                progress((hi - reported) * itemsize)
                reported = hi
    if progress is not None and reported < prod(left.shape):
        progress((prod(left.shape) - reported) * itemsize)
    return numbers


def _compare_values(
    a: _Side, b: _Side, tolerance: Tolerance
) -> tuple[tuple[ValueDifference, ...], tuple[str, ...]]:
    for side, other in ((a, b), (b, a)):
        kind = side.source.catalog.format
        if _is_flat_beside(kind, other.source.catalog.format):
            has = "has only its own" if kind == GGUF else "holds none"
            note = f"the plain values of {other.source.url} were not compared: {kind} {has}"
            return (), (note,) if other.values else ()
    differences = []
    for name in dict.fromkeys((*a.values, *b.values)):
        a_text = str_of(a.values[name]) if name in a.values else None
        b_text = str_of(b.values[name]) if name in b.values else None
        both = a_text is not None and b_text is not None
        if not both or not same_value(a.values[name], b.values[name], tolerance):
            differences.append(ValueDifference(name, a_text, b_text))
    common = [name for name in a.values if name in b.values]
    opaque = [name for name in common if isinstance(a.values[name], OpaqueValue)]
    names = format_names(opaque, SHOWN_NAMES)
    notes = (f"{names} were compared by their classes alone: objects",) if opaque else ()
    return tuple(differences), notes


def _is_flat_beside(kind: str, other: str) -> bool:
    """Whether values and nests of one format are not compared with those of another."""
    return kind in FLAT_FORMATS or (kind == GGUF != other)


@dataclass(frozen=True, slots=True)
class Container:
    """A dict, list or tuple that is not empty."""

    kind: str
    keys: Mapping[str, Key] = field(default_factory=dict)
    """A dict's keys, by the names of its entries."""


@dataclass(frozen=True, slots=True)
class StructureDifference:
    """A container, or a key of one, of different kinds; `a` and `b` describe the two."""

    name: str
    a: str
    b: str


def containers(
    tree: Tree, is_selected: Callable[[str], bool], prefix: str = ""
) -> dict[str, Container]:
    """Returns the containers of a tree by name, each with the keys that have a selected name below.

    Only names below a prefix count, and they lose it.

    >>> found = containers({"a": [1, 2], "b": {0: (3,)}}, lambda name: name.startswith("b"))
    >>> [(name, one.kind, dict(one.keys)) for name, one in found.items()]
    [('b.0', 'tuple', {}), ('b', 'dict', {'b.0': 0}), ('', 'dict', {'b': 'b'})]
    >>> list(containers({"a": {"b": [1]}}, lambda name: True, prefix="a."))
    ['b', '']
    """
    by_name: dict[str, Container] = {}

    def walk(node: Tree, path: str) -> bool:
        """Whether a name at or below a path is selected."""
        if not isinstance(node, dict | list | tuple) or not node:
            return path.startswith(prefix) and is_selected(path.removeprefix(prefix))
        items: Iterable[tuple[Key, Tree]]
        items = node.items() if isinstance(node, dict) else enumerate(node)
        below = [(join(path, key), key, item) for key, item in items]
        keys = {name.removeprefix(prefix): key for name, key, item in below if walk(item, name)}
        if keys and f"{path}.".startswith(prefix):
            is_dict = isinstance(node, dict)
            kind = "dict" if is_dict else "list" if isinstance(node, list) else "tuple"
            name = f"{path}.".removeprefix(prefix)[:-1] if prefix else path
            by_name[name] = Container(kind, keys if is_dict else {})
        return bool(keys)

    walk(tree, "")
    return by_name


def compare_structure(
    a: Mapping[str, Container], b: Mapping[str, Container], with_keys: bool
) -> tuple[StructureDifference, ...]:
    """Returns the differences by rule 1, sorted by name. Compares keys of dicts if `with_keys`.

    >>> compare_structure({"a": Container("list")}, {"a": Container("tuple")}, True)
    (StructureDifference(name='a', a='a list', b='a tuple'),)
    """
    differences = []
    for name, a_node in a.items():
        b_node = b.get(name)
        if b_node is None:
            continue
        if a_node.kind != b_node.kind:
            differences.append(StructureDifference(name, f"a {a_node.kind}", f"a {b_node.kind}"))
        elif with_keys:
            differences += _compare_keys(a_node.keys, b_node.keys)
    return tuple(sorted(differences, key=lambda row: row.name))


def _compare_keys(a: Mapping[str, Key], b: Mapping[str, Key]) -> list[StructureDifference]:
    """Returns names that two dicts have under different keys, one for each pair of key types."""
    differences: dict[tuple[type, type], StructureDifference] = {}
    for name, key in a.items():
        other = b.get(name, key)
        kinds = type(key), type(other)
        if repr(key) != repr(other) and kinds not in differences:
            differences[kinds] = StructureDifference(
                name, f"under the key {key!r}", f"under {other!r}"
            )
    return list(differences.values())
