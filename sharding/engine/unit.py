"""A unit: modules whose parameters are unsharded and reduced together, by its policy.

The states of a unit, with the call that leads to each. A unit has no field for its state: a state
is a combination of `is_unsharded`, `holders` and `backward` of its parameter groups.

    state                     entered by                 unsharded buffer     modules have
    idle                      `end_backward`, `reshard`  no memory            sharded parameters
    unsharded for forward     `acquire` (before forward) filled               unsharded parameters
    resharded                 `release` (after forward)  no memory; or part   sharded parameters
                                                         kept on this rank
    unsharded for backward    `acquire` (output's hook)  filled, same storage unsharded parameters
    reduced                   `ParamGroup.reduce`        filled, no gradients unsharded parameters
    idle                      `leave`, `end_backward`    no memory            sharded parameters

`reshard_after_forward=False` and the root skip "resharded": holders keep the buffer filled.

Rules:

1. A unit that runs on one rank runs on all ranks, as often and in the same order: the user's
   program guarantees this. Ranks may differ in the units that are part of the loss, and in the
   parameters that get a gradient.
2. Parameters that changed between a forward and its backward are an error, as in plain PyTorch, as
   far as torch's version counters show it.
3. The root's next forward gathers again the parameters that stayed unsharded after forward, unless
   a backward that did not reduce kept them: no counter shows the steps of every optimizer.

The calls of units in a forward, in the order of their ends: backward visits them in reverse.

[Note: order of backward]
Autograd's engine runs the ready node that was made last, and the node made last is always ready.
The engine thus visits the nodes of a graph in the exact reverse of their creation. When backward
reaches the output of a call, each later call has begun its backward or never will, and each call
that began after the end of this one is done. The order is the same on all ranks that ran the same
forward, although autograd may skip calls without a part in the loss on one rank.

The tensors in the arguments and results of a module: any nest of containers, dataclasses too.

[Note: parameters of a unit]
A unit has the parameters of its modules that no unit below has, each once. A *tied* parameter is in
several modules, perhaps of several units. Inside a unit it is one parameter with several owners.
Across units, the unit that first shards it has it, and the others borrow its parameter group. The
first unit sets an attribute of the parameter, by which the others find the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, auto
from typing import NoReturn, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from sharding.engine.chunk_param_group import split_by_hooks
from sharding.engine.param_group import ParamGroup
from sharding.engine.parameter import Parameter
from sharding.engine.reduction import AllGather
from sharding.errors import ArgumentTypeError, MisuseError, TorchAssertionError
from sharding.policies import BackwardPrefetch

UNIT = "_sharding_unit"
"""The attribute of a module that is its unit."""
BY_USER, KEPT = "unsharded by the user", "kept by a backward that did not reduce"
"""Holders other than calls."""


class Whole(Enum):
    """The ranks whose modules have a unit's whole parameters, inside `summon_full_params`."""

    NOWHERE = auto()
    """Outside of `summon_full_params`."""
    EVERYWHERE = auto()
    HERE_ALONE = auto()
    """With `rank0_only`, on the first rank."""
    ELSEWHERE = auto()
    """With `rank0_only`, on the other ranks."""


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """The options of a unit: set by its entry point, replaced when a user changes one."""

    cast_inputs: torch.dtype | None = None
    """The dtype for floating-point inputs; None leaves them alone."""
    cast_root_inputs: torch.dtype | None = None
    """The dtype in the place of `cast_inputs` in the root."""
    cast_outputs: torch.dtype | None = None
    reshard_after_forward: bool | int | None = None
    """None: all units but the root. A number: keep a part on each of that many ranks."""
    reshard_after_backward: bool = True
    reshard_after_unreduced_backward: bool = True
    """False keeps the parameters unsharded after a backward that does not reduce."""
    forward_prefetch: bool = True
    """Whether forward prefetches; the root's option counts for all units."""
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    """Whether backward prefetches when it reaches the unit, when it leaves the unit, or never."""
    unshard_in_backward: bool = True
    always_show_sharded: bool = False
    """Whether modules have the sharded parameters after the root's forward even if the
    unsharded ones stay in memory."""
    input_device: torch.device | None = None
    """The device for the inputs of the root; None leaves them where they are."""
    units_to_forward_prefetch: tuple[Unit, ...] | None = None
    """Units to gather while this one runs forward; None: those that followed the last time."""
    units_to_backward_prefetch: tuple[Unit, ...] | None = None
    """Units to gather while this one runs backward; None: those that backward reaches next."""


class StepRuntime(Protocol):
    """The part of the runtime that a unit uses (runtime.py)."""

    root: Unit

    def number_param_groups(self) -> None:
        """Gives every parameter group its index and name, because the unit has new groups."""


