"""Collects the results of matching a target with a checkpoint: load items, differences, names used.

`ckpt.match.match` walks the target, `ckpt.match.match_optimizer` walks its optimizers, and
`ckpt.match.match_entries` walks the state of flat parameters. All three fill one builder.

The casts that a load allows from a checkpoint's dtype to a target's.

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

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch

from ckpt.errors import Difference, DifferenceKind
from ckpt.plan.load_plan import LoadItem
from ckpt.state.memory import empty_for, is_plain, torch_dtype
from ckpt.state.patterns import Claim, Rename, Selection
from ckpt.state.saved import Missing, Saved, holds_tensor
from ckpt.state.typed_values import restore_value
from formats.catalog import OpaqueValue, TensorRecord, TensorRef, Tree, TypedValue, join
from formats.dtypes import BY_TORCH_NAME, DType
from sharding.describe.describing import TensorLike, describe
from sharding.errors import ArgumentError
from sharding.layout import Mesh

NOT_SAVED = "is in the target and not in the checkpoint"

Installer = Callable[[], object]
"""Installs a part of the target and returns the new value of that part."""
Check = Callable[[], Difference | None]
"""Returns the difference that scalars show once they are read."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The ways in which a checkpoint may differ from the target that it fills."""

    strict: bool = True
    rename: Rename | None = None
    selection: Selection = field(default_factory=partial(Selection.of, None, None))
    casting: Casting | None = None
    """The casts to the target's dtypes."""


class Target(NamedTuple):
    """The memory of one load item."""

    given: TensorLike
    """The tensor as the user's state contains it."""
    local: torch.Tensor
    """This rank's part of the tensor, detached; of any dtype, device and strides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A target matched with a checkpoint, as one rank sees it."""

    items: list[LoadItem]
    targets: list[Target]
    """`LoadItem.target` is an index into this list."""
    preflight_scalars: list[LoadItem]
    """Read into memory of their own and checked before the load changes the target."""
    checks: list[Check]
    """The checks of `preflight_scalars`."""
    differences: list[Difference]
    """All differences except unexpected names."""
    shared: list[tuple[LoadItem, ...]]
    """Items whose targets share memory: compared before the load changes the target."""
    unexpected: list[str]
    """The checkpoint's names that this rank's target lacks."""
    saved_names: list[str]
    """All of the checkpoint's names, under the target's names; equal on all ranks."""
    own_names: list[str]
    """This rank's names; empty if the selection includes all names."""
    idle: tuple[Claim, ...]
    """Parts of the selection that choose no name of the checkpoint or of this target."""
    install: Installer
    """Sets values and calls `load_state_dict`s after the reads; returns the target."""
    installs: bool
    """Whether `install` changes anything: False if the target has tensors alone."""


