"""Turns modules, optimizers and other objects with a state dict into nests of names and tensors.

Rules:

1. A module's entries have the names of its own `state_dict()`, without the parts that wrappers of
   torch and of this project add (`sharding.describe.wrappers.WRAPPED`): DDP's `module.`,
   torch.compile's `_orig_mod.`. Entries of a wrapper itself stay. Each parameter in a flat
   parameter has an entry.
2. An optimizer's entries are keyed by its parameters' names in the modules of the same state, never
   by position, so that they fit any world size, grouping and wrapper:
   `{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}`. If an optimizer has
   parameters of several modules, or tensors that are entries of the state themselves, the names are
   key paths: that of the module precedes a parameter's name. If no entry of the state has its
   parameters, the keys are positions, as in torch. State under other keys keeps them.
3. State with the shape of a flat parameter is divided among the names like the parameter; a single
   number (`step`) belongs to each name. A parameter has no entry on a rank that holds none of its
   elements, if the optimizer keeps no state for it there.
4. A tensor of the state that wraps other tensors is a dict of them (`ckpt.state.subclass_state`).
5. Any other object with `state_dict()` and `load_state_dict()` is its state dict;
   `ckpt.match.match_stateful` loads it. So is an optimizer whose `state_dict()` has a form of its
   own, as that of one around another.
6. A ZeroRedundancyOptimizer keeps the state of some parameters on each rank. Each rank has these
   entries, and the groups have all parameters.

Names the parts of flat parameters in local state dicts.

A local state dict of this project's runtime has the names in its `_metadata`. One of torch's FSDP
has flat parameters without names: only its module has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import StateError
from ckpt.state.memory import address_of, host_address, is_conj_or_neg
from ckpt.state.subclass_state import ORDINARY, inner_of, plain, take_apart
from formats.catalog import join
from sharding.describe.describing import TensorLike, flat_members, is_divided
from sharding.describe.dtensor import is_sharded
from sharding.describe.members import FLAT_PARAMETERS, LocalPart, NamedParameter
from sharding.describe.wrappers import CleanNames

STEP = "step"
"""The one entry of an optimizer's state that is never placed like its parameter."""
SINGLE = frozenset((torch.Tensor, nn.Parameter, str, int, float, bool, type(None)))
"""Types that hold no module."""
MAX_DEPTH = 100
"""The deepest nest; a deeper one probably contains itself."""


@runtime_checkable
class Stateful(Protocol):
    """An object that is saved and loaded by its own two methods.

    Users' classes have dicts of their own types of values, and any name for the argument.
    """

    def state_dict(self) -> Mapping[str, object]:
        """Returns the state: a nest of values that can be stored."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Takes over a state that `state_dict` returned."""


@contextmanager
def call_of(method: str, entry: str) -> Iterator[None]:
    """Encloses a call of a user's method: its exception gets a note that names the entry."""
    try:
        yield
    except Exception as error:
        notes = vars(error).setdefault("__notes__", [])  # `add_note` of Python 3.11
        notes.append(f"raised by {method}() of {entry or 'the target'}")
        raise


class OptimizerNames(NamedTuple):
    """The names of an optimizer's parameters, in the order of its groups (rule 2)."""

    named: list[NamedParameter]
    module: str | None
    """The key path of the module that has these names; "" for key paths, None for positions."""
    modules: frozenset[str] = frozenset()
    """The key paths of all modules that have parameters of the optimizer."""


