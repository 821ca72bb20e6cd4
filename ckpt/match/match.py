"""Matches each tensor and value of a target with a checkpoint.

The walk goes through the target as `ckpt.state.flatten` goes through a state. It changes nothing. A
tensor becomes a `LoadItem`, a value becomes part of `Match.install`, and a mismatch becomes a
`Difference`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from warnings import warn

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

import sharding
from ckpt.errors import Difference, DifferenceKind, MismatchError, make_skipped_warning
from ckpt.match.match_builder import (
    NOT_SAVED,
    Fit,
    Installer,
    Match,
    MatchBuilder,
    dtype_problem,
    fill_mapping,
)
from ckpt.match.match_optimizer import match_optimizer
from ckpt.match.match_positions import name_like_target
from ckpt.match.match_stateful import match_per_rank, match_stateful
from ckpt.match.overlaps import find_shared_memory
from ckpt.plan.load_plan import LoadItem
from ckpt.state.memory import (
    ORDINARY,
    check_mode,
    host_address,
    kind_problem,
    memory_problem,
    torch_can_share,
)
from ckpt.state.patterns import no_name
from ckpt.state.per_rank import PerRank
from ckpt.state.saved import MISSING, Missing, Saved, holds_tensor, kind_of
from ckpt.state.stateful import (
    OptimizerNames,
    ParameterNames,
    Stateful,
    by_parameters,
    call_of,
    identity,
    parameter_names,
)
from ckpt.state.typed_values import instead_of_array, is_plain_array, like_target
from formats.catalog import TensorRef, join, versions_in
from formats.native.tree import ROOT
from sharding.describe.describing import (
    TensorLike,
    describe_module,
    load_rest,
    part_of,
    state_dict_keys,
)
from sharding.describe.dtensor import is_sharded
from sharding.describe.members import LocalPart, NamedParameter
from sharding.describe.wrappers import CleanNames
from sharding.layout import Mesh

EXTRA_STATE = "_extra_state"
"""The last part of the name under which a module stores the result of `get_extra_state`."""
LEFT_OPEN = "is wanted by the module's load_state_dict() and was not given to it"
NOT_TAKEN = (
    "is in the module's own state_dict() or in the checkpoint, and its load_state_dict() does not "
    "take it"
)


def match(saved: Saved, state: object, fit: Fit, world: Mesh) -> Match:
    """Matches a target with a checkpoint. Changes neither and does not communicate.

    `world` has all ranks along one axis. `saved` has the names by `fit.rename`. If `fit.strict`,
    the result's `install` refuses names that a module's own `load_state_dict` misses or does not
    take; otherwise it warns.

    Raises:
        ShardingError: a tensor of the target cannot be described.
        StateError: a module's or optimizer's own method failed.
    """
    check_mode()
    parameters = parameter_names(state)
    saved = name_like_target(saved, state, parameters)
    selection = fit.selection
    builder = MatchBuilder(saved, selection, world, fit.casting is not None)
    matcher = _Matcher(builder, fit, parameters)
    install = matcher.walk(state, "")
    matcher.match_optimizers()
    matcher.forgive_ties()
    shared = find_shared_memory(builder.items, builder.ties, builder.targets, matcher.copied)
    builder.differences += shared.refused
    for key, saved_names in saved.idle_keys().items():
        builder.differ("rename", "pattern", no_name(key, saved_names))
    names = list(saved.leaves)
    unexpected = [name for name in names if name not in builder.used and name in selection]
    return Match(
        items=builder.items,
        targets=builder.targets,
        preflight_scalars=builder.preflight_scalars,
        checks=builder.checks,
        differences=builder.differences,
        shared=shared.groups,
        unexpected=unexpected,
        saved_names=names,
        own_names=builder.own_names,
        idle=selection.idle([*names, *builder.own_names]),
        install=install,
        installs=matcher.installs,
    )


class _Matcher:
    def __init__(self, builder: MatchBuilder, fit: Fit, parameters: ParameterNames) -> None:
        self._builder = builder
        self._fit = fit
        self._parameters = parameters
        self._optimizers: dict[str, Optimizer] = {}
        """The optimizers by path: they are matched last, as skipped weights skip their state."""
        self._steps: dict[str, Installer] = {}
        """The installers of the optimizers."""
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
            self._optimizers[path] = node
            return lambda: self._steps[path]()
        if isinstance(node, Mapping) and node:
            return self._mapping(node, path)
        if isinstance(node, PerRank):
            return match_per_rank(self._builder, node, path)
        if isinstance(node, Stateful) and not isinstance(node, type | Mapping):
            return match_stateful(self._builder, self._tensor, node, path)
        return self._value(node, path)

    def match_optimizers(self) -> None:
        for path, optimizer in self._optimizers.items():
            self._steps[path] = match_optimizer(
                self._builder, self._tensor, self._leave_out, optimizer, self._parameters, path
            )

    def _leave_out(self, names: OptimizerNames, path: str) -> None:
        """Leaves out the state of parameters whose weights do not fit, each with a difference.

        The saved moments of a weight of another shape have that shape, and those of another weight
        are of no use.
        """
        module = names.module
        if module is None:  # positions
            return
        every = [named for named in names.named if not _is_lazy(named.parameter)]
        before, state = f"{module}." if module else "", join(path, "state")
        for name, shape in chain.from_iterable(map(_shapes, every)):
            unfit = self._unfit_weight(before + name, shape)
            below = self._builder.saved.under(f"{state}.{name}") if unfit else []
            if unfit and below:
                self._builder.left_out.add(f"{state}.{name}")
                self._builder.used.update(below)
                for entry in below:
                    if entry in self._builder.selection:
                        self._builder.differ(entry, *unfit)

    def _unfit_weight(
        self, weight: str, shape: tuple[int, ...]
    ) -> tuple[DifferenceKind, str] | None:
        """Returns the difference of the state of a weight that is not loaded for it."""
        saved = self._builder.saved.leaves.get(weight)
        if isinstance(saved, TensorRef):
            record = self._builder.saved.catalog.tensors[saved.name]
            if record.shape != shape:
                there = f"has shape {record.shape} in the checkpoint and {shape} in the target"
                return "shape", f"is state of {weight}, which {there}"
        if weight in self._lacking and self._lacking[weight] not in self._filled:
            return "missing", f"is state of {weight}, which is not in the checkpoint"
        return None

    def forgive_ties(self) -> None:
        """Adds a difference for each missing name, unless another name fills the same tensor."""
        for name, key in self._lacking.items():
            if key not in self._filled:
                self._builder.differ(name, "missing", NOT_SAVED)

    def _tensor(self, target: TensorLike, name: str) -> None:
        builder = self._builder
        if not builder.selection.is_all:
            builder.owns(name)
            if name not in builder.selection:
                return
        part = part_of(target) if isinstance(target, torch.Tensor) else target
        tensor = target if part is None else part
        self._keep.append(tensor)
        address = host_address(tensor)  # nearly every tensor has one, and no problem
        unfit = None if address else _unfit(target)
        key = id(target) if unfit else identity(tensor, address)
        saved = builder.saved.leaves.get(name, MISSING)
        if isinstance(saved, Missing):
            self._lacking[name] = key
            return
        builder.used.add(name)
        if not isinstance(saved, TensorRef):
            builder.differ(
                name, "structure", f"is {kind_of(saved)} in the checkpoint, a tensor in the target"
            )
            return
        record = builder.saved.catalog.tensors[saved.name]
        if unfit is not None and (_is_lazy(target) or getattr(target, "is_nested", False)):
            builder.differ(name, "structure", unfit)  # it has no shape
        elif record.shape != tensor.shape:
            builder.differ(
                name,
                "shape",
                f"the checkpoint has shape {record.shape}, the target has {tuple(tensor.shape)}",
            )
        elif (lossy := dtype_problem(record.dtype, tensor.dtype, self._fit.casting)) is not None:
            builder.differ(name, "dtype", lossy)
        elif unfit is not None:
            builder.differ(name, "structure", unfit)
        else:
            item = builder.item(name, record, tensor, bool(address))
            first = self._filled.setdefault(key, item)
            if first is item:
                builder.items.append(item)
            else:
                builder.ties.append((first, item))

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
        with call_of("state_dict", path):
            entries: Mapping[str, object] = describe_module(module)
        versions = self._versions_at(path, versions_in(getattr(entries, "_metadata", None)))
        if versions is not None and any(isinstance(v, LocalPart) for v in entries.values()):
            self._builder.differ(
                path or ROOT,
                "structure",
                "is a state of other versions of its modules, which their own load_state_dict "
                "changes, and flat parameters are filled without it; load it before the module is "
                "wrapped",
            )
        is_customised = versions is not None or _is_customised(module)
        clean = CleanNames(module)
        loadable = entries if is_customised else self._loadable(module, clean, entries, path)
        resizing = set(_resizing(module, clean)) if is_customised else set()
        if self._builder.saved.leaves.get(path) == {}:
            self._builder.used.add(path)  # of a module without entries
        steps: dict[str, Installer] = {}
        before = f"{path}." if path else ""
        for key, value in loadable.items():
            if key.rpartition(".")[2] == EXTRA_STATE:
                steps[key] = self._builder.anything(value, before + key)
            elif isinstance(value, torch.Tensor) and (
                _is_lazy(value)
                or (resizing and key.removesuffix(key.rpartition(".")[2]) in resizing)
            ):
                if (step := self._match_resized(value, before + key)) is not None:
                    steps[key] = step
            else:
                steps[key] = self.walk(value, before + key)
        # the reads fill the parameters and buffers themselves
        is_filled = not is_customised and _are_aliases(loadable.values(), module)
        if is_filled or not self._builder.chooses(path):
            return lambda: module
        self.installs = True
        original = state_dict_keys(module)
        omitted = entries.keys() - steps.keys()

        def install() -> object:
            loaded = {original[key]: step() for key, step in steps.items() if key in original}
            with call_of("load_state_dict", path):
                missing, unexpected = load_rest(module, loaded, self._fit.strict, versions)
            if is_customised:
                names = {key: name for name, key in original.items()}
                missing_names = [
                    name for key in missing if (name := names.get(key, key)) not in omitted
                ]
                refused = [names.get(key, key) for key in unexpected]
                self._refuse(
                    [
                        *(Difference(join(path, n), "missing", LEFT_OPEN) for n in missing_names),
                        *(Difference(join(path, n), "unexpected", NOT_TAKEN) for n in refused),
                    ]
                )
            return module

        return install

    def _versions_at(self, path: str, own: Mapping[str, int] | None) -> Mapping[str, int] | None:
        """Returns the versions of a module's saved state; None where they are the module's `own`.

        Unknown versions count as the module's own, and so do those of names that were changed.
        """
        saved = self._builder.saved
        theirs = saved.catalog.versions.get(path)
        if own is None or theirs is None or theirs == own:
            return None
        if saved.before and any(saved.before.get(n, n) != n for n in saved.under(path)):
            return None
        others = (at for at in own.keys() | theirs.keys() if own.get(at, 1) != theirs.get(at, 1))
        return theirs if any(saved.under(join(path, at) if at else path) for at in others) else None

    def _refuse(self, found: list[Difference]) -> None:
        """Raises an error of differences that a module's `load_state_dict` found, or warns."""
        if found and self._fit.strict:
            raise MismatchError("the checkpoint", found)
        if found:
            warn(make_skipped_warning("the checkpoint", found), stacklevel=2)

    def _loadable(
        self, module: nn.Module, clean: CleanNames, entries: Mapping[str, object], path: str
    ) -> Mapping[str, object]:
        """Returns the entries that `load_state_dict` takes, by torch's rules.

        Adds a difference for each entry that none of the modules takes. An entry that
        `load_state_dict` wants and the module's own `state_dict` lacks is added, and must be in
        the checkpoint. A module with its own way of loading keeps its entries.
        """
        tensors = dict(_loaded_names(module, clean))
        loadable: dict[str, object] = {}
        for name, value in entries.items():
            if name in tensors or isinstance(value, LocalPart):
                loadable[name] = value
            else:
                self._differ_in_module(join(path, name), "unexpected", NOT_TAKEN)
        if any(isinstance(value, LocalPart) for value in loadable.values()):
            return loadable  # a flat parameter has other names
        for name, tensor in tensors.items():
            if name not in loadable:
                if tensor is not None and join(path, name) in self._builder.saved.leaves:
                    loadable[name] = tensor
                else:
                    self._differ_in_module(join(path, name), "missing", LEFT_OPEN)
        return loadable

    def _differ_in_module(self, name: str, problem: DifferenceKind, detail: str) -> None:
        self._builder.owns(name)
        self._builder.used.update(self._builder.saved.under(name))
        if self._builder.chooses(name):
            self._builder.differ(name, problem, detail)

    def _match_resized(self, tensor: torch.Tensor, name: str) -> Installer | None:
        """Matches a tensor that gets the saved shape in its module's `load_state_dict`.

        Returns None for a lazy tensor that is not loaded.
        """
        saved = self._builder.saved.leaves.get(name, MISSING)
        is_lazy = _is_lazy(tensor)
        if name not in self._builder.selection or not isinstance(saved, TensorRef):
            self._tensor(tensor, name)
            return None if is_lazy else lambda: tensor
        record = self._builder.saved.catalog.tensors[saved.name]
        if not is_lazy and tuple(tensor.shape) == record.shape:
            self._tensor(tensor, name)
            return lambda: tensor
        self._builder.owns(name)
        self._builder.used.add(name)
        if (lossy := dtype_problem(record.dtype, tensor.dtype, self._fit.casting)) is not None:
            self._builder.differ(name, "dtype", lossy)
            return None
        return self._builder.whole(saved, name)

    def _mapping(self, node: Mapping[object, object], path: str) -> Installer:
        items = by_parameters(node)
        before = f"{path}." if path else ""
        steps = {key: self.walk(item, f"{before}{key}") for key, item in items.items()}

        def install() -> object:
            loaded = {key: step() for key, step in steps.items()}
            if items is not node:
                return node  # the reads have filled its flat parameters
            if isinstance(node, MutableMapping):
                return fill_mapping(node, loaded)
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
                return fill_mapping(node, loaded)
            if isinstance(node, list) and isinstance(loaded, list | tuple):
                node[:] = loaded
                return node
            return like_target(node, loaded)

        return install