class Unit:
    """See the rules at the top of this file."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        param_groups: list[ParamGroup],
        borrowed: list[ParamGroup],
        policy: UnitPolicy,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.modules = modules
        self.param_groups = param_groups
        """The groups that the unit gathers and reduces."""
        self.borrowed = borrowed
        """Groups of other units that have tied parameters of its modules."""
        self.policy = policy
        self.prepare = prepare
        """A function, called once before the first forward, when the unit has its runtime."""
        self.runtime: StepRuntime | None = None
        self.shards_compared = self.replicas_compared = False
        """Whether the ranks have compared the units of this root (order_check.py)."""
        self.checks_order = get_debug_level() == DebugLevel.DETAIL
        """Whether ranks compare the order of units if this one is the root (order_check.py)."""
        self.whole = Whole.NOWHERE
        self.full_precision = False
        """Whether the unit computes in the dtype of its shards, despite the policy."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_copy(self.modules[0])

    def hook_state_dict(self, module: nn.Module) -> None:
        """Reshards the unit before a module's state dict is made or loaded."""
        for register in (
            module.register_state_dict_pre_hook,
            module.register_load_state_dict_pre_hook,
        ):
            register(self._before_state_dict)  # type: ignore[no-untyped-call]

    # Unshard and reshard.

    @property
    def summoned(self) -> bool:
        """True inside `summon_full_params`."""
        return self.whole is not Whole.NOWHERE

    @property
    def is_root(self) -> bool:
        """True for the outermost unit of its runtime."""
        return self.runtime is not None and self.runtime.root is self

    @property
    def used(self) -> tuple[ParamGroup, ...]:
        """All groups that must be unsharded for the unit to run."""
        return (*self.param_groups, *self.borrowed)

    def unshard(self) -> None:
        """Starts the all-gathers of this unit. All ranks call it; does not wait."""
        unshard_together([self])

    def join(self, batch: AllGather) -> None:
        self._settle()
        for param_group in self.used:
            param_group.unshard(batch)

    @property
    def is_gathered(self) -> bool:
        """True if all parameters of the unit are unsharded or in flight."""
        return all(param_group.is_gathered for param_group in self.used)

    @property
    def unsharded_bytes(self) -> int:
        """The bytes of the unit's unsharded buffers."""
        return sum(param_group.unsharded_bytes for param_group in self.used)

    def wait(self) -> None:
        """Waits until all parameters of the unit are unsharded."""
        for param_group in self.used:
            param_group.wait()

    def acquire(self, holder: object) -> None:
        """Unshards the unit until this holder releases it. All ranks call it; waits."""
        self.unshard()
        self.wait()
        for param_group in self.used:
            param_group.holders.discard(BY_USER)
            param_group.holders.discard(KEPT)
            param_group.holders.add(holder)

    def release(self, holder: object) -> None:
        """Reshards the groups that no other holder needs unsharded."""
        for param_group in self.used:
            param_group.release(holder)

    def reshard(self) -> None:
        """Reshards the unit's own groups, even if they have holders.

        Borrowed groups are resharded if only the user or nobody holds them.
        """
        for param_group in self.param_groups:
            param_group.reshard()
        for param_group in self.borrowed:
            param_group.release(BY_USER)

    def unshard_for_user(self) -> None:
        """Starts the all-gather; the unit stays unsharded until its next forward or `reshard`."""
        for param_group in self.used:
            if param_group.is_stale:
                param_group.reshard()
        self.unshard()
        for param_group in self.used:
            param_group.holders.add(BY_USER)

    def refresh(self) -> None:
        """Before the root's forward, reshard groups whose buffer may be out of date (rule 3)."""
        for param_group in self.param_groups:
            param_group.drop_kept()
            if not param_group.holders <= {BY_USER, KEPT} or param_group.is_stale:
                param_group.reshard()

    def _settle(self) -> None:
        """Gives parameters with all-gather hooks parameter groups of their own."""
        if all(param_group.is_used for param_group in self.used):
            return
        before = self.used
        self.param_groups = [
            part for param_group in self.param_groups for part in split_by_hooks(param_group)
        ]
        self.borrowed = [
            part for param_group in self.borrowed for part in split_by_hooks(param_group)
        ]
        if self.runtime is not None and self.used != before:
            self.runtime.number_param_groups()

    def _before_state_dict(self, *_: object) -> None:
        for param_group in self.used:
            param_group.reshard()

    # Backward.

    def check_unchanged(self, versions: list[list[int]]) -> None:
        """Raises MisuseError if parameters no longer have these versions (rule 2)."""
        if any(param_group.is_replaced for param_group in self.used):
            raise TorchAssertionError(
                "FSDP does not support changing the parameters between forward and backward: those "
                f"of {type(self.modules[0]).__name__} were replaced; run backward before"
            )
        if versions != self.versions():
            raise MisuseError(
                f"the parameters of {type(self.modules[0]).__name__} were changed between a "
                "forward and its backward, for example by an optimizer step; run backward before"
            )

    def leave(self, holder: object) -> None:
        """Releases a call that backward has left, if the policy reshards after backward."""
        if not self._keeps_after_backward:
            self.release(holder)

    def end_backward(self) -> None:
        """Reshards all groups, except those that the policy keeps unsharded."""
        for param_group in self.param_groups:
            if self._keeps_after_backward and param_group.is_unsharded:
                param_group.holders.clear()
                param_group.holders.add(KEPT)
            else:
                param_group.reshard()

    @property
    def _keeps_after_backward(self) -> bool:
        if any(param_group.reduces for param_group in self.param_groups):
            return not self.policy.reshard_after_backward
        reshards = self.policy.reshard_after_backward
        return not (reshards and self.policy.reshard_after_unreduced_backward)

    def versions(self) -> list[list[int]]:
        """Returns the version counters of the shards of all groups of the unit."""
        return [param_group.versions() for param_group in self.used]


