"""Flattens a state: every tensor under a name with its layout, and the plain values in their nest.

No function communicates. A value that cannot be stored raises an error with its key path, before
any other step of the save.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import StateError
from ckpt.state.memory import (
    ORDINARY,
    address_of,
    check_mode,
    kind_problem,
    memory_problem,
    torch_can_share,
    wait_for,
)
from ckpt.state.saved import holds_tensor
from ckpt.state.stateful import (
    MAX_DEPTH,
    ParameterNames,
    Stateful,
    by_parameters,
    call_of,
    check_whole,
    format_path,
    has_address,
    identity,
    is_packed,
    optimizer_entries,
    pack_state,
    parameter_names,
)
from ckpt.state.typed_values import (
    OF_TYPE,
    Kind,
    instead_of,
    instead_of_array,
    instead_of_key,
    is_number,
    is_plain_array,
    make_typed,
)
from formats.catalog import Key, TensorRef, Tree, TypedValue, join, versions_in
from formats.dtypes import DType, dtype_of_torch
from formats.errors import UnsupportedError
from formats.limits import current
from formats.native.shard import OWN_ENTRIES
from formats.native.tree import ROOT
from formats.safetensors.file import METADATA_KEY
from sharding.describe.describing import TensorLike, describe, describe_module, part_of
from sharding.describe.dtensor import describe_known, get_replicated
from sharding.describe.members import LocalPart
from sharding.layout import Layout, Mesh, is_dense

MAX_INTEGER_BITS = 8192
"""Larger integers have more digits than Python reads back from text."""
PLAIN = frozenset((NoneType, bool, float, str, bytes, complex))
"""Types whose values stand for themselves."""
KEYS = (str, bool, float, NoneType)
"""Types of keys, and of parts of a tuple, that stand for themselves; a subclass may have another
text."""
DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
"""Types that are stored as a dict; a MultiStepLR keeps its milestones in a Counter."""
SPREAD = (torch.Tensor, LocalPart)
_DTYPES: dict[torch.dtype, DType] = {}
RESERVED = (*OWN_ENTRIES, METADATA_KEY)
"""Names that shard files need for their own entries."""


class Leaf(NamedTuple):
    """One tensor of a state on this rank."""

    name: str
    dtype: DType
    local: torch.Tensor
    layout: Layout
    given: TensorLike
    """The tensor itself, as the state has it."""


@dataclass(frozen=True, slots=True)
class FlatState:
    """A whole state on this rank."""

    leaves: dict[str, Leaf]
    """The tensors by name, in the state's order; tied tensors once, under their first name."""
    aliases: dict[str, str]
    tree: Tree
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The strides of whole tensors that are packed in another order than row-major."""
    optimizers: Mapping[str, str | None] = field(default_factory=dict)
    """The key path of each optimizer, and the module of its parameters' names (`Catalog`)."""
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The versions of the state dicts of modules, by their key paths (`Catalog`)."""


def flatten(state: object, world: Mesh) -> FlatState:
    """Returns the names, tensors, layouts and values of a state.

    Raises StateError with the key path of a value that cannot be stored, or of two entries with the
    same name.
    """
    check_mode()
    names = parameter_names(state)
    flat = _Flattener(world, names).run(state)
    if flat is None:
        walk = _Flattener(world, names, {})  # its error has the paths
        flat = walk.run(state)
        if flat is None:
            [(twice, _)] = Counter(walk.names).most_common(1)
            raise StateError(f"two entries of the state have the name {twice!r}; rename a key")
    return flat


class _Flattener:
    def __init__(
        self,
        world: Mesh,
        parameters: ParameterNames,
        paths: dict[str, tuple[object, ...]] | None = None,
    ) -> None:
        """With `paths`, of tensors by name, each name is checked as soon as it is found."""
        self._world = world
        self._parameters = parameters
        self._paths = paths
        self._name_chars = current().name_chars
        self.names: list[str] = []
        """The names of all leaves, as `ckpt.state.saved.leaves` yields them."""
        self._leaves: dict[str, Leaf] = {}
        self._aliases: dict[str, str] = {}
        self._at: dict[int, str] = {}
        """The first name of the tensor at each address."""
        self._seen: dict[object, str] = {}
        """The first name of each tensor, by its `identity`."""
        self._strides: dict[str, tuple[int, ...]] = {}
        self._optimizers: dict[str, str | None] = {}
        self._versions: dict[str, Mapping[str, int]] = {}
        self._keep: list[object] = []
        self._tensors = 0
        """The number of leaves that are tensors."""

    def run(self, state: object) -> FlatState | None:
        """Returns the flat state; None if two entries have one name, or a name is not allowed."""
        tree = self._walk(state, (), "")
        if len(set(self.names)) != len(self.names):
            return None
        leaves, aliases, strides = self._leaves, self._aliases, self._strides
        if self._paths is None and not _are_names((*leaves, *aliases), self._name_chars):
            return None
        return FlatState(leaves, aliases, tree, strides, self._optimizers, self._versions)

    def _walk(self, node: object, path: tuple[object, ...], name: str) -> Tree:
        kind = type(node)
        if kind in ORDINARY:
            return self._ordinary(node, path, name or ROOT)  # type: ignore[arg-type]
        if kind in PLAIN:
            self.names.append(name)
            return node  # type: ignore[return-value]
        if isinstance(node, SPREAD):
            return self._tensor(node, path, name or ROOT)
        if len(path) > MAX_DEPTH:
            raise StateError(
                f"{format_path(path[:8])}...: nests deeper than {MAX_DEPTH} levels; does it "
                "hold itself?"
            )
        if kind is int:
            self.names.append(name)
            return _integer(node, path)  # type: ignore[arg-type]
        if kind in DICTS and isinstance(node, Mapping):
            if kind is OrderedDict:
                self._note_versions(node, name)
            return self._dict(node, path, name)
        if kind is list or kind is tuple or kind is torch.Size:
            return self._items(node, path, name)  # type: ignore[arg-type]
        if isinstance(node, nn.Module):
            with call_of("state_dict", format_path(path)):
                entries = describe_module(node)
            self._note_versions(entries, name)
            return self._dict(entries, path, name)
        if isinstance(node, Optimizer):
            return self._optimizer(node, path, name)
        if isinstance(node, np.ndarray):
            return self._tensor(self._from_numpy(node, path), path, name or ROOT)
        if is_number(node):
            return self._walk(node.item(), path, name)
        if kind in OF_TYPE:
            return self._walk_typed(OF_TYPE[kind], node, path, name)
        if isinstance(node, np.str_ | np.bytes_ | torch.dtype):
            self.names.append(name)
            # numpy's `item()` drops the end of a text as padding
            return _dtype_of(node, path) if isinstance(node, torch.dtype) else node[:]
        if _is_object(node):
            with call_of("state_dict", format_path(path)):
                own = node.state_dict()
            if _is_object(own):
                raise StateError(
                    f"{format_path(path)}: state_dict() of a {kind.__qualname__} returns a "
                    f"{type(own).__qualname__}, which has a state_dict() itself, not a dict"
                )
            self._keep.append(own)  # no other tensor gets these addresses until the end
            return self._walk(own, path, name)
        raise StateError(
            f"{format_path(path)}: a {kind.__module__}.{kind.__qualname__} cannot be stored; "
            f"{instead_of(node)}"
        )

    def _note_versions(self, state: object, name: str) -> None:
        versions = versions_in(getattr(state, "_metadata", None))
        if versions is not None:
            self._versions[name] = versions

    def _optimizer(self, node: Optimizer, path: tuple[object, ...], name: str) -> Tree:
        packed = pack_state(node, format_path(path))
        if not is_packed(packed):
            check_whole(node, format_path(path))
            self._keep.append(packed)
            return self._walk(packed, path, name)
        named, module, _ = self._parameters.of(node)
        if named:
            self._optimizers[name] = module
        return self._dict(optimizer_entries(packed, named, format_path(path)), path, name)

    def _dict(
        self, node: Mapping[Any, object], path: tuple[object, ...], name: str
    ) -> dict[Any, Tree]:
        if not node:
            self.names.append(name)
        prefix = f"{name}." if name else ""
        walk, entries = self._walk, by_parameters(node)
        return {
            (key if type(key) is str and key else self._key(key, path, entries)): walk(
                item, (*path, key), f"{prefix}{key}"
            )
            for key, item in entries.items()
        }

    def _walk_typed(
        self, kind: Kind, node: object, path: tuple[object, ...], name: str
    ) -> TypedValue:
        children = enumerate(kind.parts(node))
        before = len(self.names)
        parts = [self._walk(part, (*path, at), name) for at, part in children]
        self.names[before:] = [name]
        if any(map(holds_tensor, parts)):
            raise StateError(
                f"{format_path(path)}: a {kind.name} with tensors in it cannot be stored; "
                "store list() "
                "of it"
            )
        return make_typed(kind, parts)

    def _items(self, node: Sequence[object], path: tuple[object, ...], name: str) -> Tree:
        names, tensors = len(self.names), self._tensors
        items = [
            self._walk(item, (*path, index), join(name, index)) for index, item in enumerate(node)
        ]
        if self._tensors == tensors:  # without tensors, the list is one leaf
            self.names[names:] = [name]
        return items if type(node) is list else tuple(items)

    def _ordinary(self, tensor: torch.Tensor, path: tuple[object, ...], name: str) -> TensorRef:
        """Describes a tensor of an ordinary type: `_tensor` in short, for nearly all tensors."""
        address, dtype = address_of(tensor), _DTYPES.get(tensor.dtype)
        if not address or dtype is None or self._paths is not None or part_of(tensor) is not None:
            return self._tensor(tensor, path, name)
        if self._at.setdefault(address, name) is not name:
            return self._tensor(tensor, path, name)
        self.names.append(name)
        self._tensors += 1
        local = tensor.detach() if tensor.requires_grad else tensor
        self._leaves[name] = Leaf(
            name, dtype, local, get_replicated(tensor.shape, self._world), tensor
        )
        return TensorRef(name)

    def _tensor(self, tensor: TensorLike, path: tuple[object, ...], name: str) -> TensorRef:
        self.names.append(name)
        self._tensors += 1
        if self._paths is not None:
            self._check_name(name, path, self._paths)
        before = None if type(tensor) in ORDINARY else describe_known(tensor)
        if before is not None and address_of(before[0]):
            local, layout = before
            first = self._seen.setdefault(id(tensor), name)
        else:
            local, layout, tensor = self._describe(tensor, path, name)
            first = self._first_name(tensor, name)
        dtype = _DTYPES.get(tensor.dtype) or _dtype_of(tensor.dtype, path)
        if first is name:
            self._leaves[name] = Leaf(name, dtype, local, layout, tensor)
            is_ordered = type(tensor) not in ORDINARY or local.is_contiguous()
            if not is_ordered and is_dense(local.shape, local.stride()):
                self._strides[name] = local.stride()
        else:
            self._aliases[name] = first
        return TensorRef(first)

    def _describe(
        self, target: TensorLike, path: tuple[object, ...], name: str
    ) -> tuple[torch.Tensor, Layout, TensorLike]:
        """Returns the local part of a tensor, its layout, and the tensor that was described."""
        tensor = target
        if isinstance(target, torch.Tensor):
            if type(target) is not torch.Tensor:
                target = wait_for(target)
                tensor = part_of(target) or target
            if (problem := kind_problem(target)) is not None:
                raise StateError(f"{format_path(path)}: {problem}")
        local, layout = describe(tensor, name, self._world)
        if (problem := memory_problem(local)) is not None:
            raise StateError(f"{format_path(path)}: {problem}")
        return local, layout, tensor

    def _first_name(self, tensor: TensorLike, name: str) -> str:
        """Returns the first name of this very tensor. All seen tensors are kept alive."""
        if has_address(tensor):
            # Most tensors are alone at their address, and need no other comparison.
            address = tensor.data_ptr()
            other = self._at.setdefault(address, name)
            if other is name:
                return name
            self._seen.setdefault(identity(self._leaves[other].given), other)
        return self._seen.setdefault(identity(tensor), name)

    def _check_name(
        self, name: str, path: tuple[object, ...], paths: dict[str, tuple[object, ...]]
    ) -> None:
        if name in RESERVED or not _is_text(name):
            raise StateError(
                f"{format_path(path)}: no tensor can have the name {name!r}; rename a key"
            )
        if len(name) > self._name_chars:
            raise StateError(
                f"{format_path(path[:8])}: the name has {len(name)} characters, and at most "
                f"{self._name_chars} can be read back; use shorter keys"
            )
        other = paths.setdefault(name, path)
        if other is not path and other != path:
            raise _same_name(other, path, name)

    def _key(self, key: object, path: tuple[object, ...], entries: Mapping[Any, object]) -> Key:
        if key == "" and not path:
            raise StateError("state['']: the name of a top entry cannot be empty; rename the key")
        for part in key if type(key) is tuple and key else (key,):
            if type(part) is int:
                _integer(part, path)
            elif type(part) not in KEYS:
                raise StateError(
                    f"{format_path(path)}: the key {key!r:.80} of type "
                    f"{type(key).__qualname__} cannot "
                    f"be stored; {instead_of_key(key)}"
                )
        if type(key) is not str and str(key) in entries:
            raise _same_name((*path, key), (*path, str(key)), str(key))
        return key  # type: ignore[return-value]

    def _from_numpy(self, array: np.ndarray, path: tuple[object, ...]) -> torch.Tensor:
        if not is_plain_array(array):
            raise StateError(
                f"{format_path(path)}: a numpy {type(array).__name__} of dtype "
                f"{array.dtype} cannot be "
                f"stored; {instead_of_array(array)}"
            )
        self._keep.append(array)
        try:
            return torch.from_numpy(array if torch_can_share(array) else array.copy())
        except TypeError as error:  # another package's dtype with the name of one of torch's
            raise StateError(f"{format_path(path)}: {error}; store a tensor of it") from error


def _same_name(one: tuple[object, ...], other: tuple[object, ...], name: str) -> StateError:
    return StateError(
        f"the entries at {format_path(one)} and {format_path(other)} both have the name "
        f"{name!r}; rename a key"
    )


def _is_object(node: object) -> TypeGuard[Stateful]:
    """Whether a value is saved by its own method, and is neither a module nor an optimizer."""
    return isinstance(node, Stateful) and not isinstance(node, type | nn.Module | Optimizer)


def _dtype_of(dtype: torch.dtype, path: tuple[object, ...]) -> DType:
    try:
        found = dtype_of_torch(str(dtype), format_path(path))
    except UnsupportedError as error:
        raise StateError(f"{error}; a tensor may be stored as view(torch.uint8)") from error
    _DTYPES[dtype] = found
    return found


def _integer(value: int, path: tuple[object, ...]) -> int:
    if value.bit_length() > MAX_INTEGER_BITS:
        raise StateError(
            f"{format_path(path)}: an integer of {value.bit_length()} bits cannot be stored: "
            f"the limit is {MAX_INTEGER_BITS} bits"
        )
    return value


def _are_names(names: Sequence[str], most_chars: int) -> bool:
    """Whether tensors can have these names."""
    is_short = max(map(len, names), default=0) <= most_chars
    return is_short and not {*RESERVED}.intersection(names) and _is_text("\n".join(names))


def _is_text(name: str) -> bool:
    """False for half a surrogate pair, which no file can hold."""
    try:
        return name.isascii() or bool(name.encode())
    except UnicodeEncodeError:
        return False