def _shapes(named: NamedParameter) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names of a parameter with the shapes of their weights."""
    shapes = [part.layout.shape for part in named.slices] or [tuple(named.parameter.shape)]
    return zip(named.names, shapes, strict=True)


def _unfit(tensor: TensorLike) -> str | None:
    """Returns why a load cannot fill a tensor of the target; None if it can."""
    if isinstance(tensor, LocalPart):
        return memory_problem(tensor.local)
    if getattr(tensor, "is_meta", False):
        return (
            "is on the meta device; call to_empty() on the module first, and then make its buffers "
            "with persistent=False again: no checkpoint has them"
        )
    found = kind_problem(tensor)
    if found is None and not is_sharded(tensor):
        found = memory_problem(getattr(tensor, "_local_tensor", tensor))
    return None if found is None else f"the target cannot be filled; {found}"


def _is_lazy(value: object) -> bool:
    """Whether a tensor has no shape before its module runs."""
    return type(value) not in ORDINARY and isinstance(
        value, UninitializedParameter | UninitializedBuffer
    )


def _is_customised(module: nn.Module) -> bool:
    """Whether loading does more than copy: a user's hook or an overridden method runs.

    The hooks of torch.distributed and of our runtime do not count. They put shards into the
    parameters that the state dict already refers to. Nor do the methods of torch's own layers:
    they add entries that old state dicts lack.
    """
    return any(
        type(part).load_state_dict is not nn.Module.load_state_dict
        or not is_of_torch(part._load_from_state_dict)
        or not all(map(_is_of_runtime, part._load_state_dict_pre_hooks.values()))
        or not all(map(_is_of_runtime, part._load_state_dict_post_hooks.values()))
        for part in module.modules()
    )


def is_of_torch(method: object) -> bool:
    """Whether a method of a module, or of its class, is that of torch's own layers."""
    function = getattr(method, "__func__", method)
    return str(getattr(function, "__module__", "")).startswith("torch.nn.modules.")


def _resizing(module: nn.Module, clean: CleanNames) -> Iterator[str]:
    """Yields the prefixes of torch's observers, whose loads give buffers the saved shape."""
    for path, part in module.named_modules(remove_duplicate=False):
        if str(type(part)._load_from_state_dict.__module__).startswith("torch.ao.quantization."):
            yield clean.prefix(path)


def _are_aliases(values: Iterable[object], module: nn.Module) -> bool:
    """Whether all values are parts, or have the memory of parameters and buffers of a module."""
    own = (*module.parameters(), *module.buffers())
    same = set(map(id, own))
    others = [v for v in values if id(v) not in same and not isinstance(v, LocalPart)]
    known = {identity(tensor) for tensor in own} if others else set()
    return all(isinstance(value, torch.Tensor) and identity(value) in known for value in others)


def _loaded_names(
    module: nn.Module, clean: CleanNames
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields the names that torch's `load_state_dict` wants; None for an extra state."""
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = clean.prefix(path)
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and name not in part._non_persistent_buffers_set:
                yield prefix + name, tensor
        if type(part).set_extra_state is not nn.Module.set_extra_state:
            yield prefix + EXTRA_STATE, None


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
