"""A unit: modules whose parameters are gathered and reduced together, and what it was told to do.

    before forward    gather, or await it; start the next unit's
    after forward     let the whole parameters go, or keep them; ask for them again on the outputs
    before backward   gather; start the previous unit's
    gradients in      reduce to the shards
    after backward    let the whole parameters go
    end of backward   reduce what is left; await what is on its way

Rules:

1. A unit that runs on one rank runs on all, as often and in the same order: that is the program's
   promise. Which of them are in the loss, and which of its parameters get a gradient, may differ.
2. Parameters that were changed between a forward and its backward are an error, as in plain
   PyTorch, wherever torch's version counters tell.
3. What stays whole after forward is gathered anew by the root's next forward, unless a backward
   that did not reduce kept it: no counter tells of every optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from sharding.engine.batches import Gathers
from sharding.engine.bucket import Bucket
from sharding.engine.calls import Call
from sharding.engine.extensions import settled
from sharding.engine.runtime import Runtime, gather_together

BY_USER, KEPT = "unsharded by the user", "kept by a backward that did not reduce"
"""Holders that are no calls."""


@dataclass(frozen=True, slots=True)
class Casts:
    """What a unit does to its floating-point inputs and outputs; None is nothing."""

    inputs: torch.dtype | None = None
    root_inputs: torch.dtype | None = None
    """In the place of `inputs`, where the unit is the root."""
    outputs: torch.dtype | None = None


class Unit:
    """See the rules at the top of this file."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        buckets: list[Bucket],
        borrowed: list[Bucket],
        casts: Casts,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules = modules
        self.buckets = buckets
        """What it gathers and reduces."""
        self.borrowed = borrowed
        """What it uses of other units: their parameters are tied to some of its modules'."""
        self.casts = casts
        self.reshard_after_forward = reshard_after_forward
        """None: all but the root. A number: to that many ranks."""
        self.reshard_after_backward = True
        self.prefetches_forward = self.prefetches_backward = True
        self.prefetches_late = False
        """Whether backward gathers ahead when it leaves the unit, not when it comes to it."""
        self.unshards_in_backward = True
        self.keeps_unreduced = False
        """Whether the whole parameters stay after a backward that does not reduce."""
        self.shows_sharded = False
        """Whether modules have the sharded parameters once the root has run, come what may."""
        self.prepare: Callable[[Runtime], None] | None = None
        """Called once the runtime is known: what a front door does before the first forward."""
        self.runtime: Runtime | None = None
        self.is_root = False
        self.summoned = False
        """Whether a user has its whole parameters before them."""
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.hidden = 0
        """Calls without gradients that a checkpoint may run again."""
        self.calls: list[Call] = []
        """Those that run now, the innermost last."""
        self._take_gradients()

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
        return any(bucket.full_precision for bucket in self.buckets)

    @property
    def is_running(self) -> bool:
        """True inside its forward, and in a backward of its root."""
        return self.is_open or (self.runtime is not None and self.runtime.in_backward)

    @property
    def is_open(self) -> bool:
        """True inside its forward."""
        return bool(self.calls)

    @property
    def used(self) -> tuple[Bucket, ...]:
        """What it needs whole to run."""
        return (*self.buckets, *self.borrowed)

    def unshard(self) -> None:
        """Start gathering what this unit uses."""
        gather_together([self])

    def join(self, batch: Gathers) -> None:
        """Gather what this unit uses with a batch."""
        self._settle()
        for bucket in self.used:
            bucket.unshard(batch)

    @property
    def is_gathered(self) -> bool:
        """True when what this unit uses is whole or on its way."""
        return all(bucket.is_gathered for bucket in self.used)

    @property
    def full_bytes(self) -> int:
        """Bytes of what it uses."""
        return sum(bucket.full_bytes for bucket in self.used)

    def wait(self) -> None:
        """What this unit uses is whole."""
        for bucket in self.used:
            bucket.wait()

    def acquire(self, holder: object) -> None:
        """What this unit uses is whole, and stays so until it is released by this holder."""
        self.unshard()
        self.wait()
        for bucket in self.used:
            bucket.holders.discard(BY_USER)
            bucket.holders.discard(KEPT)
            bucket.holders.add(holder)

    def release(self, holder: object) -> None:
        """What only this holder needed whole is sharded again."""
        for bucket in self.used:
            bucket.release(holder)

    def reshard(self) -> None:
        """The sharded parameters are in the modules, whoever needs them whole."""
        for bucket in self.buckets:
            bucket.reshard()

    def unshard_for_user(self) -> None:
        """Start gathering; what is whole stays so until the next forward, or until `reshard`."""
        for bucket in self.used:
            if bucket.is_stale:
                bucket.reshard()
        self.unshard()
        for bucket in self.used:
            bucket.holders.add(BY_USER)

    def refresh(self) -> None:
        """Before the root runs: what is whole is what the shards say (rule 3)."""
        self.calls.clear()
        for bucket in self.buckets:
            bucket.drop_kept()
            if not bucket.holders <= {BY_USER, KEPT} or bucket.is_stale:
                bucket.reshard()

    def _settle(self) -> None:
        """Parameters that gather themselves have buckets of their own."""
        if all(bucket.is_used for bucket in self.used):
            return
        before = self.used
        self.buckets = [part for bucket in self.buckets for part in settled(bucket)]
        self.borrowed = [part for bucket in self.borrowed for part in settled(bucket)]
        self._take_gradients()
        if self.runtime is not None and self.used != before:
            self.runtime.number_buckets()

    def _take_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.on_gradient = self._on_gradient

    def _before_state_dict(self, *_: object) -> None:
        self.reshard()

    # Backward.

    def check_unchanged(self, call: Call) -> None:
        """Raise RuntimeError where parameters were changed since a call's forward (rule 2)."""
        if call.versions != self.versions():
            raise RuntimeError(
                f"the parameters of {type(self.modules[0]).__name__} were changed between a "
                "forward and its backward, by an optimizer step for one; run backward before"
            )

    def leave(self, call: Call) -> None:
        """Backward has left a call."""
        if not self._keeps_after_backward:
            self.release(call)

    def end_backward(self) -> None:
        """Nothing is whole, but what is to be."""
        self.hidden = 0
        self.calls = [call for call in self.calls if not call.recomputed]  # not all of them end
        for bucket in self.buckets:
            if self._keeps_after_backward and bucket.is_whole:
                bucket.holders.clear()
                bucket.holders.add(KEPT)
            else:
                bucket.reshard()

    @property
    def _keeps_after_backward(self) -> bool:
        if self.keeps_unreduced and not any(bucket.reduces for bucket in self.buckets):
            return True
        return not self.reshard_after_backward

    def _on_gradient(self, bucket: Bucket) -> None:
        runtime = self.runtime or Runtime.rooted_at(self)
        runtime.gradient_arrived(bucket)

    def versions(self) -> list[list[int]]:
        """The version counters of what it uses."""
        return [bucket.versions() for bucket in self.used]
