"""Which tensor and value of a checkpoint goes where in a target, and what does not fit.

Walks the target the way `ckpt.flatten` walks a state. Touches nothing: what is to be read becomes
a `Want`, what is to be set a step of `Match.install`, what does not fit a `Difference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import Difference
from ckpt.memory import empty_for, torch_can_share, torch_dtype
from ckpt.saved import MISSING, Missing, Saved, holds_tensor, join
from ckpt.stateful import (
    ParameterNames,
    Stateful,
    clean_name,
    identity,
    module_entries,
    optimizer_entries,
    parameter_names,
    unwrapped,
)
from formats.catalog import TensorRecord, TensorRef, Tree
from formats.dtypes import DType
from formats.native.tree import ROOT
from sharding.dtensor import zeros_placed_like

EXTRA_STATE = "_extra_state"
"""The last part of the name under which a module keeps what `get_extra_state` returns."""

Step = Callable[[], object]
"""Installs a part of the target and returns what stands there now."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of the target's names to load."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]

    @classmethod
    def of(
        cls, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None
    ) -> Selection:
        """A selection from one pattern, several or none: none includes all and excludes nothing."""

        def patterns(given: str | Sequence[str] | None) -> tuple[str, ...]:
            return (given,) if isinstance(given, str) else tuple(given or ())

        return cls(("*",) if include is None else patterns(include), patterns(exclude))

    def __contains__(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.include) and not any(
            fnmatchcase(name, pattern) for pattern in self.exclude
        )

    @property
    def is_all(self) -> bool:
        """True when every name is in it."""
        return self.include == ("*",) and not self.exclude


@dataclass(frozen=True, slots=True)
class Want:
    """A tensor to fill from a record of the checkpoint."""

    name: str
    record: TensorRecord
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Match:
    """A target matched with a checkpoint."""

    wants: list[Want]
    differences: list[Difference]
    """All but the unexpected names."""
    unexpected: list[str]
    """The checkpoint's names that this rank's target does not have."""
    saved_names: list[str]
    """All of the checkpoint's names as the target knows them; the same on every rank."""
    install: Step
    """Sets values and calls `load_state_dict`s, once the wants are filled; returns the target."""


def match(saved: Saved, state: object, selection: Selection, cast: bool) -> Match:
    """Match a target with a checkpoint. `cast` allows another dtype."""
    matcher = _Matcher(saved, selection, cast, parameter_names(state))
    install = matcher.walk(state, "")
    matcher.forgive_ties()
    names = list(saved.leaves)
    unexpected = [name for name in names if name not in matcher.used and name in selection]
    return Match(matcher.wants, matcher.differences, unexpected, names, install)