def refuse_copy(module: nn.Module) -> NoReturn:
    """Raises ArgumentTypeError: shards and process groups cannot be copied or pickled."""
    raise ArgumentTypeError(
        f"{type(module).__name__} cannot be pickled or copied: its parameters are spread over "
        "ranks; copy the module before it is sharded, or save its state_dict()"
    )


def unshard_together(units: Iterable[Unit]) -> None:
    """Starts the all-gathers of units, in few messages. All ranks call it; does not wait."""
    with AllGather() as batch:
        for unit in units:
            unit.join(batch)


def units_of(modules: tuple[nn.Module, ...]) -> Iterator[Unit]:
    """Yields the units of modules and of all modules in them, outer ones first, each once."""
    seen: set[int] = set()
    for module in modules:
        for part in module.modules():
            unit: Unit | None = vars(part).get(UNIT)
            if unit is not None and id(unit) not in seen:
                seen.add(id(unit))
                yield unit


@dataclass(slots=True, eq=False)
class UnitCall:
    """One run of a unit's forward."""

    unit: Unit
    run: ForwardPass
    start: int
    """The time at which its forward began, by the count of the runtime."""
    end: int = 0
    """The same for the end of its forward."""
    index: int = -1
    """Its place in `run.calls`; -1 for a call that backward recomputes."""
    visible: bool = False
    """Whether autograd will tell when backward reaches it."""
    comes_back: bool = False
    """Whether backward is expected to reach its outputs or its recomputation."""
    recomputed: bool = False
    """Whether a checkpoint runs it in backward, perhaps not to its end."""
    imminent: bool = False
    """Whether it is a reentrant checkpoint's recomputation, whose backward follows at once."""
    begun: bool = False
    """Whether backward has reached it."""
    kept: bool = False
    """Whether its parameters stay unsharded after forward."""
    versions: list[list[int]] = field(default_factory=list)
    """The version counters of its shards in forward."""
    served: list[tuple[UnitCall, bool]] = field(default_factory=list)
    """Calls of other ranks, gathered with this one, and whether those ranks train them."""
    given: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """Its input tensors and their versions, by id, while it runs: an output that is an input
    unchanged is passed on, not made."""


@dataclass(slots=True, eq=False)
class ForwardPass:
    """One run of the root's forward."""

    differentiable: bool
    """Whether the root ran with gradients enabled."""
    calls: list[UnitCall] = field(default_factory=list)
    """The calls that backward may reach, in the order of their ends."""
    started: list[Unit] = field(default_factory=list)
    """The units in the order of their begins; the next forward prefetches by this order."""
    cursor: int = -1
    """The index of the last call that backward has reached."""
    open: list[UnitCall] = field(default_factory=list)
    """Calls that backward has reached and not yet left."""

    def add_call(self, call: UnitCall) -> None:
        """Adds a call that has ended and that backward may reach."""
        call.index = len(self.calls)
        self.calls.append(call)
        self.cursor = len(self.calls)

    def take_skipped(self, index: int) -> list[UnitCall]:
        """Returns the visible calls that backward has skipped between the last one and this one."""
        between = self.calls[index + 1 : self.cursor]
        return [call for call in reversed(between) if call.visible and not call.begun]

    def before(self, call: UnitCall) -> Iterator[UnitCall]:
        """Yields the calls that backward reaches next, in order."""
        for index in range(call.index - 1, -1, -1):
            if self.calls[index].visible:
                yield self.calls[index]

    def rewind(self) -> None:
        """Prepares for another backward, of a retained graph or of another loss."""
        self.cursor = len(self.calls)
        self.open.clear()
        for call in self.calls:
            call.begun = False


