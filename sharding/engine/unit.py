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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn, Protocol

import torch
from torch import nn

from sharding.engine.batches import AllGather
from sharding.engine.extensions import settled
from sharding.engine.param_group import ParamGroup
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
    units_to_forward_prefetch: tuple[Unit, ...] | None = None
    """Units to gather while this one runs forward; None: those that followed the last time."""
    units_to_backward_prefetch: tuple[Unit, ...] | None = None
    """Units to gather while this one runs backward; None: those that backward reaches next."""


class StepRuntime(Protocol):
    """The part of the runtime that a unit uses (runtime.py)."""

    root: Unit

    def number_param_groups(self) -> None:
        """Gives every parameter group its index and name, because the unit has new groups."""
        ...


class Unit:
    """See the rules at the top of this file."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        param_groups: list[ParamGroup],
        borrowed: list[ParamGroup],
        policy: UnitPolicy,
        prepare: Callable[[], None],
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
        self.whole = Whole.NOWHERE
        self.full_precision = False
        """Whether the unit computes in the dtype of its shards, despite the policy."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises ArgumentTypeError: shards and process groups cannot be pickled or copied."""
        raise ArgumentTypeError(
            f"{type(self.modules[0]).__name__} cannot be pickled or copied: its parameters are "
            "spread over ranks; copy the module before it is sharded, or save its state_dict()"
        )

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
        """Adds the all-gathers of this unit to a batch."""
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
            part for param_group in self.param_groups for part in settled(param_group)
        ]
        self.borrowed = [part for param_group in self.borrowed for part in settled(param_group)]
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
