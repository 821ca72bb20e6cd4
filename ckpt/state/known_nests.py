"""Reuses the descriptions of nests of tensors that have not changed since the last save.

A training saves the same tensors again and again. To check that they are unchanged takes a fifth
of the time of a new description.

Rules:

1. A save asks every module and optimizer for its state, so that hooks and overrides run. Only the
   results that depend on the tensors in the answer alone are kept.
2. A nest is unchanged if its keys are the same, in their order, and every value has the type that
   it had. Every tensor must have the same memory, shape, strides and dtype, and a DTensor the same
   spec. The same tensors must be tied. A nest that fails any test is described anew.
3. Plain values may differ: they are taken from the answer.
4. A kept description keeps no tensor alive, and gives no tensor a weak reference, which
   `torch.utils.swap_tensors` refuses. A description depends only on the facts of rule 2, so another
   tensor may take the place of one that is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from types import NoneType
from typing import Any, NamedTuple, TypeAlias
from weakref import ReferenceType, ref

import torch

from ckpt.state.tensor_kinds import ORDINARY
from formats.catalog import TensorRef, Tree
from formats.dtypes import DType
from sharding.describe.describing import TensorLike
from sharding.describe.dtensor import described_before
from sharding.layout import Layout, Mesh

VALUES = frozenset((NoneType, bool, int, float, str, bytes, complex))
"""Types of the plain values that a known nest may have."""
MAX_BITS = 64
"""A nest with a longer integer is described anew."""
_OF_A_UNIT = frozenset(("_fsdp_flattened", "_sharding_entry"))
"""Attributes of parameters that are, or may be, parts of other parameters."""

Nest: TypeAlias = Mapping[Any, Any]


class Leaf(NamedTuple):
    """One tensor of a state on this rank."""

    name: str
    dtype: DType
    local: torch.Tensor
    layout: Layout
    given: TensorLike
    """The tensor itself, as the state has it."""


class Described(NamedTuple):
    """The results of a description of a state so far."""

    leaves: dict[str, Leaf]
    """The tensors by name, in the state's order; tied tensors once, under their first name."""
    aliases: dict[str, str]
    names: list[str]
    """The names of all leaves, as `ckpt.state.saved.leaves` yields them."""
    at: dict[int, str]
    """The first name of the tensor at each address."""
    seen: dict[object, str]
    """The first name of each tensor, by its `identity`."""
    strides: dict[str, tuple[int, ...]]
    """The strides of whole tensors that are packed in another order than row-major."""


class Found(NamedTuple):
    """The current content of a nest: its keys in their order, and its values."""

    keys: list[object]
    """The keys of the nest; each key of a dict is followed by the dict's keys."""
    sizes: list[int]
    """For each key of the nest: the number of entries of its dict; -1 for a value."""
    values: list[Any]
    types: list[type]

    @classmethod
    def of(cls, nest: Nest) -> Found:
        """Returns the content of a nest of values and of dicts of values."""
        keys: list[object] = []
        sizes: list[int] = []
        values: list[Any] = []
        for key, item in nest.items():
            keys.append(key)
            if type(item) is dict:
                keys += item
                sizes.append(len(item))
                values += item.values()
            else:
                sizes.append(-1)
                values.append(item)
        return cls(keys, sizes, values, list(map(type, values)))

    @property
    def has_text_keys(self) -> bool:
        """Whether all keys are of type `str` itself: a key of another type may be equal to one."""
        return not self.keys or set(map(type, self.keys)) == {str}


class Tensors(NamedTuple):
    """The tensors of a nest, in its order."""

    given: list[Any]
    is_dtensor: list[bool]
    locals: list[torch.Tensor]

    @classmethod
    def of(cls, given: list[Any], is_dtensor: list[bool]) -> Tensors:
        """Returns the tensors with their local parts."""
        pairs = zip(given, is_dtensor, strict=True)
        return cls(given, is_dtensor, [t._local_tensor if d else t for t, d in pairs])

    @property
    def specs(self) -> list[Any]:
        """The specs of the DTensors."""
        return [tensor._spec for tensor in compress(self.given, self.is_dtensor)]

    def facts(self) -> list[list[Any]]:
        """Returns all facts that a description depends on, except for ties between objects."""
        locals_, dtypes = self.locals, [t.dtype for t in self.given]
        return [
            list(map(type, locals_)),
            list(map(id, self.specs)),
            dtypes,
            [t.shape for t in locals_],
            [t.stride() for t in locals_],
            [t.storage_offset() for t in locals_],
            [t.data_ptr() for t in locals_],
            [t.untyped_storage().nbytes() for t in locals_],
            [t.device for t in locals_],
            [t.is_neg() for t in locals_],
            [t.is_conj() for t, dtype in zip(locals_, dtypes, strict=True) if dtype.is_complex],
            [_OF_A_UNIT.isdisjoint(vars(t)) for t in self.given],
        ]