@dataclass
class MatchBuilder:
    """The state of one matching."""

    saved: Saved
    selection: Selection
    world: Mesh
    """All ranks, along one axis."""
    allows_casts: bool = False
    """Whether tensors may get another dtype than the saved one."""
    items: list[LoadItem] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    preflight_scalars: list[LoadItem] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    ties: list[tuple[LoadItem, LoadItem]] = field(default_factory=list)
    """Items for one tensor of the target under two names: only the first is filled."""
    used: set[str] = field(default_factory=set)
    """The checkpoint's names that have a target or need none."""
    left_out: set[str] = field(default_factory=set)
    """Names of optimizer state of parameters whose weights do not fit: it is not loaded."""
    own_names: list[str] = field(default_factory=list)
    """The target's names that patterns may match; empty if the selection includes all names."""
    _dtypes: dict[DType, torch.dtype] = field(default_factory=dict)

    def item(
        self, name: str, record: TensorRecord, tensor: TensorLike, is_in_order: bool = False
    ) -> LoadItem:
        """Returns a new item that fills a tensor of the target. The caller adds it to a list.

        `is_in_order` says that the tensor has a `host_address`.

        Raises:
            ShardingError: `describe` cannot describe the tensor.
        """
        local, layout = describe(tensor, name, self.world)
        dtype = self._dtypes.get(record.dtype) or self.dtype_of(record)
        number = len(self.targets)
        self.targets.append(Target(tensor, local))
        is_direct = local.dtype == dtype and (is_in_order or is_plain(local))
        return LoadItem(name, record.name, number, layout, tuple(local.shape), is_direct)

    def dtype_of(self, record: TensorRecord) -> torch.dtype:
        dtype = self._dtypes.get(record.dtype)
        if dtype is None:
            dtype = self._dtypes[record.dtype] = torch_dtype(record.dtype.torch_name)
        return dtype

    def fill(self, name: str, record: TensorRecord, tensor: TensorLike) -> None:
        self.items.append(self.item(name, record, tensor))

    def differ(self, name: str, problem: DifferenceKind, detail: str) -> None:
        self.differences.append(Difference(name, problem, detail))

    def owns(self, *names: str) -> None:
        """Adds names of the target that patterns may match."""
        if not self.selection.is_all:
            self.own_names += names

    def selects(self, path: str) -> bool:
        """Whether the selection includes a saved name below a path, or any name that might be."""
        self.owns(path, join(path, ""))
        return self.chooses(path, join(path, ""))

    def chooses(self, path: str, otherwise: str | None = None) -> bool:
        """Whether the selection includes a saved name at or below a path.

        If the checkpoint has no such name: whether it includes `otherwise`, by default the path.
        """
        if self.selection.is_all:
            return True
        below = self.saved.under(path) or [path if otherwise is None else otherwise]
        return any(name in self.selection for name in below)

    def whole(
        self,
        tree: Tree,
        path: str,
        like: Callable[[str, TensorRecord], torch.Tensor] | None = None,
        is_one: bool = False,
    ) -> Installer:
        """Installs a saved nest with new tensors. `like` makes a tensor from its name and record.

        A dict lacks its unselected entries, and a list has None for them. If `is_one`, the value
        has one name and stays complete.
        """
        if isinstance(tree, TensorRef):
            record = self.saved.catalog.tensors[tree.name]
            tensor = like(path, record) if like is not None else whole_tensor(record)
            self.fill(path, record, tensor)
            return lambda: tensor
        if isinstance(tree, dict):
            every, before = is_one or self.selection.is_all, f"{path}." if path else ""
            items = {
                key: self.whole(v, f"{before}{key}", like, is_one)
                for key, v in tree.items()
                if every or self.chooses(f"{before}{key}")
            }
            return lambda: {key: step() for key, step in items.items()}
        if isinstance(tree, list | tuple):
            is_one = is_one or not holds_tensor(tree)  # as in `ckpt.state.saved.leaves`
            named = [(join(path, index), item) for index, item in enumerate(tree)]
            steps = [
                self.whole(v if is_one or self.chooses(at) else None, at, like, is_one)
                for at, v in named
            ]
            if isinstance(tree, tuple):
                return lambda: tuple(step() for step in steps)
            return lambda: [step() for step in steps]
        if isinstance(tree, OpaqueValue):
            self.differ(
                path,
                "structure",
                f"is {tree} in the checkpoint, an object that is never rebuilt; leave it out "
                "(exclude=), or load it with torch.load where its class is known",
            )
        value = restore_value(tree) if isinstance(tree, DType | TypedValue) else tree
        return lambda: value

    def anything(self, own: object, path: str) -> Installer:
        """Installs the saved value for an object that takes any value; keeps `own` without one."""
        if not self.selects(path):
            return lambda: own
        saved = self.saved.node(path)
        if isinstance(saved, Missing):
            self.differ(path, "missing", NOT_SAVED)
            return lambda: own
        self.used.update(self.saved.under(path))
        return self.whole(saved, path)


def whole_tensor(record: TensorRecord) -> torch.Tensor:
    """Allocates memory for a whole tensor of the checkpoint, with the strides that it had."""
    tensor = empty_for(record, record.shape)
    if record.strides is None or tensor.stride() == record.strides:
        return tensor
    return tensor.as_strided(record.shape, record.strides)  # packed in another order


def fill_mapping(node: MutableMapping[object, object], items: Mapping[Any, object]) -> object:
    """Sets items of a mapping and returns it. Sets each alone: a Counter's `update` adds values."""
    for key, item in items.items():
        node[key] = item
    return node


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
    known = [member.value for member in Casting]
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
    problem = f"the checkpoint has dtype {stored}, the target has {name}"
    if casting is None:
        return f"{problem}; pass dtype='target' to cast"
    target = BY_TORCH_NAME.get(name)
    if target is None or PACKED in (stored.name, target.name):
        return (
            f"{problem}; torch cannot cast one to the other: load into a tensor of dtype {stored}"
        )
    if casting is Casting.UNSAFE or keeps_values(stored, target):
        return None
    return (
        f"{problem}, and a cast may change values: load into a tensor of dtype {stored}, or pass "
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
    if stored == wanted or not all(kind.is_floating_point or kind.is_complex for kind in kinds):
        return False
    return torch.finfo(wanted).max < torch.finfo(stored).max
