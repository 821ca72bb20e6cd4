"""Lightning: the checkpoints of its Trainer, in ckpt's format.

    Trainer(plugins=[CkptCheckpointIO()])                     # one process, or DDP: rank 0 writes
    Trainer(strategy=CkptDDPStrategy())                       # DDP: the ranks share the writing
    Trainer(strategy=CkptModelParallelStrategy())             # FSDP2 and tensor parallelism
    Trainer(strategy=CkptFSDPStrategy())                      # torch's FSDP1, which needs GPUs

`ModelCheckpoint`, its best ones and `ckpt_path=` work as with Lightning's own files. A path such as
`epoch=0-step=10.ckpt` is the folder of a checkpoint.

Rules:

1. With the strategies, each rank stores its part of the module and its optimizers, by the names of
   the module, so that another number of ranks and another strategy can load them. Rank 0 stores the
   rest of Lightning's checkpoint (loops, callbacks, schedulers), as with Lightning.
2. A checkpoint has the values of Lightning's own file. If a hook has changed the state dict or the
   optimizers' states in the dict of a checkpoint, the dict's values are stored.
3. A load fills the module and its optimizers in place. If a hook looks at the loaded dict, the dict
   gets tensors of its own, and its values after the hook are loaded, as by Lightning.
4. The plugin stores the dict that Lightning passes to it. Only rank 0 has this dict.
5. `load_from_checkpoint` of Lightning's modules reads ckpt's folders once this file is imported:
   see [Note: load_from_checkpoint].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import ckpt
from ckpt.errors import MisuseError, NotACheckpointError
from ckpt.integrations import needs, remove
from ckpt.state.stateful import identity, is_packed, optimizer_entries, pack_state, parameter_names
from ckpt.transfer.write_job import Compress
from formats.catalog import TensorRef
from sharding.describe.describing import describe_module, flat_members, state_dict_keys
from sharding.describe.wrappers import CleanNames

with needs("lightning"):
    from lightning.pytorch.core import saving as module_saving
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import (
        DDPStrategy,
        FSDPStrategy,
        ModelParallelStrategy,
        Strategy,
    )
    from lightning.pytorch.utilities.model_helpers import is_overridden

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import ParallelStrategy as _Strategy
else:
    _Strategy = object

__all__ = [
    "CkptCheckpointIO",
    "CkptDDPStrategy",
    "CkptFSDPStrategy",
    "CkptModelParallelStrategy",
    "CkptStrategyMixin",
]

MODULE, OPTIMIZERS = "state_dict", "optimizer_states"
"""Lightning's names for the states of its module and of its optimizers."""
OF_LIGHTNING = [
    one.lightning_module_state_dict for one in (Strategy, ModelParallelStrategy, FSDPStrategy)
]
"""Methods that return the module's state dict, without other values of a user."""


