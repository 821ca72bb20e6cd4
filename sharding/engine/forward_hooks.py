"""The hooks around a unit's forward: what makes its parameters whole in time, and lets them go.

[Note: checkpoints]
What runs without gradients inside a root that runs with them may be run again in backward, by a
reentrant checkpoint; its backward follows at once. What runs again without that, in a checkpoint
that is not reentrant, is only for what it saves; then backward goes on where it was.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, without its import

from sharding.engine.calls import UnitCall
from sharding.engine.order_check import OrderCheck
from sharding.engine.outputs import in_dtype, tensors_in
from sharding.engine.runtime import Runtime, runtime_of
from sharding.engine.unit import Unit


class ForwardHooks:
    """One unit's. See the top of this file."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._to_run: set[nn.Module] = set()
        """Which of its modules a forward has still to come by."""
        self._returned = False
        """Whether the forward that ended last came to its end."""

    def hook(self, module: nn.Module) -> None:
        """Have this called around a module's forward."""
        module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after)
        self.hook_errors(module)

    def hook_errors(self, module: nn.Module) -> None:
        """Have this told of a module's forward that ends with an error."""
        module.register_forward_hook(self.ended, always_call=True)

    @_disable_dynamo
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The parameters are unsharded; the inputs have the policy's dtype."""
        unit = self._unit
        runtime, policy = runtime_of(unit), unit.policy
        self._returned = False
        begins = len(unit.modules) == 1 or module not in self._to_run or unit not in runtime.running
        if begins:
            if not runtime.is_running:
                runtime.begin_forward()
            self._to_run = set(unit.modules)
            call = UnitCall(unit, runtime.run, runtime.tick())
            runtime.started(call)
            _begin(call, runtime)
        else:
            call = runtime.running[unit][-1]
        cast = policy.cast_root_inputs if unit.is_root else policy.cast_inputs
        if cast is not None and not unit.full_precision:
            args, kwargs = in_dtype(args, cast), in_dtype(kwargs, cast)
        call.given.clear()
        if torch.is_grad_enabled():
            _note_given(call, (args, kwargs), runtime, begins)
        return args, kwargs

    @_disable_dynamo
    def after(self, module: nn.Module, args: object, output: Any) -> Any:
        """The parameters are let go, unless they stay until backward."""
        unit = self._unit
        runtime = unit.runtime
        if not isinstance(runtime, Runtime) or unit not in runtime.running:
            return output
        self._returned = True
        self._to_run.discard(module)
        call = runtime.running[unit][-1]
        if unit.policy.cast_outputs is not None:
            output = in_dtype(output, unit.policy.cast_outputs)
        call.kept |= _hands_out_parameters(call, output)
        if torch.is_grad_enabled():
            _await_backward(call, output, runtime)
        call.given.clear()
        if not self._to_run:
            _end(runtime.stopped(unit), runtime)
        return output

    def ended(self, module: nn.Module, args: object, output: object) -> None:
        """A forward that ended is not running any more, though it ended with an error."""
        runtime = self._unit.runtime
        if self._returned:
            self._returned = False
        elif isinstance(runtime, Runtime) and self._unit in runtime.running:
            self._to_run.clear()
            self._unit.release(runtime.stopped(self._unit))


def _begin(call: UnitCall, runtime: Runtime) -> None:
    """A call's parameters are unsharded, and what follows is on its way."""
    unit = call.unit
    if runtime.in_backward:
        call.recomputed = True
        call.imminent = runtime.pending_recomputes[unit] > 0
        runtime.pending_recomputes[unit] -= call.imminent
        unit.acquire(call)
        return
    check = runtime.order_check
    if check is not None and unit.param_groups and unit.modules[0].training:
        _agree(call, runtime, check)
        return
    unit.acquire(call)
    runtime.prefetch_forward(unit)


def _end(call: UnitCall, runtime: Runtime) -> None:
    """A call has ended: it is filed for backward, and its parameters are kept or not."""
    call.end = runtime.tick()
    unit = call.unit
    if runtime.in_backward:
        if not call.imminent:
            unit.release(call)
        return
    may_be_repeated = not torch.is_grad_enabled() and call.run.differentiable
    call.comes_back = call.visible or may_be_repeated
    if call.comes_back or call.kept:
        call.run.ended(call)
    if call.comes_back:
        runtime.pending_recomputes[unit] += not call.visible
        for param_group in unit.used:
            param_group.backward.outstanding += 1
    if not call.kept:
        _let_go(call)
    for served, trained in call.served:
        _end_served(served, trained, runtime)
    if not runtime.is_running:
        runtime.end_forward()