@dataclass(frozen=True)
class ParameterNames:
    """The names of parameters, by identity, for the optimizers of one state."""

    modules: list[tuple[str, nn.Module]]
    """The modules of the state, with their key paths."""
    state: object

    @cached_property
    def found(self) -> Mapping[int, tuple[str, NamedParameter]]:
        """id(parameter) -> (key path of its module, its names in the module)."""
        by_identity: dict[int, tuple[str, NamedParameter]] = {}
        for path, module in self.modules:
            for member in flat_members(module):
                by_identity.setdefault(id(member.parameter), (path, NamedParameter.of(member)))
            clean = CleanNames(module)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                named = NamedParameter(parameter, (clean.of(name),))
                by_identity.setdefault(id(parameter), (path, named))
        return by_identity

    def of(self, optimizer: Optimizer) -> OptimizerNames:
        """Returns the names of the optimizer's parameters (rule 2).

        Raises StateError if only some of them have names.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [self.found.get(id(p)) for p in parameters]
        if None in found and parameters:
            entries = dict(_tensor_entries(self.state))
            found = [slot or entries.get(id(p)) for slot, p in zip(found, parameters, strict=True)]
        known = [entry for entry in found if entry is not None]
        if not known:
            _check_undivided(parameters)
            positions = [NamedParameter(p, (str(at),)) for at, p in enumerate(parameters)]
            return OptimizerNames(_without_others(optimizer, positions), None)
        if len(known) < len(found):
            at = found.index(None)
            raise StateError(
                f"the optimizer's parameter {at} of shape {tuple(parameters[at].shape)} belongs to "
                "no module of the state and is no entry of it, others do: put all of its modules "
                "and tensors into the state"
            )
        paths = {module for module, _ in known}
        if len(paths) == 1:
            named = _without_others(optimizer, [each for _, each in known])
            return OptimizerNames(named, next(iter(paths)), frozenset(paths))
        full = [
            named._replace(names=tuple(join(module, name) for name in named.names))
            for module, named in known
        ]
        return OptimizerNames(_without_others(optimizer, full), "", frozenset(paths))


def _without_others(optimizer: Optimizer, named: list[NamedParameter]) -> list[NamedParameter]:
    """Returns the names; those of parameters whose state another rank keeps are idle (rule 6)."""
    if not _is_zero_redundancy(optimizer):
        return named
    own = {id(p) for group in _keeper_of_state(optimizer).param_groups for p in group["params"]}
    return [each._replace(is_idle=id(each.parameter) not in own) for each in named]


def _is_zero_redundancy(optimizer: Optimizer) -> bool:
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _keeper_of_state(optimizer: Any) -> Any:
    """Returns the optimizer that keeps this rank's state: another one in rule 6."""
    if not _is_zero_redundancy(optimizer):
        return optimizer
    if not hasattr(optimizer, "optim"):
        raise StateError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True has no state before the buckets "
            "of DistributedDataParallel are built: train a few steps before this call"
        )
    return optimizer.optim


def state_of(optimizer: Optimizer) -> Mapping[Any, Any]:
    """Returns the state that an optimizer keeps on this rank, by its parameters."""
    found: Mapping[Any, Any] = _keeper_of_state(optimizer).state
    return found


def _tensor_entries(
    state: object, path: tuple[object, ...] = ()
) -> Iterator[tuple[int, tuple[str, NamedParameter]]]:
    """Yields the tensors that are entries of a nest, by their ids; the first entry of each last."""
    if isinstance(state, torch.Tensor):
        yield id(state), ("", NamedParameter(state, (reduce(join, path, ""),)))
    elif isinstance(state, Mapping):
        for key, item in reversed([*state.items()]):
            yield from _tensor_entries(item, (*path, key))
    elif isinstance(state, list | tuple):
        for index, item in reversed([*enumerate(state)]):
            yield from _tensor_entries(item, (*path, index))


def parameter_names(state: object) -> ParameterNames:
    """Returns the names of all parameters of the modules in a state.

    They are looked up once an optimizer needs them. Raises StateError if the state is too deep.
    """
    return ParameterNames([*modules(state)], state)


def _check_undivided(parameters: list[torch.Tensor]) -> None:
    """Raises StateError if a parameter is a part of others: its position does not name them."""
    for index, parameter in enumerate(parameters):
        if is_divided(parameter):
            raise StateError(
                f"the optimizer's parameter {index} of shape {tuple(parameter.shape)} is this "
                "rank's part of several parameters, and their module, which knows their names, is "
                "not in the state: put the module into the state"
            )


