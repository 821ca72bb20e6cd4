"""A state as names: every tensor with its layout, and the plain values in their nest.

Communicates nothing. What cannot be stored is an error that names its key path, before anything
else happens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ckpt.errors import StateError
from ckpt.states.local_states import by_parameters
from ckpt.states.memory import torch_can_share
from ckpt.states.saved import holds_tensor, join
from ckpt.states.stateful import (
    MAX_DEPTH,
    ParameterNames,
    Stateful,
    call_of,
    has_address,
    identity,
    module_entries,
    optimizer_entries,
    parameter_names,
)
from ckpt.states.subclass_state import is_composed
from formats.catalog import TensorRef, Tree
from formats.dtypes import BY_TORCH_NAME, DType, dtype_of_torch
from formats.errors import UnsupportedError
from formats.limits import current
from formats.native.shard import TABLE
from formats.native.tree import ROOT
from formats.safetensors_header import METADATA_KEY
from sharding.describe.describing import Spread, describe, part_of
from sharding.describe.local_part import LocalPart
from sharding.describe.sharded_tensor import is_sharded
from sharding.layout import Layout, Mesh

MAX_INTEGER_BITS = 8192
"""Larger integers have more digits than Python reads back from text."""
PLAIN = (NoneType, bool, float, str, bytes, complex)
"""Types whose values stand for themselves."""
DICTS = (dict, OrderedDict, defaultdict, Counter)
"""What is stored as a dict; a Counter is what a MultiStepLR keeps its milestones in."""
NESTS = (dict, list, tuple)
SPREAD = (torch.Tensor, LocalPart)
ORDINARY = (torch.Tensor, nn.Parameter)
"""Types with nothing to be asked of them but their memory."""
_DTYPES: dict[torch.dtype, DType] = {}
RESERVED = (TABLE, METADATA_KEY)
"""Names that shard files use themselves."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a state on this rank."""

    name: str
    dtype: DType
    local: torch.Tensor
    layout: Layout
    given: Spread
    """The tensor that is described, as the state has it."""


@dataclass(frozen=True, slots=True)
class FlatState:
    """A whole state on this rank."""

    leaves: dict[str, Leaf]
    """By name, in the state's order; tied tensors once, under their first name."""
    aliases: dict[str, str]
    tree: Tree


def flatten(state: object, world: Mesh) -> FlatState:
    """The names, tensors, layouts and values of a state.

    Raises StateError naming the key path of what cannot be stored, and of two entries whose names
    are the same.
    """
    return _Flattener(world, parameter_names(state)).run(state)