class _Matcher:
    def __init__(
        self, saved: Saved, selection: Selection, cast: bool, parameters: ParameterNames
    ) -> None:
        self._saved = saved
        self._selection = selection
        self._cast = cast
        self._parameters = parameters
        self.wants: list[Want] = []
        self.differences: list[Difference] = []
        self.used: set[str] = set()
        self._filled: dict[object, str] = {}
        self._lacking: dict[str, object] = {}

    def walk(self, node: object, path: str) -> Step:
        """Match what the target has at a path."""
        if isinstance(node, torch.Tensor):
            self._tensor(node, path or ROOT)
            return lambda: node
        if isinstance(node, np.ndarray):
            return self._array(node, path)
        if isinstance(node, nn.Module):
            return self._module(node, path)
        if isinstance(node, Optimizer):
            return self._optimizer(node, path)
        if isinstance(node, Mapping) and node:
            return self._mapping(node, path)
        if isinstance(node, list | tuple) and _holds_target(node):
            return self._sequence(node, path)
        if isinstance(node, Stateful) and not isinstance(node, type | Mapping):
            return self._stateful(node, path)
        return self._value(node, path)

    def forgive_ties(self) -> None:
        """A name the checkpoint lacks does not matter when its tensor is filled by another."""
        for name, key in self._lacking.items():
            if key not in self._filled:
                self._differ(name, "missing", "is in the target and not in the checkpoint")

    def _tensor(self, tensor: torch.Tensor, name: str) -> None:
        if name not in self._selection:
            return
        key = identity(tensor)
        saved = self._saved.leaves.get(name, MISSING)
        if isinstance(saved, Missing):
            self._lacking[name] = key
            return
        self.used.add(name)
        if not isinstance(saved, TensorRef):
            self._differ(
                name, "structure", f"is {_shown(saved)} in the checkpoint, a tensor in the target"
            )
            return
        record = self._saved.catalog.tensors[saved.name]
        if record.shape != tuple(tensor.shape):
            self._differ(
                name,
                "shape",
                f"the checkpoint has shape {record.shape}, the target wants {tuple(tensor.shape)}; "
                "pass strict=False to skip it, or rename it with rename=",
            )
        elif not self._cast and record.dtype.torch_name != str(tensor.dtype).removeprefix("torch."):
            self._differ(
                name,
                "dtype",
                f"the checkpoint has {record.dtype}, the target wants "
                f"{str(tensor.dtype).removeprefix('torch.')}; pass dtype='target' to cast",
            )
        elif getattr(tensor, "is_meta", False):
            self._differ(
                name, "structure", "is on the meta device; call to_empty() on the module first"
            )
        elif self._filled.setdefault(key, name) == name:
            self.wants.append(Want(name, record, tensor))

    def _array(self, array: np.ndarray, path: str) -> Step:
        """An array that torch cannot share is filled by way of a copy, a read-only one replaced."""
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
        entries = module_entries(module)
        aliases_only = True
        steps: dict[str, Step] = {}
        for key, value in entries.items():
            if key.rpartition(".")[2] == EXTRA_STATE:
                steps[key] = self._anything(value, join(path, key))
            else:
                steps[key] = self.walk(value, join(path, key))
            aliases_only &= isinstance(value, torch.Tensor) and identity(value) in own
        if aliases_only and not _customised(module):
            return lambda: module  # what was filled are the parameters and buffers themselves
        original = {clean_name(key): key for key in unwrapped(module).state_dict()}

        def install() -> object:
            loaded = {original[key]: step() for key, step in steps.items()}
            unwrapped(module).load_state_dict(loaded, strict=False)
            return module

        return install

    def _mapping(self, node: Mapping[object, object], path: str) -> Step:
        steps = {key: self.walk(item, join(path, key)) for key, item in node.items()}

        def install() -> object:
            loaded = {key: step() for key, step in steps.items()}
            if isinstance(node, MutableMapping):
                node.update(loaded)
                return node
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
        if not any(name in self._selection for name in self._saved.under(path) or [path]):
            return lambda: node
        saved = self._saved.node(path)
        if isinstance(saved, Missing):
            if node != {}:
                self._differ(path, "missing", "is in the target and not in the checkpoint")
            return lambda: node
        self.used.update(self._saved.under(path))
        is_place = node is None or isinstance(node, dict)
        fits = is_place or isinstance(node, list | tuple) == isinstance(saved, list | tuple)
        if not fits or (not is_place and (holds_tensor(saved) or isinstance(saved, dict))):
            self._differ(
                path,
                "structure",
                f"is {_shown(saved)} in the checkpoint, a {type(node).__name__} in the target; put "
                "None there to take what was saved",
            )
            return lambda: node
        step = self._whole(saved, path)

        def install() -> object:
            loaded = step()
            if isinstance(node, dict) and isinstance(loaded, dict):
                node.update(loaded)
                return node
            if isinstance(node, list) and isinstance(loaded, list | tuple):
                node[:] = loaded
                return node
            return loaded

        return install

    def _selects(self, path: str) -> bool:
        """True when something below a name is to be loaded, if there is anything."""
        below = self._saved.under(path) or [join(path, "")]
        return any(name in self._selection for name in below)

    def _whole(
        self, tree: Tree, path: str, like: Callable[[str, TensorRecord], torch.Tensor] | None = None
    ) -> Step:
        """What was saved, with tensors of their own; `like` makes them from name and record."""
        if isinstance(tree, TensorRef):
            record = self._saved.catalog.tensors[tree.name]
            tensor = like(path, record) if like is not None else _whole_tensor(record)
            self.wants.append(Want(path, record, tensor))
            return lambda: tensor
        if isinstance(tree, dict):
            items = {key: self._whole(v, join(path, key), like) for key, v in tree.items()}
            return lambda: {key: step() for key, step in items.items()}
        if isinstance(tree, list | tuple):
            steps = [self._whole(v, join(path, i), like) for i, v in enumerate(tree)]
            if isinstance(tree, tuple):
                return lambda: tuple(step() for step in steps)
            return lambda: [step() for step in steps]
        if isinstance(tree, DType):
            dtype = torch_dtype(tree.torch_name)
            return lambda: dtype
        return lambda: tree

    def _stateful(self, node: Stateful, path: str) -> Step:
        """An object that gets whatever was saved for it, tensors whole."""
        nothing = object()
        step = self._anything(nothing, path)

        def install() -> object:
            loaded = step()
            if loaded is not nothing:
                node.load_state_dict(loaded)  # type: ignore[arg-type]
            return node

        return install

    def _anything(self, own: object, path: str) -> Step:
        """Whatever was saved there, for an object that knows what to do with it; else `own`."""
        if not self._selects(path):
            return lambda: own
        saved = self._saved.node(path)
        if isinstance(saved, Missing):
            self._differ(path, "missing", "is in the target and not in the checkpoint")
            return lambda: own
        self.used.update(self._saved.under(path))
        return self._whole(saved, path)

    def _optimizer(self, optimizer: Optimizer, path: str) -> Step:
        names = self._parameters.of(optimizer)
        if not self._selects(path):
            return lambda: optimizer
        groups = self._groups(optimizer, names, path)
        self.used.add(join(path, "state"))  # a leaf where no parameter has any
        held = optimizer_entries(optimizer, names, path)["state"]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = {
            index: self._parameter_state(name, parameter, held, path)
            for index, (name, parameter) in enumerate(zip(names, parameters, strict=True))
        }
        rest = {key: self._value(None, join(path, key)) for key in self._other_keys(path)}

        def install() -> object:
            state = {index: step() for index, step in states.items()}
            state = {index: entries for index, entries in state.items() if entries}
            optimizer.load_state_dict(
                {"state": state, "param_groups": groups, **{k: s() for k, s in rest.items()}}
            )
            _undo_casts(optimizer, parameters, state)
            return optimizer

        return install

    def _other_keys(self, path: str) -> list[str]:
        """What an optimizer saved beside its state and groups."""
        saved = self._saved.node(path)
        if not isinstance(saved, dict):
            return []
        return [
            str(key) for key in saved if str(key).partition(".")[0] not in ("state", "param_groups")
        ]

    def _groups(self, optimizer: Optimizer, names: list[str], path: str) -> list[dict[str, object]]:
        """The target's groups with the options that were saved for their parameters."""
        where = join(path, "param_groups")
        saved = self._saved.node(where)
        self.used.update(self._saved.under(where))
        index = 0
        groups: list[dict[str, object]] = []
        options: list[dict[object, Tree]] = []
        group_of: dict[str, int] = {}
        if isinstance(saved, list):
            for position, entry in enumerate(saved):
                if isinstance(entry, dict) and isinstance(entry.get("params"), list | tuple):
                    options.append({k: v for k, v in entry.items() if k != "params"})
                    for name in entry["params"]:  # type: ignore[union-attr]
                        group_of[self._renamed(str(name), path)] = position
        for position, group in enumerate(optimizer.param_groups):
            members = names[index : index + len(group["params"])]
            own = {k: v for k, v in group.items() if k != "params"}
            found = {group_of[name] for name in members if name in group_of}
            lacking = [name for name in members if name not in group_of]
            if lacking:
                self._differ(
                    f"{where}.{position}",
                    "missing",
                    f"{len(lacking)} of its {len(members)} parameters are in no group of the "
                    f"checkpoint, the first is {lacking[0]}",
                )
            elif len(found) > 1:
                self._differ(
                    f"{where}.{position}",
                    "structure",
                    f"its parameters are in the groups {sorted(found)} of the checkpoint; give the "
                    "optimizer the same groups",
                )
            elif found:
                entry_path = f"{where}.{next(iter(found))}"
                for key, value in options[next(iter(found))].items():
                    own[str(key)] = self._option(value, join(entry_path, key), own.get(str(key)))
            groups.append({**own, "params": list(range(index, index + len(members)))})
            index += len(members)
        return groups

    def _option(self, value: Tree, path: str, own: object) -> object:
        """A group's option; a tensor one is filled into a tensor of its own."""
        if isinstance(value, TensorRef):
            record = self._saved.catalog.tensors[value.name]
            tensor = _whole_tensor(record)
            if isinstance(own, torch.Tensor):
                tensor = tensor.to(own.device)
            self.wants.append(Want(path, record, tensor))
            return tensor
        return self._whole(value, path)()

    def _renamed(self, name: str, path: str) -> str:
        prefix = join(path, "state") + "."
        renamed = self._saved.rename(prefix + name)
        return renamed.removeprefix(prefix)

    def _parameter_state(self, name: str, parameter: torch.Tensor, held: object, path: str) -> Step:
        where = f"{path}.state.{name}" if path else f"state.{name}"
        mine = held.get(name, {}) if isinstance(held, dict) else {}
        below = self._saved.under(where)
        if below and not any(n in self._selection for n in below):
            return lambda: mine
        saved = self._saved.node(where)
        if isinstance(saved, Missing):
            return dict
        self.used.update(below)

        def like(entry: str, record: TensorRecord) -> torch.Tensor:
            key = entry[len(where) + 1 :]
            existing = mine.get(key) if isinstance(mine, dict) else None
            if (
                isinstance(existing, torch.Tensor)
                and tuple(existing.shape) == record.shape
                and str(existing.dtype) == f"torch.{record.dtype.torch_name}"
            ):
                return existing
            if record.shape == tuple(parameter.shape) and key != "step":
                return zeros_placed_like(parameter, torch_dtype(record.dtype.torch_name))
            return _whole_tensor(record)

        return self._whole(saved, where, like)

    def _differ(self, name: str, problem: str, detail: str) -> None:
        self.differences.append(Difference(name, problem, detail))