def modules(state: object, path: tuple[object, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules in a nest, with their names. Raises StateError if it is too deep.

    A nest that contains itself would otherwise never end.
    """
    if type(state) in SINGLE:
        return
    if len(path) > MAX_DEPTH:
        raise StateError(
            f"{format_path(path[:8])}...: nests deeper than {MAX_DEPTH} levels; does it "
            "hold itself?"
        )
    if isinstance(state, nn.Module):
        yield reduce(join, path, ""), state
    elif isinstance(state, Mapping):
        for key, item in state.items():
            if type(item) not in SINGLE:
                yield from modules(item, (*path, key))
    elif isinstance(state, list | tuple):
        for index, item in enumerate(state):
            yield from modules(item, (*path, index))


def pack_state(optimizer: Optimizer, path: str) -> Any:
    """Returns the optimizer's state dict; of a ZeroRedundancyOptimizer, this rank's (rule 6)."""
    if not _is_zero_redundancy(optimizer):
        with call_of("state_dict", path):
            return optimizer.state_dict()
    state = state_of(optimizer)
    with call_of("state_dict", path):
        packed = Optimizer.state_dict(optimizer)
    every = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(every)}
    packed["state"] = {
        numbers[id(key)] if isinstance(key, torch.Tensor) else key: value
        for key, value in state.items()
    }
    return packed


def is_packed(state: Any) -> bool:
    """Whether a state dict has the form of torch's optimizers (rule 5)."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)
        for group in groups
    )


def check_whole(optimizer: Optimizer, path: str) -> None:
    """Raises StateError if parameters are divided, for an optimizer with a form of its own.

    Its state dict does not tell which entries are divided like them.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, "_local_tensor") or is_divided(parameter):
                kind = type(optimizer).__qualname__
                raise StateError(
                    f"{path}: state_dict() of this {kind} has a form of its own, without names of "
                    "parameters, and the parameters are divided among ranks: put the optimizer "
                    "inside of it into the state, and its other values under keys of their own"
                )


def optimizer_entries(
    packed: Mapping[str, Any], named: list[NamedParameter], path: str
) -> dict[str, object]:
    """Returns an optimizer's state dict with names for its parameters (rules 2 and 3)."""
    every = list(chain.from_iterable(entry.names for entry in named))
    if len(set(every)) != len(every):
        twice = next(name for name in every if every.count(name) > 1)
        raise StateError(f"{path}: two parameters of the optimizer are named {twice}; rename one")
    state: dict[object, object] = {}
    for key, value in packed["state"].items():
        if isinstance(key, int) and key < len(named):
            entry = named[key]
            if entry.is_idle:
                continue
            where = f"{path}['state'][{entry.names[0]!r}]"
            if entry.slices or len(entry.names) != 1:
                state |= _split_state(entry, _by_its_tensors(value, plain, where), path)
            else:
                state[entry.names[0]] = _by_its_tensors(value, take_apart, where)
        elif str(key) in set(every):
            raise StateError(
                f"{path}['state'][{key!r}]: the optimizer has a parameter of this name too; rename "
                "the parameter"
            )
        else:
            state[key] = value
    groups = [
        {**group, "params": [name for index in group["params"] for name in named[index].names]}
        for group in packed["param_groups"]
    ]
    others = {k: v for k, v in packed.items() if k not in ("state", "param_groups")}
    return {"state": state, "param_groups": groups, **others}


def _by_its_tensors(state: object, instead: Callable[[Any, str], Any], where: str) -> object:
    """Returns the state of one parameter, with `instead` of tensors that wrap others (rule 4)."""
    if not isinstance(state, Mapping):
        return state
    if type(state) is dict and (
        ORDINARY.issuperset(map(type, state.values()))
        or all(inner_of(value) is None for value in state.values())
    ):
        return state
    return {key: instead(value, f"{where}[{key!r}]") for key, value in state.items()}


def _split_state(named: NamedParameter, state: object, path: str) -> dict[object, object]:
    """Returns the state of one parameter under each of its names (rule 3)."""
    if not named.slices or not isinstance(state, Mapping):
        return dict.fromkeys(named.names, state)
    shape = named.parameter.shape
    for key, value in state.items():
        loose = [] if _is_placed(key, value, shape) else _tensors(value)
        for tensor in loose:
            if tensor.numel() != 1:
                raise StateError(
                    f"{path}: the optimizer's {key!r} of {named.names[0]} has the shape "
                    f"{tuple(tensor.shape)}, the rank's part of the parameter {tuple(shape)}; only "
                    "numbers and tensors of the parameter's shape can be divided among ranks"
                )
    return {
        name: {
            key: part.of(value) if _is_placed(key, value, shape) else value
            for key, value in state.items()
        }
        for name, part in zip(named.names, named.slices, strict=True)
    }


def _tensors(nest: object) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        yield from chain.from_iterable(map(_tensors, nest.values()))
    elif isinstance(nest, list | tuple):
        yield from chain.from_iterable(map(_tensors, nest))


def _is_placed(key: object, value: object, shape: torch.Size) -> bool:
    """Whether an entry of an optimizer's state has an element for each element of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == shape and key != STEP


def has_address(tensor: TensorLike) -> TypeGuard[torch.Tensor]:
    """Whether a tensor's memory tells it apart from other tensors (see `identity`)."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) and (
        isinstance(tensor, LocalPart) or hasattr(tensor, "_local_tensor") or is_sharded(tensor)
    ):
        return False
    return isinstance(tensor, torch.Tensor) and tensor.numel() > 0


