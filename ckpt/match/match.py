"""Matches each tensor and value of a target with a checkpoint.

The walk goes through the target as `ckpt.state.flatten` goes through a state. It changes nothing. A
tensor becomes a `LoadItem`, a value becomes part of `Match.install`, and a mismatch becomes a
`Difference`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

import sharding
from ckpt.match.casting import Casting, dtype_problem
from ckpt.match.match_builder import NOT_SAVED, Installer, Match, MatchBuilder
from ckpt.match.match_optimizer import match_optimizer
from ckpt.match.match_per_rank import match_per_rank
from ckpt.match.match_positions import named_by_position
from ckpt.match.match_stateful import filled, match_stateful
from ckpt.match.overlaps import shared_memory
from ckpt.match.selection import Selection, no_name
from ckpt.plan.load_plan import LoadItem
from ckpt.state.local_states import by_parameters
from ckpt.state.memory import torch_can_share
from ckpt.state.per_rank import PerRank
from ckpt.state.refusals import instead_of_array
from ckpt.state.saved import MISSING, Missing, Saved, holds_tensor, kind_of
from ckpt.state.stateful import (
    ParameterNames,
    Stateful,
    call_of,
    identity,
    parameter_names,
)
from ckpt.state.tensor_kinds import check_mode, kind_problem, memory_problem
from ckpt.state.typed_values import is_plain_array, like_target
from formats.catalog import TensorRef, join
from formats.native.tree import ROOT
from sharding.describe.describing import (
    TensorLike,
    describe_module,
    load_rest,
    part_of,
    state_dict_keys,
)
from sharding.describe.local_part import LocalPart
from sharding.describe.sharded_tensor import is_sharded
from sharding.layout import Mesh

EXTRA_STATE = "_extra_state"
"""The last part of the name under which a module stores the result of `get_extra_state`."""


def match(
    saved: Saved,
    state: object,
    selection: Selection,
    world: Mesh,
    casting: Casting | None = None,
) -> Match:
    """Matches a target with a checkpoint. Changes neither and does not communicate.

    `world` has all ranks along one axis. `casting` allows other dtypes.

    Raises:
        ShardingError: a tensor of the target cannot be described.
        StateError: a module's or optimizer's own method failed.
    """
    check_mode()
    parameters = parameter_names(state)
    saved = named_by_position(saved, state, parameters)
    builder = MatchBuilder(saved, selection, world, casting is not None)
    matcher = _Matcher(builder, casting, parameters)
    install = matcher.walk(state, "")
    matcher.forgive_ties()
    shared = shared_memory(builder.items, builder.ties, builder.targets, matcher.copied)
    builder.differences += shared.refused
    for key, there in saved.idle_keys().items():
        builder.differ("rename", "pattern", no_name(key, there))
    names = list(saved.leaves)
    unexpected = [name for name in names if name not in builder.used and name in selection]
    return Match(
        builder.items,
        builder.targets,
        builder.preflight_scalars,
        builder.checks,
        builder.differences,
        shared.groups,
        unexpected,
        names,
        builder.own_names,
        selection.idle([*names, *builder.own_names]),
        install,
        matcher.installs,
    )


class _Matcher:
    def __init__(
        self, builder: MatchBuilder, casting: Casting | None, parameters: ParameterNames
    ) -> None:
        self._builder = builder
        self._casting = casting
        self._parameters = parameters
        self.copied: dict[int, np.ndarray] = {}
        """Arrays that torch cannot share, by the number of the target that is copied into each."""
        self._copies: dict[object, torch.Tensor] = {}
        """The copies by the views of the arrays: one array under two names is tied."""
        self._filled: dict[object, LoadItem] = {}
        self._lacking: dict[str, object] = {}
        self._keep: list[object] = []
        """The tensors of all keys of `_filled` and `_lacking`: a freed identity could be reused."""
        self.installs = False
        """Whether an installer of a walked node changes anything."""

    def walk(self, node: object, path: str) -> Installer:
        """Matches one node of the target, at a path."""
        if isinstance(node, torch.Tensor | LocalPart):
            self._tensor(node, path or ROOT)
            return lambda: node
        if isinstance(node, np.ndarray):
            return self._array(node, path)
        if isinstance(node, nn.Module):
            return self._module(node, path)
        if isinstance(node, list | tuple) and _holds_target(node):
            return self._sequence(node, path)
        if type(node) is dict and node:
            return self._mapping(node, path)
        self.installs = True
        if isinstance(node, Optimizer):
            return match_optimizer(self._builder, node, self._parameters.of(node), path)
        if isinstance(node, Mapping) and node:
            return self._mapping(node, path)
        if isinstance(node, PerRank):
            return match_per_rank(self._builder, node, path)
        if isinstance(node, Stateful) and not isinstance(node, type | Mapping):
            return match_stateful(self._builder, self._tensor, node, path)
        return self._value(node, path)

    def forgive_ties(self) -> None:
        """Adds a difference for each missing name, unless another name fills the same tensor."""
        for name, key in self._lacking.items():
            if key not in self._filled:
                self._builder.differ(name, "missing", NOT_SAVED)

    def _tensor(self, given: TensorLike, name: str) -> None:
        self._builder.owns(name)
        if name not in self._builder.selection:
            return
        part = part_of(given) if isinstance(given, torch.Tensor) else given
        tensor = given if part is None else part
        self._keep.append(tensor)
        unfit = _unfit(given)
        key = id(tensor) if unfit else identity(tensor)
        saved = self._builder.saved.leaves.get(name, MISSING)
        if isinstance(saved, Missing):
            self._lacking[name] = key
            return
        self._builder.used.add(name)
        if not isinstance(saved, TensorRef):
            self._builder.differ(
                name, "structure", f"is {kind_of(saved)} in the checkpoint, a tensor in the target"
            )
            return
        record = self._builder.saved.catalog.tensors[saved.name]
        if record.shape != tuple(tensor.shape):
            self._builder.differ(
                name,
                "shape",
                f"the checkpoint has shape {record.shape}, the target has {tuple(tensor.shape)}",
            )
        elif (lossy := dtype_problem(record.dtype, tensor.dtype, self._casting)) is not None:
            self._builder.differ(name, "dtype", lossy)
        elif unfit is not None:
            self._builder.differ(name, "structure", unfit)
        else:
            item = self._builder.item(name, record, tensor)
            first = self._filled.setdefault(key, item)
            if first is item:
                self._builder.items.append(item)
            else:
                self._builder.ties.append((first, item))

    def _array(self, array: np.ndarray, path: str) -> Installer:
        """Fills an array in place, or through a copy if torch cannot share its memory.

        A read-only array is replaced by the copy.
        """
        if not is_plain_array(array):
            detail = f"cannot be filled; {instead_of_array(array)}"
            found = f"a numpy {type(array).__name__} of dtype {array.dtype}"
            self._builder.differ(
                path or ROOT, "structure", f"the target has {found}, which {detail}"
            )
            return lambda: array
        if torch_can_share(array):
            self._tensor(torch.from_numpy(array), path or ROOT)
            return lambda: array
        self.installs = True
        is_frozen = not array.flags.writeable
        place = path if is_frozen else array.ctypes.data
        view = (place, array.shape, array.strides, array.dtype)
        copy = self._copies.setdefault(view, torch.from_numpy(array.copy()))
        self._tensor(copy, path or ROOT)
        item = self._filled.get(identity(copy))
        if item is None:
            return lambda: array
        if is_frozen:
            return copy.numpy
        self.copied[item.target] = array

        def install() -> object:
            array[...] = copy.numpy()
            return array

        return install

    def _module(self, module: nn.Module, path: str) -> Installer:
        own = {identity(t) for t in _tensors_of(module)}
        with call_of("state_dict", path):
            entries = describe_module(module)
        if self._builder.saved.leaves.get(path) == {}:
            self._builder.used.add(path)  # of a module without entries
        aliases_only = True
        steps: dict[str, Installer] = {}
        for key, value in entries.items():
            if key.rpartition(".")[2] == EXTRA_STATE:
                steps[key] = self._builder.anything(value, join(path, key))
            else:
                steps[key] = self.walk(value, join(path, key))
            is_tensor = isinstance(value, torch.Tensor) and identity(value) in own
            aliases_only &= is_tensor or isinstance(value, LocalPart)
        # the reads fill the parameters and buffers themselves
        if (aliases_only and not _customised(module)) or not self._builder.chooses(path):
            return lambda: module
        self.installs = True
        original = state_dict_keys(module)

        def install() -> object:
            loaded = {original.get(key, key): step() for key, step in steps.items()}
            with call_of("load_state_dict", path):
                load_rest(module, loaded)
            return module

        return install

    def _mapping(self, node: Mapping[object, object], path: str) -> Installer:
        items = by_parameters(node)
        steps = {key: self.walk(item, join(path, key)) for key, item in items.items()}

        def install() -> object:
            loaded = {key: step() for key, step in steps.items()}
            if items is not node:
                return node  # the reads have filled its flat parameters
            if isinstance(node, MutableMapping):
                return filled(node, loaded)
            return loaded

        return install

    def _sequence(self, node: list[object] | tuple[object, ...], path: str) -> Installer:
        saved = self._builder.saved.node(path)
        if isinstance(saved, list | tuple) and not holds_tensor(saved) and len(saved) == len(node):
            # The list is one leaf of the checkpoint, and its items are matched one by one.
            self._builder.used.add(path)
            self._builder.saved.name_items(path, saved)
        steps = [self.walk(item, join(path, index)) for index, item in enumerate(node)]

        def install() -> object:
            loaded = [step() for step in steps]
            if isinstance(node, list):
                node[:] = loaded
                return node
            return tuple(loaded)

        return install

    def _value(self, node: object, path: str) -> Installer:
        """Matches a plain value, or a placeholder (None, an empty dict) that takes any value."""
        self._builder.owns(path)
        if not any(
            name in self._builder.selection for name in self._builder.saved.under(path) or [path]
        ):
            return lambda: node
        saved = self._builder.saved.node(path)
        if isinstance(saved, Missing):
            if node != {}:
                self._builder.differ(path, "missing", NOT_SAVED)
            return lambda: node
        self._builder.used.update(self._builder.saved.under(path))
        takes_any = node is None or isinstance(node, dict)
        fits = takes_any or isinstance(node, list | tuple) == isinstance(saved, list | tuple)
        if not fits or (not takes_any and (holds_tensor(saved) or isinstance(saved, dict))):
            self._builder.differ(
                path,
                "structure",
                f"is {kind_of(saved)} in the checkpoint, a {type(node).__name__} in the target; "
                "put None there to load the saved value",
            )
            return lambda: node
        step = self._builder.whole(saved, path)

        def install() -> object:
            loaded = step()
            if isinstance(node, dict) and isinstance(loaded, dict):
                return filled(node, loaded)
            if isinstance(node, list) and isinstance(loaded, list | tuple):
                node[:] = loaded
                return node
            return like_target(node, loaded)

        return install


def _unfit(given: TensorLike) -> str | None:
    """Returns why a load cannot fill a tensor of the target; None if it can."""
    if isinstance(given, LocalPart):
        return memory_problem(given.local)
    if getattr(given, "is_meta", False):
        return (
            "is on the meta device; call to_empty() on the module first, and then make its buffers "
            "with persistent=False again: no checkpoint has them"
        )
    found = kind_problem(given)
    if found is None and not is_sharded(given):
        found = memory_problem(getattr(given, "_local_tensor", given))
    return found


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _customised(module: nn.Module) -> bool:
    """Whether loading does more than copy: a user's hook or an overridden method runs.

    The hooks of torch.distributed and of our runtime do not count. They put shards into the
    parameters that the state dict already refers to.
    """
    return any(
        type(part).load_state_dict is not nn.Module.load_state_dict
        or not all(map(_is_of_runtime, part._load_state_dict_pre_hooks.values()))
        or not all(map(_is_of_runtime, part._load_state_dict_post_hooks.values()))
        for part in module.modules()
    )


def _is_of_runtime(hook: object) -> bool:
    function = getattr(hook, "hook", hook)
    module = str(getattr(function, "__module__", ""))
    return module.startswith(("torch.distributed.", f"{sharding.__name__}."))


def _holds_target(node: object) -> bool:
    """Whether a sequence contains a tensor, array, module or stateful object to fill."""
    if isinstance(node, list | tuple):
        return any(_holds_target(item) for item in node)
    if isinstance(node, Mapping):
        return any(_holds_target(item) for item in node.values())
    return isinstance(node, torch.Tensor | np.ndarray | nn.Module | Stateful)