def _whole_tensor(record: TensorRecord) -> torch.Tensor:
    return empty_for(record, record.shape)


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    inner = unwrapped(module)
    return [*inner.parameters(), *inner.buffers()]


def _customised(module: nn.Module) -> bool:
    """True when loading does more than copying: somebody's hook, or an overridden method.

    The hooks of torch.distributed put shards where the state dict already found them.
    """
    return any(
        type(part).load_state_dict is not nn.Module.load_state_dict
        or not all(map(_is_torchs, part._load_state_dict_pre_hooks.values()))
        or not all(map(_is_torchs, part._load_state_dict_post_hooks.values()))
        for part in unwrapped(module).modules()
    )


def _is_torchs(hook: object) -> bool:
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith(("torch.distributed.", "sharding."))


def _holds_target(node: object) -> bool:
    """True for a sequence with something to fill in it; other sequences are values."""
    if isinstance(node, list | tuple):
        return any(_holds_target(item) for item in node)
    if isinstance(node, Mapping):
        return any(_holds_target(item) for item in node.values())
    return isinstance(node, torch.Tensor | np.ndarray | nn.Module | Stateful)


def _undo_casts(
    optimizer: Optimizer, parameters: list[torch.Tensor], state: Mapping[int, object]
) -> None:
    """Put back state that torch cast to the parameter's dtype: what is loaded is what was saved."""
    for index, entries in state.items():
        if isinstance(entries, dict):
            for key, value in entries.items():
                held = optimizer.state[parameters[index]].get(key)
                if (
                    isinstance(value, torch.Tensor)
                    and isinstance(held, torch.Tensor)
                    and held.dtype != value.dtype
                ):
                    optimizer.state[parameters[index]][key] = value.to(held.device)


def _shown(tree: Tree) -> str:
    if isinstance(tree, TensorRef):
        return "a tensor"
    if isinstance(tree, dict):
        return f"a dict of {len(tree)}" + (" with tensors" if holds_tensor(tree) else "")
    if isinstance(tree, list | tuple):
        return f"a {type(tree).__name__} of {len(tree)}"
    return repr(tree)[:80]