T = TypeVar("T")


def tensors_in(nest: object) -> Iterator[torch.Tensor]:
    """Yields every tensor in a nest of dicts, lists, (named) tuples and dataclasses."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for item in nest.values():
            yield from tensors_in(item)
    elif isinstance(nest, list | tuple | set):
        for item in nest:
            yield from tensors_in(item)
    elif is_dataclass(nest) and not isinstance(nest, type):
        for each in fields(nest):
            yield from tensors_in(getattr(nest, each.name, None))


def map_tensors(nest: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Returns the nest with every tensor changed; unchanged containers stay the same objects."""
    changed: object = nest
    if isinstance(nest, torch.Tensor):
        changed = change(nest)
    elif isinstance(nest, tuple):
        items = [map_tensors(item, change) for item in nest]
        if _differ(items, nest):
            changed = type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    elif isinstance(nest, list | MutableMapping):
        keys = range(len(nest)) if isinstance(nest, list) else list(nest)
        items = [map_tensors(nest[key], change) for key in keys]
        if _differ(items, [nest[key] for key in keys]):
            changed = copy(nest)
            for key, item in zip(keys, items, strict=True):
                changed[key] = item
    elif is_dataclass(nest) and not isinstance(nest, type):
        names = [each.name for each in fields(nest) if hasattr(nest, each.name)]
        items = [map_tensors(getattr(nest, name), change) for name in names]
        if _differ(items, [getattr(nest, name) for name in names]):
            changed = copy(nest)
            for name, item in zip(names, items, strict=True):
                object.__setattr__(changed, name, item)  # also for frozen dataclasses
    return cast(T, changed)


def _differ(items: Iterable[object], others: Iterable[object]) -> bool:
    return any(item is not other for item, other in zip(items, others, strict=True))


def in_dtype(nest: T, dtype: torch.dtype) -> T:
    """Returns the nest with its floating-point tensors in another dtype."""
    return map_tensors(nest, lambda t: t.to(dtype) if t.is_floating_point() else t)


def on_device(nest: T, device: torch.device) -> T:
    return map_tensors(nest, lambda t: t.to(device))


_TIED = "_sharding_entry"


@dataclass(frozen=True, slots=True)
class FreeParameter:
    """A parameter and every place in the modules that has it."""

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    name: str

    @property
    def borrowed(self) -> Parameter | None:
        """The entry that another unit has made for it; None if no unit has it."""
        return entry_of(self.parameter)

    def assign(self, entry: Parameter) -> None:
        """Notes that a unit has it now; other units borrow it."""
        setattr(self.parameter, _TIED, entry)


def entry_of(parameter: nn.Parameter) -> Parameter | None:
    """Returns the entry that a unit has made for a parameter; None if no unit has it."""
    entry = getattr(parameter, _TIED, None)
    return entry if isinstance(entry, Parameter) else None


def free_parameters(
    modules: tuple[nn.Module, ...],
    ignored: Iterable[nn.Parameter] = (),
    ignored_modules: Iterable[nn.Module] = (),
) -> Iterator[FreeParameter]:
    """Yields the parameters that no unit below has yet, in the modules' order."""
    left_out = {id(parameter) for parameter in ignored}
    taken: set[tuple[int, str]] = set()
    skipped = {part for module in ignored_modules for part in module.modules()}
    for unit in units_of(modules):
        for param_group in unit.param_groups:
            taken |= {(id(owner), key) for owner, key in param_group.places()}
    free: dict[int, FreeParameter] = {}
    for root in modules:
        for prefix, part in root.named_modules():
            if part in skipped:
                continue
            for key, parameter in part._parameters.items():
                if parameter is None or id(parameter) in left_out or (id(part), key) in taken:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                entry = free.setdefault(id(parameter), FreeParameter(parameter, [], name))
                entry.owners.append((part, key))
    yield from free.values()


def find_tied_group(found: FreeParameter) -> ParamGroup | None:
    """Returns the group that has a tied parameter already, and adds the parameter's places."""
    entry = found.borrowed
    if entry is None or not isinstance(entry.param_group, ParamGroup):
        return None
    entry.owners += found.owners
    entry.param_group.fill_places(entry)
    return entry.param_group
