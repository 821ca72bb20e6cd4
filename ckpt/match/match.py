"""Which tensor and value of a checkpoint goes where in a target, and what does not fit.

Walks the target the way `ckpt.state.flatten` walks a state. Touches nothing: what is to be read
becomes a `Want`, what is to be set a step of `Match.install`, what does not fit a `Difference`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.match.casting import Casting, dtype_problem
from ckpt.match.match_builder import Ledger, Match, Step, Want
from ckpt.match.match_optimizer import match_optimizer
from ckpt.match.match_stateful import filled, match_stateful
from ckpt.match.overlaps import shared_memory
from ckpt.match.selection import Selection, no_name
from ckpt.state.local_states import by_parameters
from ckpt.state.memory import torch_can_share
from ckpt.state.refusals import instead_of_array
from ckpt.state.saved import MISSING, Missing, Saved, holds_tensor, join, kind_of
from ckpt.state.stateful import (
    ParameterNames,
    Stateful,
    call_of,
    identity,
    module_entries,
    parameter_names,
    unwrapped,
)
from ckpt.state.tensor_kinds import check_mode, kind_problem, memory_problem
from ckpt.state.typed_values import is_plain_array, like_target
from formats.catalog import TensorRef
from formats.native.tree import ROOT
from sharding.describe.describing import (
    TensorLike,
    clean_name,
    load_rest,
    part_of,
    state_dict_names,
)
from sharding.describe.local_part import LocalPart
from sharding.describe.sharded_tensor import is_sharded

EXTRA_STATE = "_extra_state"
"""The last part of the name under which a module keeps what `get_extra_state` returns."""


def match(
    saved: Saved, state: object, selection: Selection, casting: Casting | None = None
) -> Match:
    """Match a target with a checkpoint. `casting` says which other dtypes are allowed."""
    check_mode()
    ledger = Ledger(saved, selection)
    matcher = _Matcher(ledger, casting, parameter_names(state))
    install = matcher.walk(state, "")
    matcher.forgive_ties()
    shared = shared_memory(ledger.wants, ledger.ties)
    ledger.differences += shared.refused
    for key, there in saved.idle_keys().items():
        ledger.differ("rename", "pattern", no_name(key, there))
    names = list(saved.leaves)
    unexpected = [name for name in names if name not in ledger.used and name in selection]
    return Match(
        ledger.wants,
        ledger.numbers,
        ledger.checks,
        ledger.differences,
        shared.groups,
        unexpected,
        names,
        ledger.own_names,
        selection.idle([*names, *ledger.own_names]),
        install,
    )


class _Matcher:
    def __init__(self, ledger: Ledger, casting: Casting | None, parameters: ParameterNames) -> None:
        self._ledger = ledger
        self._casting = casting
        self._parameters = parameters
        self._filled: dict[object, Want] = {}
        self._lacking: dict[str, object] = {}
        self._keep: list[object] = []
        """What `_filled` and `_lacking` have the identity of."""

    def walk(self, node: object, path: str) -> Step:
        """Match what the target has at a path."""
        if isinstance(node, torch.Tensor | LocalPart):
            self._tensor(node, path or ROOT)
            return lambda: node
        if isinstance(node, np.ndarray):
            return self._array(node, path)
        if isinstance(node, nn.Module):
            return self._module(node, path)
        if isinstance(node, Optimizer):
            return match_optimizer(self._ledger, node, self._parameters.of(node), path)
        if isinstance(node, Mapping) and node:
            return self._mapping(node, path)
        if isinstance(node, list | tuple) and _holds_target(node):
            return self._sequence(node, path)
        if isinstance(node, Stateful) and not isinstance(node, type | Mapping):
            return match_stateful(self._ledger, self._tensor, node, path)
        return self._value(node, path)

    def forgive_ties(self) -> None:
        """A name the checkpoint lacks does not matter when its tensor is filled by another."""
        for name, key in self._lacking.items():
            if key not in self._filled:
                self._ledger.differ(name, "missing", "is in the target and not in the checkpoint")

    def _tensor(self, given: TensorLike, name: str) -> None:
        self._ledger.owns(name)
        if name not in self._ledger.selection:
            return
        part = part_of(given) if isinstance(given, torch.Tensor) else given
        tensor = given if part is None else part
        self._keep.append(tensor)
        unfit = _unfit(given)
        key = id(tensor) if unfit else identity(tensor)
        saved = self._ledger.saved.leaves.get(name, MISSING)
        if isinstance(saved, Missing):
            self._lacking[name] = key
            return
        self._ledger.used.add(name)
        if not isinstance(saved, TensorRef):
            self._ledger.differ(
                name, "structure", f"is {kind_of(saved)} in the checkpoint, a tensor in the target"
            )
            return
        record = self._ledger.saved.catalog.tensors[saved.name]
        if record.shape != tuple(tensor.shape):
            self._ledger.differ(
                name,
                "shape",
                f"the checkpoint has shape {record.shape}, the target wants {tuple(tensor.shape)}; "
                "pass strict=False to skip it, or rename it with rename=",
            )
        elif (lossy := dtype_problem(record.dtype, tensor.dtype, self._casting)) is not None:
            self._ledger.differ(name, "dtype", lossy)
        elif unfit is not None:
            self._ledger.differ(name, "structure", unfit)
        else:
            want = Want(name, record, tensor)
            first = self._filled.setdefault(key, want)
            if first is want:
                self._ledger.wants.append(want)
            else:
                self._ledger.ties.append((first, want))

    def _array(self, array: np.ndarray, path: str) -> Step:
        """An array that torch cannot share is filled by way of a copy, a read-only one replaced."""
        if not is_plain_array(array):
            detail = f"cannot be filled; {instead_of_array(array)}"
            found = f"a numpy {type(array).__name__} of dtype {array.dtype}"
            self._ledger.differ(
                path or ROOT, "structure", f"the target has {found}, which {detail}"
            )
            return lambda: array
        if torch_can_share(array):
            self._tensor(torch.from_numpy(array), path or ROOT)
            return lambda: array
        copy = array.copy()
        self._tensor(torch.from_numpy(copy), path or ROOT)

        def install() -> object:
            if not array.flags.writeable:
                return copy
            array[...] = copy
            return array

        return install

    def _module(self, module: nn.Module, path: str) -> Step:
        own = {identity(t) for t in _tensors_of(module)}
        with call_of("state_dict", path):
            entries = module_entries(module)
        aliases_only = True
        steps: dict[str, Step] = {}
        for key, value in entries.items():
            if key.rpartition(".")[2] == EXTRA_STATE:
                steps[key] = self._ledger.anything(value, join(path, key))
            else:
                steps[key] = self.walk(value, join(path, key))
            is_tensor = isinstance(value, torch.Tensor) and identity(value) in own
            aliases_only &= is_tensor or isinstance(value, LocalPart)
        if aliases_only and not _customised(module):
            return lambda: module  # what was filled are the parameters and buffers themselves
        original = {clean_name(key): key for key in state_dict_names(unwrapped(module))}

        def install() -> object:
            loaded = {original.get(key, key): step() for key, step in steps.items()}
            with call_of("load_state_dict", path):
                load_rest(unwrapped(module), loaded)
            return module

        return install

    def _mapping(self, node: Mapping[object, object], path: str) -> Step:
        items = by_parameters(node)
        steps = {key: self.walk(item, join(path, key)) for key, item in items.items()}

        def install() -> object:
            loaded = {key: step() for key, step in steps.items()}
            if items is not node:
                return node  # its flat parameters have got what belongs to their parts
            if isinstance(node, MutableMapping):
                return filled(node, loaded)
            return loaded

        return install

    def _sequence(self, node: list[object] | tuple[object, ...], path: str) -> Step:
        steps = [self.walk(item, join(path, index)) for index, item in enumerate(node)]

        def install() -> object:
            loaded = [step() for step in steps]
            if isinstance(node, list):
                node[:] = loaded
                return node
            return type(node)(loaded) if type(node) is tuple else tuple(loaded)

        return install

    def _value(self, node: object, path: str) -> Step:
        """A plain value, or a place (None, an empty dict) for whatever was saved."""
        self._ledger.owns(path)
        if not any(
            name in self._ledger.selection for name in self._ledger.saved.under(path) or [path]
        ):
            return lambda: node
        saved = self._ledger.saved.node(path)
        if isinstance(saved, Missing):
            if node != {}:
                self._ledger.differ(path, "missing", "is in the target and not in the checkpoint")
            return lambda: node
        self._ledger.used.update(self._ledger.saved.under(path))
        is_place = node is None or isinstance(node, dict)
        fits = is_place or isinstance(node, list | tuple) == isinstance(saved, list | tuple)
        if not fits or (not is_place and (holds_tensor(saved) or isinstance(saved, dict))):
            self._ledger.differ(
                path,
                "structure",
                f"is {kind_of(saved)} in the checkpoint, a {type(node).__name__} in the target; "
                "put None there to take what was saved",
            )
            return lambda: node
        step = self._ledger.whole(saved, path)

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
    """Why nothing can be put into a tensor of the target; None if it can."""
    if isinstance(given, LocalPart):
        return memory_problem(given.local)
    if getattr(given, "is_meta", False):
        return "is on the meta device; call to_empty() on the module first"
    found = kind_problem(given)
    if found is None and not is_sharded(given):
        found = memory_problem(getattr(given, "_local_tensor", given))
    return found


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    inner = unwrapped(module)
    return [*inner.parameters(), *inner.buffers()]


def _customised(module: nn.Module) -> bool:
    """True when loading does more than copying: somebody's hook, or an overridden method.

    The hooks of torch.distributed and of our runtime put shards where the state dict already found
    them.
    """
    return any(
        type(part).load_state_dict is not nn.Module.load_state_dict
        or not all(map(_is_of_runtime, part._load_state_dict_pre_hooks.values()))
        or not all(map(_is_of_runtime, part._load_state_dict_post_hooks.values()))
        for part in unwrapped(module).modules()
    )


def _is_of_runtime(hook: object) -> bool:
    function = getattr(hook, "hook", hook)
    module = str(getattr(function, "__module__", ""))
    return module.startswith(("torch.distributed.", "sharding."))


def _holds_target(node: object) -> bool:
    """True for a sequence with something to fill in it; other sequences are values."""
    if isinstance(node, list | tuple):
        return any(_holds_target(item) for item in node)
    if isinstance(node, Mapping):
        return any(_holds_target(item) for item in node.values())
    return isinstance(node, torch.Tensor | np.ndarray | nn.Module | Stateful)
