"""A unit: modules whose parameters are gathered and reduced together, and the hooks that do it.

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

[Note: checkpoints]
What runs without gradients inside a root that runs with them may be run again in backward, by a
reentrant checkpoint; its backward follows at once. What runs again without that, in a checkpoint
that is not reentrant, is only for what it saves; then backward goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sharding.batches import Gathers
from sharding.bucket import Bucket
from sharding.calls import Call
from sharding.extensions import settled
from sharding.order_check import OrderCheck
from sharding.outputs import in_dtype, tensors_in
from sharding.runtime import Runtime, gather_together

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
        self._to_run: set[nn.Module] = set()
        """Which of its modules a forward has still to come by."""
        self._calls: list[Call] = []
        """Those that run now, the innermost last."""
        self._returned = False
        """Whether the forward that ended last came to its end."""
        self._take_gradients()

    def hook(self, module: nn.Module) -> None:
        """Have this unit called around a module's forward."""
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward)
        self.hook_errors(module)

    def hook_errors(self, module: nn.Module) -> None:
        """Have this unit told of a module's forward that ends with an error."""
        module.register_forward_hook(self._after_error, always_call=True)

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
        return bool(self._calls)

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
        self._calls.clear()
        self._to_run.clear()
        for bucket in self.buckets:
            bucket.drop_kept()
            if not bucket.holders <= {BY_USER, KEPT} or bucket.is_stale:
                bucket.reshard()

    def _settle(self) -> None:
        """Parameters that gather themselves have buckets of their own."""
        if all(bucket.is_used for bucket in self.used):
            return
        self.buckets = [part for bucket in self.buckets for part in settled(bucket)]
        self.borrowed = [part for bucket in self.borrowed for part in settled(bucket)]
        self._take_gradients()
        if self.runtime is not None:
            self.runtime.number_buckets()

    def _take_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.on_gradient = self._on_gradient

    def _before_state_dict(self, *_: object) -> None:
        self.reshard()

    # Forward.

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The parameters are whole; the inputs have the policy's dtype."""
        runtime = self.runtime or Runtime.rooted_at(self)
        self._returned = False
        first = len(self.modules) == 1 or module not in self._to_run or not self._calls
        if first:
            if not runtime.is_running:
                runtime.begin_forward()
            self._to_run = set(self.modules)
            call = Call(self, runtime.run, runtime.tick())
            self._calls.append(call)
            self._begin(call, runtime)
        else:
            call = self._calls[-1]
        cast = self.casts.root_inputs if self.is_root else self.casts.inputs
        if cast is not None and not self.full_precision:
            args, kwargs = in_dtype(args, cast), in_dtype(kwargs, cast)
        call.given.clear()
        if torch.is_grad_enabled():
            self._note_given(call, (args, kwargs), runtime, first)
        return args, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, module: nn.Module, args: object, output: Any) -> Any:
        """The parameters are let go, unless they stay until backward."""
        runtime = self.runtime
        if runtime is None or not self._calls:
            return output
        self._returned = True
        self._to_run.discard(module)
        call = self._calls[-1]
        if self.casts.outputs is not None:
            output = in_dtype(output, self.casts.outputs)
        call.kept |= self._hands_out_parameters(output)
        self._await_backward(call, output, runtime)
        if self._to_run:
            return output
        self._calls.pop()
        self._end(call, runtime)
        return output

    def _after_error(self, module: nn.Module, args: object, output: object) -> None:
        """A forward that ended with an error is not running any more."""
        if self._returned:
            self._returned = False
        elif self._calls:
            self._to_run.clear()
            self.release(self._calls.pop())

    def _begin(self, call: Call, runtime: Runtime) -> None:
        if runtime.in_backward:
            call.recomputed = True
            call.imminent = self.hidden > 0
            self.hidden -= call.imminent
            self.acquire(call)
            return
        check = runtime.order_check
        if check is not None and self.buckets and self.modules[0].training:
            self._agree(call, runtime, check)
            return
        self.acquire(call)
        runtime.gather_after(self)

    def _agree(self, call: Call, runtime: Runtime, check: OrderCheck) -> None:
        """Gather what any rank runs now, in one order; all others than this unit for them."""
        place = runtime.units.index(self)
        others = check.called(self, runtime.units)
        for unit, trained in others:
            if runtime.units.index(unit) < place:
                unit._serve(Call(unit, call.run, runtime.tick()), trained, runtime)
        self.acquire(call)
        for unit, trained in others:
            if runtime.units.index(unit) > place:
                served = Call(unit, call.run, call.start)
                unit.acquire(served)
                call.served.append((served, trained))

    def _serve(self, call: Call, trained: bool, runtime: Runtime) -> None:
        """Another rank runs this unit and this one does not: it is gathered for that rank."""
        self.acquire(call)
        self._end_served(call, trained, runtime)

    def _end_served(self, call: Call, trained: bool, runtime: Runtime) -> None:
        for bucket in self.buckets:
            bucket.trained_elsewhere |= trained
        call.visible = torch.is_grad_enabled()
        call.versions = self._versions()
        self._end(call, runtime)

    def _end(self, call: Call, runtime: Runtime) -> None:
        """A call has ended: it is filed for backward, and its parameters are kept or not."""
        call.end = runtime.tick()
        if runtime.in_backward:
            if not call.imminent:
                self.release(call)
            return
        may_be_repeated = not torch.is_grad_enabled() and call.run.differentiable
        comes_back = call.visible or may_be_repeated
        if comes_back or call.kept:
            call.run.ended(call)
        if comes_back:
            self.hidden += not call.visible
            for bucket in self.used:
                bucket.outstanding += 1
        if not call.kept:
            self._let_go(call)
        for served, trained in call.served:
            served.unit._end_served(served, trained, runtime)
        if not runtime.is_running:
            runtime.end_forward()

    def _let_go(self, call: Call) -> None:
        reshard = self.reshard_after_forward
        if reshard is None:
            reshard = not self.is_root
        if not call.visible or reshard is True:
            self.release(call)
        elif reshard is not False:
            for bucket in self.buckets:
                bucket.keep_part(reshard)
            self.release(call)

    def _note_given(self, call: Call, given: object, runtime: Runtime, first: bool) -> None:
        """Have the parameters let go where backward leaves this call by one of its inputs.

        Those are the inputs of the first of its modules: what the others are given may come from
        the first.
        """
        for tensor in tensors_in(given):
            if tensor.requires_grad:
                call.given.add((id(tensor), tensor._version))
                if first and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(partial(_left, runtime, call))

    def _await_backward(self, call: Call, output: object, runtime: Runtime) -> None:
        """Have the runtime told when backward comes to what this call made."""
        if not torch.is_grad_enabled():
            return
        made = False
        for tensor in tensors_in(output):
            if not tensor.requires_grad:
                continue
            if (id(tensor), tensor._version) in call.given:
                made = True
                tensor.register_hook(partial(_entered, runtime))  # type: ignore[no-untyped-call]
                continue
            made = True
            came = partial(_came, runtime, call)
            if tensor.grad_fn is not None:
                tensor.register_hook(came)  # type: ignore[no-untyped-call]
                call.visible = True
            # A view changed in place gets another maker; what it is a view of keeps its own.
            if tensor._base is not None and tensor._base.grad_fn is not None:
                tensor._base.grad_fn.register_prehook(came)
                call.visible = True
        if call.visible:
            call.versions = self._versions()
        if not made and any(bucket.requires_grad for bucket in self.used):
            call.kept = True  # backward may come by a way that cannot be seen

    def _hands_out_parameters(self, output: object) -> bool:
        """Whether parameters or views of them are used after forward: then they stay whole."""
        whole = {id(parameter) for bucket in self.used for parameter in bucket.whole}
        return any(id(t) in whole or id(t._base) in whole for t in tensors_in(output))

    # Backward.

    def check_unchanged(self, call: Call) -> None:
        """Raise RuntimeError where parameters were changed since a call's forward (rule 2)."""
        if call.versions != self._versions():
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
        self._calls = [call for call in self._calls if not call.recomputed]  # not all of them end
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

    def _versions(self) -> list[list[int]]:
        return [bucket.versions() for bucket in self.used]


def _came(runtime: Runtime, call: Call, gradients: object) -> None:
    """What is called before the node that made an output runs backward."""
    if not call.begun:
        call.unit.check_unchanged(call)
    runtime.begin(call)


def _entered(runtime: Runtime, gradient: object) -> None:
    """What is called when backward comes to a tensor that a unit handed on."""
    runtime.enter_backward()


def _left(runtime: Runtime, call: Call, gradients: object) -> None:
    """What is called before the node that made an input runs backward."""
    runtime.left(call)