class Unchanged(NamedTuple):
    """The description of an unchanged nest."""

    given: list[Any]
    leaves: Iterable[tuple[str, Leaf]]
    tree: Tree


@dataclass(frozen=True, slots=True)
class KnownNest:
    """The description of a nest, without its tensors."""

    world: Mesh
    name_chars: int
    """The longest name that was allowed."""
    found: Found
    """The content, without values."""
    is_tensor: list[bool]
    """For each value: whether it is a tensor."""
    is_dtensor: list[bool]
    """For each tensor: whether it is a DTensor."""
    names: list[str]
    """The names of all leaves."""
    facts: list[list[Any]]
    ties: _Ties
    strides: dict[str, tuple[int, ...]]
    tree: Tree
    specs: list[ReferenceType[Any]]
    gone: list[ReferenceType[Any]]
    """The specs that are freed: another object may now have the id of one of them."""

    def unchanged(self, nest: Nest, world: Mesh, name_chars: int) -> Unchanged | None:
        """Returns the description of `nest`; None if the nest must be described anew."""
        if world != self.world or name_chars != self.name_chars:
            return None
        found = Found.of(nest)
        if found._replace(values=[]) != self.found or not found.has_text_keys:
            return None
        tensors = Tensors.of(list(compress(found.values, self.is_tensor)), self.is_dtensor)
        try:
            facts = tensors.facts()
        except (RuntimeError, NotImplementedError):  # from torch, for a tensor without memory
            return None
        if facts != self.facts or self.gone or not self.ties.hold(tensors.given):
            return None
        tree = self._tree(found.values)
        return None if tree is None else Unchanged(tensors.given, self.ties.leaves(tensors), tree)

    def _tree(self, values: Sequence[Any]) -> Tree | None:
        """Returns the tree with these values; None if one of them may be too long."""
        if all(self.is_tensor):
            return self.tree
        plain = [v for v, is_tensor in zip(values, self.is_tensor, strict=True) if not is_tensor]
        if any(type(value) is int and value.bit_length() > MAX_BITS for value in plain):
            return None
        return _with_values(self.tree, iter(plain))


def known(
    nest: Nest, world: Mesh, name_chars: int, state: Described, names: list[str], tree: Tree
) -> KnownNest | None:
    """Returns a nest that has just been described, for the next save.

    `names` are those of its leaves. Returns None if the nest holds other values than ordinary
    tensors, DTensors and plain values, or shares memory other than by ties inside the nest.
    """
    found = Found.of(nest)
    is_tensor = [isinstance(value, torch.Tensor) for value in found.values]
    plain = {kind for kind, is_one in zip(found.types, is_tensor, strict=True) if not is_one}
    if not plain <= VALUES or not found.has_text_keys or len(names) != len(found.values):
        return None
    given = list(compress(found.values, is_tensor))
    is_dtensor = [type(tensor) not in ORDINARY for tensor in given]
    if not all(map(_can_be_known, given, is_dtensor)):
        return None
    tensors = Tensors.of(given, is_dtensor)
    ties = _Ties.of(tensors, list(compress(names, is_tensor)), state)
    if ties is None:
        return None
    gone: list[ReferenceType[Any]] = []
    specs = {id(spec): spec for spec in tensors.specs}
    return KnownNest(
        world,
        name_chars,
        found._replace(values=[]),
        is_tensor,
        is_dtensor,
        names,
        tensors.facts(),
        ties,
        {name: state.strides[name] for name in names if name in state.strides},
        tree,
        [ref(spec, gone.append) for spec in specs.values()],
        gone,
    )