def identity(tensor: TensorLike, address: int = 0) -> object:
    """Returns a value that is equal for tied tensors: one object, or one view of the same memory.

    All ranks must see the same ties, and an empty shard has no memory to compare. DTensors and
    ShardedTensors are therefore tied only as one object, and parts by their flat parameter. So are
    tensors without memory of their own: sparse ones, wrappers of other tensors, lazy ones.
    `address` is the tensor's `host_address` if it is known.
    """
    if isinstance(tensor, LocalPart):
        return id(tensor) if tensor.key is None else tensor.key
    if address := address or host_address(tensor):
        return address, tensor.shape, tensor.dtype
    try:
        if not has_address(tensor):
            return id(tensor)
        # A tensor of a class of its own may be tied to an ordinary one, whose key is the above.
        if tensor.is_cpu and not is_conj_or_neg(tensor) and (address := address_of(tensor)):
            return address, tensor.shape, tensor.dtype
        return (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.is_conj(),
            tensor.is_neg(),
        )
    except (RuntimeError, ValueError):  # torch's, for a tensor without memory of its own
        return id(tensor)


FLAT = "_flat_param"
"""Both runtimes' name of a flat parameter; a number follows if there are several."""


def by_parameters(state: Mapping[object, object]) -> Mapping[object, object]:
    """Returns a state dict by parameter names, with `LocalPart`s in the place of flat parameters.

    Returns the state dict itself if its `_metadata` names no flat parameters. Copies nothing.

    Raises:
        LocalShapeError: a shard is truncated.
        ShardingError: a shard is another rank's.
    """
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping) or not any(
        isinstance(entry, Mapping) and FLAT_PARAMETERS in entry for entry in metadata.values()
    ):
        return state
    from sharding.describe.own_members import local_parts

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return local_parts(state, rank=rank)  # type: ignore[arg-type, return-value]


def with_names(state: object, model: nn.Module | None, depth: int = 0) -> object:
    """Returns a state whose local state dicts of torch's FSDP have the parameter names of `model`.

    Raises:
        StateError: there are flat parameters and no `model`, or the state nests too deep.
    """
    if not isinstance(state, Mapping):
        return state
    if depth > MAX_DEPTH:
        raise StateError(f"the state nests deeper than {MAX_DEPTH} levels; does it hold itself?")
    named = by_parameters(state)
    if named is not state:
        return state  # its `_metadata` has the names
    flat = next((key for key in state if _is_flat(key)), None)
    if flat is None:
        found = {key: with_names(item, model, depth + 1) for key, item in state.items()}
        return found if any(found[key] is not item for key, item in state.items()) else state
    if model is None:
        raise StateError(
            f"{flat} is a flat parameter without the names of its parameters: pass the module of "
            "the state dict as model=, or a state dict with _metadata, as this project's "
            "state_dict() returns it"
        )
    from sharding.describe.torch_fsdp import parts_by_name  # torch's FSDP

    return parts_by_name(model, state)


def _is_flat(key: object) -> bool:
    return isinstance(key, str) and key.rpartition(".")[2].startswith(FLAT)


def format_path(path: tuple[object, ...]) -> str:
    """Returns a key path as Python code: `state["optim"][0]`."""
    return "state" + "".join(f"[{key!r}]" for key in path)