class _Flattener:
    def __init__(self, world: Mesh, names: ParameterNames) -> None:
        self._world = world
        self._parameters = names
        self._leaves: dict[str, Leaf] = {}
        self._aliases: dict[str, str] = {}
        self._paths: dict[str, tuple[object, ...]] = {}
        self._seen: dict[object, str] = {}
        self._at: dict[int, str] = {}
        self._keep: list[object] = []

    def run(self, state: object) -> FlatState:
        tree = self._walk(state, (), "")
        names: list[str] = []
        _collect_names(tree, "", names)
        if len(set(names)) != len(names):
            [(twice, _)] = Counter(names).most_common(1)
            raise StateError(f"two entries of the state have the name {twice!r}; rename a key")
        return FlatState(self._leaves, self._aliases, tree)

    def _walk(self, node: object, path: tuple[object, ...], name: str) -> Tree:
        kind = type(node)
        if kind in PLAIN:
            return node  # type: ignore[return-value]
        if len(path) > MAX_DEPTH:
            raise StateError(f"{_shown(path[:8])}...: nests deeper than {MAX_DEPTH}: a cycle?")
        if isinstance(node, SPREAD):
            return self._tensor(node, path, name)
        if kind is int:
            return _integer(node, path)  # type: ignore[arg-type]
        if kind in DICTS and isinstance(node, Mapping):
            return {
                (key if type(key) is str and key else self._key(key, path)): self._walk(
                    item, (*path, key), f"{name}.{key}" if name else str(key)
                )
                for key, item in by_parameters(node).items()
            }
        if kind is list or kind is tuple or kind is torch.Size:
            return self._items(node, path, name)  # type: ignore[arg-type]
        if isinstance(node, nn.Module):
            with call_of("state_dict", _shown(path)):
                entries = module_entries(node)
            return self._walk(entries, path, name)
        if isinstance(node, Optimizer):
            entries = optimizer_entries(node, self._parameters.of(node), _shown(path))
            return self._walk(entries, path, name)
        if isinstance(node, np.ndarray):
            return self._tensor(self._from_numpy(node, path), path, name)
        if isinstance(node, np.generic) and not isinstance(node.item(), np.generic):
            return self._walk(node.item(), path, name)
        if isinstance(node, torch.dtype):
            return dtype_of_torch(str(node), _shown(path))
        if isinstance(node, Stateful) and not isinstance(node, type):
            with call_of("state_dict", _shown(path)):
                entries = node.state_dict()
            self._keep.append(entries)  # its tensors' addresses are ours until the end
            return self._walk(entries, path, name)
        raise StateError(
            f"{_shown(path)}: a {type(node).__module__}.{type(node).__qualname__} cannot be "
            "stored; a state holds tensors, numbers, strings, bytes, None, dicts, lists, tuples, "
            "and objects with state_dict() and load_state_dict()"
        )

    def _items(self, node: Sequence[object], path: tuple[object, ...], name: str) -> Tree:
        items = [
            self._walk(item, (*path, index), join(name, index)) for index, item in enumerate(node)
        ]
        return items if type(node) is list else tuple(items)

    def _tensor(self, given: Spread, path: tuple[object, ...], found: str) -> TensorRef:
        name = found or ROOT
        self._claim(name, path)
        kind, tensor = type(given), given
        if isinstance(given, torch.Tensor):
            if kind not in ORDINARY or not _is_dense(given):
                _check_storable(given, path)
            if kind is not torch.Tensor:
                tensor = part_of(given) or given
        dtype = _DTYPES.get(given.dtype) or _dtype_of(given, path)
        local, layout = describe(tensor, name, self._world)
        if local.is_meta:
            raise StateError(f"{_shown(path)}: a tensor on the meta device has no data to store")
        first = self._first_name(tensor, name)
        if first != name:
            self._aliases[name] = first
            return TensorRef(first)
        self._leaves[name] = Leaf(name, dtype, local, layout, tensor)
        return TensorRef(name)

    def _first_name(self, tensor: Spread, name: str) -> str:
        """The name under which this very tensor came first. Those seen are kept alive."""
        if has_address(tensor):
            # Most are alone at their address, and nothing else of them needs to be compared.
            other = self._at.setdefault(tensor.data_ptr(), name)
            if other is name:
                return name
            self._seen.setdefault(identity(self._leaves[other].given), other)
        return self._seen.setdefault(identity(tensor), name)

    def _claim(self, name: str, path: tuple[object, ...]) -> None:
        if name in RESERVED or not (name.isascii() or _is_text(name)):
            raise StateError(f"{_shown(path)}: no tensor can have the name {name!r}; rename a key")
        if len(name) > current().name_chars:
            raise StateError(
                f"{_shown(path[:8])}: a name of {len(name)} characters, {current().name_chars} can "
                "be read back; use shorter keys"
            )
        other = self._paths.setdefault(name, path)
        if other is not path and other != path:
            raise StateError(
                f"the entries at {_shown(other)} and {_shown(path)} both have the name {name!r}; "
                "rename a key"
            )

    def _key(self, key: object, path: tuple[object, ...]) -> str | int | float | bool | None:
        if isinstance(key, int):
            return _integer(key, path)
        if key == "" and not path:
            raise StateError("state['']: the name of a top entry cannot be empty; rename the key")
        if key is None or isinstance(key, str | float):
            return key
        raise StateError(
            f"{_shown(path)}: a key of type {type(key).__qualname__} cannot be stored; keys are "
            "strings, numbers or None"
        )

    def _from_numpy(self, array: np.ndarray, path: tuple[object, ...]) -> torch.Tensor:
        if str(array.dtype) not in BY_TORCH_NAME:
            raise StateError(
                f"{_shown(path)}: a numpy array of dtype {array.dtype} cannot be stored"
            )
        self._keep.append(array)
        return torch.from_numpy(array if torch_can_share(array) else array.copy())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether an ordinary tensor is neither sparse, nested nor quantized."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _dtype_of(given: Spread, path: tuple[object, ...]) -> DType:
    try:
        found = dtype_of_torch(str(given.dtype), _shown(path))
    except UnsupportedError as error:
        raise StateError(str(error)) from error
    _DTYPES[given.dtype] = found
    return found


def _collect_names(tree: Tree, path: str, names: list[str]) -> None:
    """The names of all leaves, as `ckpt.states.saved.leaves` has them."""
    if isinstance(tree, dict) and tree:
        for key, item in tree.items():
            name = f"{path}.{key}" if path else str(key)
            if type(item) in NESTS:
                _collect_names(item, name, names)
            else:
                names.append(name)
    elif isinstance(tree, list | tuple) and holds_tensor(tree):
        for index, item in enumerate(tree):
            _collect_names(item, join(path, index), names)
    else:
        names.append(path or (ROOT if isinstance(tree, TensorRef) else ""))


def _check_storable(tensor: torch.Tensor, path: tuple[object, ...]) -> None:
    """Raise StateError for a kind of tensor that no checkpoint holds."""
    if is_lazy(tensor):
        raise StateError(f"{_shown(path)}: a lazy module has no values yet; run it once")
    if is_sharded(tensor):
        return
    if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
        kinds = {tensor.is_nested: "nested", tensor.is_quantized: "quantized"}
        kind = kinds.get(True, tensor.layout)
        raise StateError(f"{_shown(path)}: a {kind} tensor cannot be stored: densify it")
    if is_composed(tensor) or is_composed(getattr(tensor, "_local_tensor", None)):
        raise StateError(
            f"{_shown(path)}: a {type(tensor).__qualname__} is made of other tensors, and such are "
            "stored only as an optimizer's state of a parameter that is not divided: store those"
        )


def _integer(value: int, path: tuple[object, ...]) -> int:
    if value.bit_length() > MAX_INTEGER_BITS:
        raise StateError(
            f"{_shown(path)}: an integer of {value.bit_length()} bits cannot be stored: "
            f"{MAX_INTEGER_BITS} are the limit"
        )
    return value


def _is_text(name: str) -> bool:
    """False for half a surrogate pair, which no file can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(path: tuple[object, ...]) -> str:
    """A key path the way a user would write it: `state["optim"][0]`."""
    return "state" + "".join(f"[{key!r}]" for key in path)
