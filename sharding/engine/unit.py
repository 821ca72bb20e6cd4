"""A unit: modules whose parameters are gathered and reduced together, and what it was told to do.

    before forward    gather, or await it; start the next unit's
    after forward     reshard, or keep the parameters unsharded; put hooks on the outputs
    before backward   gather; start the previous unit's
    gradients in      reduce to the shards
    after backward    let the unsharded parameters go
    end of backward   reduce what is left; await what is on its way

Rules:

1. A unit that runs on one rank runs on all, as often and in the same order: that is the program's
   promise. Which of them are in the loss, and which of its parameters get a gradient, may differ.
2. Parameters that were changed between a forward and its backward are an error, as in plain
   PyTorch, wherever torch's version counters tell.
3. What stays unsharded after forward is gathered anew by the root's next forward, unless a backward
   that did not reduce kept it: no counter tells of every optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import nn

from sharding.engine.batches import AllGather
from sharding.engine.extensions import settled
from sharding.engine.param_group import ParamGroup
from sharding.policies import BackwardPrefetch

UNIT = "_sharding_unit"
"""The attribute of a module that is its unit."""
BY_USER, KEPT = "unsharded by the user", "kept by a backward that did not reduce"
"""Holders that are no calls."""


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """What was decided for a unit: by its entry point, and later by a user."""

    cast_inputs: torch.dtype | None = None
    """The dtype of its floating-point inputs; None leaves them alone."""
    cast_root_inputs: torch.dtype | None = None
    """In the place of `cast_inputs`, where the unit is the root."""
    cast_outputs: torch.dtype | None = None
    reshard_after_forward: bool | int | None = None
    """None: all but the root. A number: to that many ranks."""
    reshard_after_backward: bool = True
    reshard_after_unreduced_backward: bool = True
    """False keeps the parameters unsharded after a backward that does not reduce."""
    forward_prefetch: bool = True
    """Whether forward gathers ahead; the root's counts for all."""
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    """Whether backward gathers ahead when it comes to the unit, or when it leaves it."""
    unshard_in_backward: bool = True
    always_show_sharded: bool = False
    """Whether modules have the sharded parameters after the root's forward, even if those unsharded
    stay in memory."""
    units_to_forward_prefetch: tuple[Unit, ...] | None = None
    """Gathered while this unit runs forward, in the place of those that followed the last time."""
    units_to_backward_prefetch: tuple[Unit, ...] | None = None


class StepRuntime(Protocol):
    """The part that a unit knows of its runtime (runtime.py)."""

    root: Unit

    def number_param_groups(self) -> None:
        """Give every parameter group its index and name; the unit has others than before."""
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
        """What it gathers and reduces."""
        self.borrowed = borrowed
        """What it uses of other units: their parameters are tied to some of its modules'."""
        self.policy = policy
        self.prepare = prepare
        """Called once, before the first forward, when the unit has its runtime."""
        self.runtime: StepRuntime | None = None
        self.summoned = False
        """Whether a user has its unsharded parameters before them."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refused, and with it that of its modules."""
        raise TypeError(
            f"{type(self.modules[0]).__name__} cannot be pickled or copied: its parameters are "
            "spread over ranks; copy the module before it is sharded, or save its state_dict()"
        )

    def hook_state_dict(self, module: nn.Module) -> None:
        """Have the sharded parameters in a module while its state dict is made or loaded."""
        for register in (
            module.register_state_dict_pre_hook,
            module.register_load_state_dict_pre_hook,
        ):
            register(self._before_state_dict)  # type: ignore[no-untyped-call]

    # Whole and sharded.

    @property
    def full_precision(self) -> bool:
        """Whether it computes in the dtype that its parameters are kept in, whatever the policy."""
        return any(param_group.full_precision for param_group in self.param_groups)

    @property
    def is_root(self) -> bool:
        """True for the outermost unit of its runtime."""
        return self.runtime is not None and self.runtime.root is self

    @property
    def used(self) -> tuple[ParamGroup, ...]:
        """What it needs whole to run."""
        return (*self.param_groups, *self.borrowed)

    def unshard(self) -> None:
        """Start gathering what this unit uses."""
        unshard_together([self])

    def join(self, batch: AllGather) -> None:
        """Gather what this unit uses with a batch."""
        self._settle()
        for param_group in self.used:
            param_group.unshard(batch)

    @property
    def is_gathered(self) -> bool:
        """True when what this unit uses is unsharded or on its way."""
        return all(param_group.is_gathered for param_group in self.used)

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of what it uses."""
        return sum(param_group.unsharded_bytes for param_group in self.used)

    def wait(self) -> None:
        """What this unit uses is unsharded."""
        for param_group in self.used:
            param_group.wait()

    def acquire(self, holder: object) -> None:
        """What this unit uses is unsharded, and stays so until it is released by this holder."""
        self.unshard()
        self.wait()
        for param_group in self.used:
            param_group.holders.discard(BY_USER)
            param_group.holders.discard(KEPT)
            param_group.holders.add(holder)

    def release(self, holder: object) -> None:
        """What only this holder needed whole is sharded again."""
        for param_group in self.used:
            param_group.release(holder)

    def reshard(self) -> None:
        """The sharded parameters are in the modules, whoever needs them whole."""
        for param_group in self.param_groups:
            param_group.reshard()

    def unshard_for_user(self) -> None:
        """Start the all-gather; the unit stays unsharded until its next forward or `reshard`."""
        for param_group in self.used:
            if param_group.is_stale:
                param_group.reshard()
        self.unshard()
        for param_group in self.used:
            param_group.holders.add(BY_USER)

    def refresh(self) -> None:
        """Before the root runs: what is unsharded is what the shards say (rule 3)."""
        for param_group in self.param_groups:
            param_group.drop_kept()
            if not param_group.holders <= {BY_USER, KEPT} or param_group.is_stale:
                param_group.reshard()

    def _settle(self) -> None:
        """Parameters that gather themselves have parameter groups of their own."""
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
        self.reshard()

    # Backward.

    def check_unchanged(self, versions: list[list[int]]) -> None:
        """Raise RuntimeError where parameters have not these versions any more (rule 2)."""
        if versions != self.versions():
            raise RuntimeError(
                f"the parameters of {type(self.modules[0]).__name__} were changed between a "
                "forward and its backward, by an optimizer step for one; run backward before"
            )

    def leave(self, holder: object) -> None:
        """Backward has left a call, which is the holder."""
        if not self._keeps_after_backward:
            self.release(holder)

    def end_backward(self) -> None:
        """Nothing is unsharded, but what is to be."""
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
        """The version counters of what it uses."""
        return [param_group.versions() for param_group in self.used]


def unshard_together(units: Iterable[Unit]) -> None:
    """Start gathering what units use, in as few messages as may be."""
    with AllGather() as batch:
        for unit in units:
            unit.join(batch)


def units_of(modules: tuple[nn.Module, ...]) -> Iterator[Unit]:
    """The units of modules and of all modules in them, outer ones first, each once."""
    seen: set[int] = set()
    for module in modules:
        for part in module.modules():
            unit: Unit | None = getattr(part, UNIT, None)
            if unit is not None and id(unit) not in seen:
                seen.add(id(unit))
                yield unit