def _let_go(call: UnitCall) -> None:
    """The parameters are sharded again after forward, wholly or over fewer ranks, or stay."""
    unit = call.unit
    reshard = unit.policy.reshard_after_forward
    if reshard is None:
        reshard = not unit.is_root
    if not call.visible or reshard is True:
        unit.release(call)
    elif reshard is not False:
        for param_group in unit.param_groups:
            param_group.keep_part(reshard)
        unit.release(call)


# Where ranks may run different units: see order_check.py.


def _agree(call: UnitCall, runtime: Runtime, check: OrderCheck) -> None:
    """Gather what any rank runs now, in one order; all others than this unit for them."""
    place = runtime.units.index(call.unit)
    others = check.called(call.unit, runtime.units)
    for unit, trained in others:
        if runtime.units.index(unit) < place:
            served = UnitCall(unit, call.run, runtime.tick())
            unit.acquire(served)
            _end_served(served, trained, runtime)
    call.unit.acquire(call)
    for unit, trained in others:
        if runtime.units.index(unit) > place:
            served = UnitCall(unit, call.run, call.start)
            unit.acquire(served)
            call.served.append((served, trained))


def _end_served(call: UnitCall, trained: bool, runtime: Runtime) -> None:
    """Another rank has run a unit that this one has not: its backward is taken part in."""
    for param_group in call.unit.param_groups:
        param_group.backward.trained_elsewhere |= trained
    call.visible = torch.is_grad_enabled()
    call.versions = call.unit.versions()
    _end(call, runtime)


# What tells that backward comes to a call, and that it has left it.


def _note_given(call: UnitCall, given: object, runtime: Runtime, begins: bool) -> None:
    """Have the parameters let go where backward leaves this call by one of its inputs.

    Those are the inputs of the first of its modules: what the others are given may come from the
    first.
    """
    for tensor in tensors_in(given):
        if tensor.requires_grad:
            call.given[id(tensor)] = tensor, tensor._version
            if begins and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(_left, runtime, call))


def _await_backward(call: UnitCall, output: object, runtime: Runtime) -> None:
    """Have the runtime told when backward comes to what this call made."""
    differentiable = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    for tensor in differentiable:
        if _is_given(call, tensor):
            _note_handed_on(tensor, runtime)
            continue
        came = partial(_came, runtime, call)
        if tensor.grad_fn is not None:
            tensor.register_hook(came)  # type: ignore[no-untyped-call]
            call.visible = True
        # A view changed in place gets another maker; what it is a view of keeps its own.
        if tensor._base is not None and tensor._base.grad_fn is not None:
            tensor._base.grad_fn.register_prehook(came)
            call.visible = True
    if call.visible:
        call.versions = call.unit.versions()
    if not differentiable and any(param_group.requires_grad for param_group in call.unit.used):
        call.kept = True  # backward may come by a way that cannot be seen


def _hands_out_parameters(call: UnitCall, output: object) -> bool:
    """Whether parameters or views of them are used after forward: then they stay unsharded."""
    unsharded = {
        id(parameter) for param_group in call.unit.used for parameter in param_group.unsharded
    }
    return any(id(t) in unsharded or id(t._base) in unsharded for t in tensors_in(output))


def _is_given(call: UnitCall, tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that the call was given, unchanged."""
    given = call.given.get(id(tensor))
    return given is not None and given[1] == tensor._version


def _came(runtime: Runtime, call: UnitCall, gradients: object) -> None:
    """What is called before the node that made an output runs backward."""
    if not call.begun:
        call.unit.check_unchanged(call.versions)
    runtime.begin(call)


def _note_handed_on(tensor: torch.Tensor, runtime: Runtime) -> None:
    """Have the runtime told, once, when backward comes to a tensor that a unit handed on."""

    def came(gradient: object) -> None:
        handle.remove()
        runtime.enter_backward()

    handle = tensor.register_hook(came)  # type: ignore[no-untyped-call]


def _left(runtime: Runtime, call: UnitCall, gradients: object) -> None:
    """What is called before the node that made an input runs backward."""
    runtime.left(call)