@dataclass(frozen=True, slots=True)
class _Ties:
    """The ties between the tensors of a nest, and the descriptions of the first tensors."""

    is_first: list[bool]
    firsts: tuple[list[str], list[DType], list[Layout]]
    aliases: dict[str, str]
    at: dict[int, str]
    """The first name of the tensor at each address."""
    by_id: list[bool]
    """For each tensor: whether only the same object is tied to it: DTensors and empty tensors."""
    names_by_id: list[str]
    first_by_id: list[int]

    @classmethod
    def of(cls, tensors: Tensors, names: Sequence[str], state: Described) -> _Ties | None:
        """Returns the ties; None for a tie to a tensor outside, or for two views of one address."""
        firsts = [state.aliases.get(name, name) for name in names]
        aliases = {name: first for name, first in zip(names, firsts, strict=True) if name != first}
        if not set(names).issuperset(firsts):
            return None
        by_id = [d or not t.numel() for t, d in zip(tensors.given, tensors.is_dtensor, strict=True)]
        at: dict[int, str] = {}
        for tensor, name, first, is_by_id in zip(tensors.given, names, firsts, by_id, strict=True):
            if name == first and state.leaves[name].given is not tensor:
                return None
            if not is_by_id and at.setdefault(tensor.data_ptr(), first) != first:
                return None
        if any(state.at.get(address) != first for address, first in at.items()):
            return None
        leaves = [state.leaves[name] for name in names if name not in aliases]
        return cls(
            [name not in aliases for name in names],
            ([x.name for x in leaves], [x.dtype for x in leaves], [x.layout for x in leaves]),
            aliases,
            at,
            by_id,
            list(compress(firsts, by_id)),
            _first_of_each(compress(tensors.given, by_id)),
        )

    def hold(self, given: Sequence[Any]) -> bool:
        """Whether these tensors have the same ties by object; addresses are among the facts."""
        return _first_of_each(compress(given, self.by_id)) == self.first_by_id

    def leaves(self, tensors: Tensors) -> Iterator[tuple[str, Leaf]]:
        """Returns the first tensors, with their names."""
        own = [
            t.detach() if t.requires_grad else t for t in compress(tensors.locals, self.is_first)
        ]
        names, dtypes, layouts = self.firsts
        given = compress(tensors.given, self.is_first)
        found = zip(names, dtypes, own, layouts, given, strict=True)
        return zip(names, map(Leaf._make, found), strict=True)

    def seen(self, given: Sequence[Any]) -> dict[object, str]:
        """Returns the first name of each tensor, by its id."""
        return dict(zip(map(id, compress(given, self.by_id)), self.names_by_id, strict=True))


class KnownTies:
    """The tensors of the unchanged nests of a state: other nests may be tied to them."""

    def __init__(self) -> None:
        self._nests: list[tuple[_Ties, list[Any]]] = []
        self._seen: dict[object, str] | None = None

    def add(self, nest: KnownNest, given: list[Any], state: Described) -> bool:
        """Takes a nest over; returns False if one of its tensors has been described in this state.

        No two known nests of a state share a tensor: they shared none when they were made.
        """
        ties = nest.ties
        ids = [key for key in state.seen if type(key) is int]
        if not ties.at.keys().isdisjoint(state.at) or (
            ids and not ties.seen(given).keys().isdisjoint(ids)
        ):
            return False
        self._nests.append((ties, given))
        self._seen = None
        return True

    def at(self, address: int) -> str | None:
        """Returns the first name of the tensor at an address, if there is one."""
        found = (ties.at.get(address) for ties, _ in self._nests)
        return next((name for name in found if name is not None), None)

    def seen(self, key: object) -> str | None:
        """Returns the first name of the tensor with this id; None for another `identity`."""
        if type(key) is not int or not self._nests:
            return None
        if self._seen is None:
            self._seen = {}
            for ties, given in self._nests:
                self._seen |= ties.seen(given)
        return self._seen.get(key)


def _can_be_known(tensor: Any, is_dtensor: bool) -> bool:
    if is_dtensor:
        return described_before(tensor) is not None
    return type(tensor) is torch.Tensor or _OF_A_UNIT.isdisjoint(vars(tensor))


def _first_of_each(tensors: Iterable[Any]) -> list[int]:
    """Returns, for each tensor, the index of the first one that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors)]


def _with_values(tree: Tree, values: Iterator[Tree]) -> Tree:
    """Returns the tree with other plain values, in the order of the tree."""
    if isinstance(tree, dict):
        return {key: _with_values(item, values) for key, item in tree.items()}
    return tree if isinstance(tree, TensorRef) else next(values)