class CkptCheckpointIO(CheckpointIO):
    """A plugin that writes the dict of a checkpoint on one rank, and reads the dict on each.

    The plugin is for strategies whose rank 0 has the whole state: a single device, and DDP.
    """

    def __init__(self, *, blocking: bool = True, compress: Compress = False) -> None:
        """`blocking` and `compress` are as in `ckpt.save`.

        At most one background save is in flight, and no checkpoint is removed before its end.
        """
        self._blocking = blocking
        self._compress: Compress = compress
        self._handle: ckpt.SaveHandle | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Stores the nest `checkpoint` at `path`, and replaces a checkpoint there.

        Raises StateError, with the key path, for a value that cannot be stored.
        """
        self._settle()
        self._handle = ckpt.save(
            path,
            checkpoint,
            overwrite=True,
            blocking=self._blocking,
            compress=self._compress,
            group="self",
            storage_options=storage_options,
        )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Returns the nest at `path`: of ckpt's format, or of Lightning's. No pickle is executed.

        `weights_only` has no effect, and `map_location` is as for `torch.load`.
        """
        self._settle()
        loaded: Any = ckpt.read(path)
        return _move_tensors(loaded, map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint of ckpt, or a file that Lightning wrote."""
        self._settle()
        remove(path)

    def teardown(self) -> None:
        """Returns once the background save has ended."""
        self._settle()

    def _settle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()


class CkptStrategyMixin(_Strategy):
    """A mixin before a strategy of Lightning: all ranks save and load their parts.

    class MyStrategy(CkptStrategyMixin, DDPStrategy): ...
    """

    _handed: Mapping[str, Any] | None = None
    """The module's state dict that the dict of a checkpoint began with."""
    _loads_weights = False
    """Whether `load_checkpoint` has left the module to `load_model_state_dict`."""
    _optimizers_left: tuple[str, list[Any], list[list[str]]] | None = None
    """The place of optimizers that `load_checkpoint` has not filled, their states in its dict, and
    their parameters' names."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Returns True: optimizers are filled in place, so they must exist before."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns this rank's state dict, without a gather or a copy of Lightning's strategies."""
        module = self._module()
        self._handed = describe_module(module) if _has_flat(module) else dict(module.state_dict())
        of_base: Any = super().lightning_module_state_dict
        return dict(self._handed) if of_base.__func__ in OF_LIGHTNING else dict(of_base())

    def optimizer_state(self, optimizer: torch.optim.Optimizer | LightningOptimizer) -> Any:
        """Returns the optimizer's state for a hook that may change it; an empty dict without one.

        The optimizer itself is saved unless a hook changes its state.
        """
        if not self._is_seen_by("on_save_checkpoint"):
            return {}
        own: Any = optimizer
        return self._state_of(getattr(own, "_optimizer", own))

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Stores the module, its optimizers, and the rest of rank 0's dict. All ranks call this.

        The values are those in the dict of each rank, after all hooks.
        """
        rest = dict(checkpoint)
        state: dict[str, Any] = {}
        if MODULE in rest:
            state[MODULE] = self._weights(rest.pop(MODULE))
        if OPTIMIZERS in rest:
            weights = state.get(MODULE)
            state[OPTIMIZERS] = self._optimizers_to_save(rest.pop(OPTIMIZERS), weights)
        if not self.is_global_zero:
            rest = _on_all_ranks(rest, [*self._module().state_dict().values(), state])
        self._handed = None
        url: Any = self.broadcast(os.fspath(filepath))
        ckpt.save(url, {**state, **rest}, overwrite=True, storage_options=storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fills the module and its optimizers; returns the rest. All ranks call this.

        If a hook looks at the result, it also has the state dict and, with DDP, the optimizers'
        states, in Lightning's form. The two methods below load them after the hook.
        """
        url: Any = self.broadcast(os.fspath(checkpoint_path))
        module = self._module()
        is_seen = self._is_seen_by("on_load_checkpoint") and not _has_flat(module)
        is_whole = is_seen and self.lightning_restore_optimizer
        self._loads_weights, self._optimizers_left = is_seen, None
        with ckpt.open(url) as stored:
            tree: Any = stored.values()
            weights = _parts(stored, tree.get(MODULE), module) if is_seen else module
        target: dict[str, Any] = dict.fromkeys(tree)
        if MODULE in tree or not is_seen:
            target[MODULE] = weights
        unused = None
        if self.optimizers and not is_seen:
            target[OPTIMIZERS] = list(self.optimizers)
        elif not is_whole and target.pop(OPTIMIZERS, MODULE) is None:
            unused = f"{OPTIMIZERS}.*"
        loaded: Any = ckpt.load(url, target, exclude=unused, strict=module.strict_loading)
        if not is_seen:
            return {**loaded, MODULE: {}, OPTIMIZERS: []}
        if MODULE in loaded:
            names = state_dict_keys(module)
            loaded[MODULE] = {names.get(key, key): value for key, value in loaded[MODULE].items()}
        if is_whole and OPTIMIZERS in loaded:
            saved = [_parameters(state) for state in loaded[OPTIMIZERS]]
            loaded[OPTIMIZERS] = [_number_parameters(state) for state in loaded[OPTIMIZERS]]
            before = tree_map(lambda value: value, loaded[OPTIMIZERS])  # in other containers
            self._optimizers_left = url, before, saved
        elif self.optimizers and not is_whole:
            self._fill_optimizers(url, None)
        return loaded  # type: ignore[no-any-return]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the state dict of a result of `load_checkpoint` that a hook looked at."""
        if self._loads_weights:
            self._module().load_state_dict(checkpoint[MODULE], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers' states of a result of `load_checkpoint` that a hook looked at.

        The states get to the parameters of their names. If the checkpoint has other names or a hook
        has changed the states, they get to the parameters of their numbers, as with Lightning.

        Raises MisuseError for states that a hook has changed, and whose numbers are other ones now.
        """
        if self._optimizers_left is None:
            return
        (url, before, saved), self._optimizers_left = self._optimizers_left, None
        names = parameter_names({MODULE: self._module()})
        named = [names.of(optimizer).named for optimizer in self.optimizers]
        own = [[name for each in group for name in each.names] for group in named]
        is_changed = not _same(checkpoint[OPTIMIZERS], before)
        if [*map(sorted, saved)] == [*map(sorted, own)]:
            if not is_changed:
                self._fill_optimizers(url, "self")
                return
            if saved != own:
                raise MisuseError(
                    "a hook has changed checkpoint['optimizer_states'], whose numbers belong to "
                    f"the parameters {saved}, and the optimizers have the order {own}: give the "
                    "optimizers their parameters in the order of the checkpoint"
                )
        super().load_optimizer_state_dict(checkpoint)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Removes a checkpoint of ckpt, or a file that Lightning wrote."""
        if self.is_global_zero:
            remove(filepath)

    def _module(self) -> Any:
        if self.lightning_module is None:
            raise MisuseError("this strategy has no module yet: save it in a run of a Trainer")
        return self.lightning_module

    def _is_seen_by(self, hook: str) -> bool:
        """Whether code beside Lightning's looks at the dict of a checkpoint."""
        module = self._module()
        if hook == "on_load_checkpoint" and (
            is_overridden("load_state_dict", module, nn.Module)
            or is_overridden("load_model_state_dict", self, CkptStrategyMixin)
        ):
            return True
        return is_overridden(hook, self.precision_plugin, Precision) or any(
            is_overridden(hook, part) for part in (module, *module.trainer.callbacks)
        )

    def _weights(self, weights: Mapping[str, Any]) -> Any:
        """Returns the module, or its entries with the values of `given` that are not its own."""
        module, handed = self._module(), self._handed or {}
        if weights.keys() == handed.keys() and all(weights[key] is handed[key] for key in weights):
            return module
        entries, own_weights = describe_module(module), dict[str, Any]()
        clean = CleanNames(module)
        for key, value in weights.items():
            name = clean.of(key)
            if name in own_weights:
                raise MisuseError(f"checkpoint['{MODULE}'] has two entries of the name {name!r}")
            is_own = name in entries and key in handed and value is handed[key]
            own_weights[name] = entries[name] if is_own else value
        return own_weights

    def _optimizers_to_save(self, optimizers: Sequence[Any], weights: Any) -> list[Any]:
        """Returns the optimizers, their entries, or the states that a hook has changed."""
        if len(optimizers) != len(self.optimizers):
            return list(optimizers)
        states: list[Any] = []
        for index, (optimizer, state) in enumerate(zip(self.optimizers, optimizers, strict=True)):
            own = self._state_of(optimizer)
            if state and not _same(state, own):
                states.append(state)
            elif weights is self._module():
                states.append(optimizer)
            else:
                entries = self._entries_of(optimizer, index)
                # names that the stored weights lack would find no parameter
                is_named = weights and weights.keys() >= set(_parameters(entries))
                states.append(entries if is_named or not own else own)
        return states

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the state of an optimizer in Lightning's form, without a message."""
        if hasattr(optimizer, "consolidate_state_dict"):  # its state is divided among the ranks
            return {}
        if self.lightning_restore_optimizer:
            return optimizer.state_dict()
        return self._entries_of(optimizer, 0)

    def _entries_of(self, optimizer: torch.optim.Optimizer, index: int) -> dict[str, Any]:
        where = f"{OPTIMIZERS}.{index}"
        packed: dict[str, Any] = pack_state(optimizer, where)
        if not is_packed(packed):
            return packed
        names = parameter_names({MODULE: self._module()})
        return optimizer_entries(packed, names.of(optimizer).named, where)

    def _fill_optimizers(self, url: str, group: Literal["self"] | None) -> None:
        target = {MODULE: self._module(), OPTIMIZERS: list(self.optimizers)}
        ckpt.load(url, target, include=f"{OPTIMIZERS}.*", group=group)


class CkptDDPStrategy(CkptStrategyMixin, DDPStrategy):
    """DDP; each rank writes a part of a checkpoint."""


class CkptModelParallelStrategy(CkptStrategyMixin, ModelParallelStrategy):
    """FSDP2 and tensor parallelism; each rank writes and reads its shards."""


class CkptFSDPStrategy(CkptStrategyMixin, FSDPStrategy):
    """Torch's FSDP1; each rank writes and reads its shards."""


def _parts(stored: ckpt.Checkpoint, saved: Any, module: nn.Module) -> dict[str, Any]:
    """Returns a target for the weights: this rank's part where the module has one, else whole."""
    state = module.state_dict()
    own = {name: state[key] for name, key in state_dict_keys(module).items()}
    return {
        name: torch.empty_like(own[name])
        if isinstance(own.get(name), DTensor)
        and isinstance(ref, TensorRef)
        and stored[ref.name].shape == own[name].shape
        else None
        for name, ref in (saved or {}).items()
    }


def _on_all_ranks(nest: Any, others: object) -> Any:
    """Returns the part of a nest on a rank other than 0: tensors of which rank 0 lacks a part.

    These are sharded tensors, and the tensors among `others`, which all ranks store: whether two
    names have one tensor must be the same on all ranks.
    """
    stored = {identity(tensor) for tensor in _tensors(others)}

    def part(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return node if isinstance(node, DTensor) or identity(node) in stored else None
        if isinstance(node, Mapping):
            found = {key: part(item) for key, item in node.items()}
            return {key: item for key, item in found.items() if item is not None} or None
        if isinstance(node, list | tuple) and any(part(item) is not None for item in node):
            return node
        return None

    return part(nest) or {}


def _tensors(nest: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def _has_flat(module: nn.Module) -> bool:
    return next(flat_members(module), None) is not None


def _same(one: Any, other: Any) -> bool:
    """Whether two nests have the same tensors and equal values."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _parameters(state: Any) -> list[Any]:
    return [parameter for group in state["param_groups"] for parameter in group["params"]]


def _number_parameters(state: Any) -> Any:
    """Returns the state of an optimizer with torch's numbers in the place of names."""
    number = {name: index for index, name in enumerate(_parameters(state))}
    groups = [
        {**group, "params": [number[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    kept = {number.get(name, name): value for name, value in state["state"].items()}
    return {**state, "state": kept, "param_groups": groups}


def _move_tensors(nest: dict[str, Any], map_location: Any) -> dict[str, Any]:
    """Returns a nest with its tensors, all in CPU memory, where `torch.load` would put them."""
    place = map_location
    if isinstance(place, Mapping):
        place = place.get("cpu")
    elif callable(place):
        moved = place(torch.empty(0).untyped_storage(), "cpu")
        place = None if moved is None else moved.device
    if place is None:
        return nest
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), nest)  # type: ignore[no-any-return]


def _with_folders(load: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Lightning's function that opens a file, for folders of checkpoints too."""

    @wraps(load)
    def load_file_or_folder(path: Any, map_location: Any = None, *more: Any, **options: Any) -> Any:
        try:
            return load(path, map_location, *more, **options)
        except (IsADirectoryError, FileNotFoundError):  # no file in a bucket has a folder's name
            try:
                content: Any = ckpt.read(path)
            except NotACheckpointError:
                content = None
            if content is None:
                raise
        if OPTIMIZERS in content:
            content[OPTIMIZERS] = [_number_parameters(state) for state in content[OPTIMIZERS]]
        return _move_tensors(content, map_location)

    return load_file_or_folder


# [Note: load_from_checkpoint]
# `load_from_checkpoint` is a class method that knows no Trainer, and so no CheckpointIO. Lightning
# 2.6 has no public hook in it: it opens its path, or an open file, by the function `pl_load` of
# `lightning.pytorch.core.saving`, which this file replaces by one that also takes folders. Where
# Lightning has no such function, `load_from_checkpoint` of a folder fails as without ckpt, and the
# rest of this file works.
if (_pl_load := getattr(module_saving, "pl_load", None)) is not None:
    module_saving.pl_load = _with_folders(_pl_load)  # type: ignore[attr-defined]
