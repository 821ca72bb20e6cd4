"""The hooks around a unit's forward: they unshard its parameters in time and reshard them.

[Note: checkpoints]
A call that runs without gradients inside a root that runs with gradients may be recomputed in
backward, by a reentrant checkpoint; the call's own backward follows at once. A checkpoint that is
not reentrant recomputes only the saved tensors; then backward continues.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, without its import

from sharding.engine.order_check import OrderCheck, check_shards
from sharding.engine.runtime import Runtime, runtime_of
from sharding.engine.unit import Unit, UnitCall, Whole, in_dtype, on_device, tensors_in
from sharding.errors import MisuseError


class ForwardHooks:
    """The hooks of one unit. See the top of this file."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._to_run: set[nn.Module] = set()
        """Modules of the unit that this forward has not run yet."""
        self._returned = False
        """Whether the last forward ended without an error."""

    def hook(self, module: nn.Module) -> None:
        """Registers `before` and `after` around a module's forward."""
        module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after)
        self.hook_errors(module)

    def hook_errors(self, module: nn.Module) -> None:
        """Registers `end_failed`, which notices a forward that ends with an error."""
        module.register_forward_hook(self.end_failed, always_call=True)

    @_disable_dynamo
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshards the parameters; returns the inputs in the policy's dtype. May wait."""
        unit = self._unit
        runtime, policy = runtime_of(unit), unit.policy
        self._returned = False
        if unit.whole in (Whole.HERE_ALONE, Whole.ELSEWHERE):
            _check_runs_alone(unit, runtime)
            return args, kwargs
        goes_on = len(unit.modules) > 1 and module in self._to_run
        call = runtime.innermost(unit) if goes_on else None
        begins = call is None
        if call is None:
            if not runtime.is_running:
                runtime.begin_forward()
            self._to_run = set(unit.modules)
            call = UnitCall(unit, runtime.run, runtime.tick())
            runtime.running.append(call)
            _begin(call, runtime)
        if policy.input_device is not None and unit.is_root:
            args = on_device(args, policy.input_device)
            kwargs = on_device(kwargs, policy.input_device)
        cast = policy.cast_root_inputs if unit.is_root else policy.cast_inputs
        if cast is not None and not unit.full_precision:
            args, kwargs = in_dtype(args, cast), in_dtype(kwargs, cast)
        call.given.clear()
        if torch.is_grad_enabled():
            _note_given(call, (args, kwargs), runtime, begins)
        return args, kwargs

    @_disable_dynamo
    def after(self, module: nn.Module, args: object, output: Any) -> Any:
        """Reshards the parameters, unless they stay until backward; returns the output."""
        unit = self._unit
        runtime = unit.runtime
        if not isinstance(runtime, Runtime) or (call := runtime.innermost(unit)) is None:
            return output
        self._returned = True
        self._to_run.discard(module)
        if unit.policy.cast_outputs is not None:
            output = in_dtype(output, unit.policy.cast_outputs)
        call.kept |= _hands_out_parameters(call, output)
        if torch.is_grad_enabled():
            _await_backward(call, output, runtime)
        call.given.clear()
        if not self._to_run:
            for each in runtime.end_call(call):
                _end(each, runtime)
        return output

    def end_failed(self, module: nn.Module, args: object, output: object) -> None:
        """Ends the call of a forward that ended with an error."""
        runtime = self._unit.runtime
        if self._returned:
            self._returned = False
        elif isinstance(runtime, Runtime) and (call := runtime.innermost(self._unit)) is not None:
            self._to_run.clear()
            for each in runtime.end_call(call):
                each.unit.release(each)


def _begin(call: UnitCall, runtime: Runtime) -> None:
    """Unshards the parameters of a call and starts the all-gathers of the next units."""
    unit = call.unit
    if runtime.in_backward:
        call.recomputed = True
        call.imminent = runtime.pending_recomputes[unit] > 0
        runtime.pending_recomputes[unit] -= call.imminent
        unit.acquire(call)
        return
    if not runtime.root.shards_compared and any(
        param_group.groups.shard.size > 1 and not param_group.is_gathered
        for param_group in unit.used
    ):
        check_shards(runtime.root)
    check = runtime.order_check
    if check is not None and unit.param_groups and unit.modules[0].training:
        _agree(call, runtime, check)
        return
    unit.acquire(call)
    runtime.prefetch_forward(unit)


def _end(call: UnitCall, runtime: Runtime) -> None:
    """Records a call that has ended, for backward; keeps or reshards its parameters."""
    call.end = runtime.tick()
    unit = call.unit
    if runtime.in_backward:
        if not call.imminent:
            unit.release(call)
        return
    may_be_repeated = not torch.is_grad_enabled() and call.run.differentiable
    call.comes_back = call.visible or may_be_repeated
    if call.comes_back or call.kept:
        call.run.add_call(call)
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
    """Reshards after forward, fully or to fewer ranks, or leaves the parameters unsharded."""
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


def _check_runs_alone(unit: Unit, runtime: Runtime) -> None:
    """Raises MisuseError for a forward inside `summon_full_params(rank0_only=True)`.

    The first rank may run a forward there that needs no other rank.
    """
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in unit.used)
    if unit.whole is Whole.ELSEWHERE or runtime.is_running or trains:
        raise MisuseError(
            f"forward of {type(unit.modules[0]).__name__} inside summon_full_params with "
            "rank0_only=True: only the first rank has the parameters, so only this rank can run a "
            "forward, without gradients and from no outer unit that all ranks run; use "
            "torch.no_grad() on the first rank, or rank0_only=False"
        )


# For ranks that may run different units: see order_check.py.


def _agree(call: UnitCall, runtime: Runtime, check: OrderCheck) -> None:
    """Gathers all units that any rank runs now, in one order."""
    place = runtime.units.index(call.unit)
    others = check.check_call(call.unit, runtime.units)
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
    """Ends a call that only another rank has run; this rank takes part in its backward."""
    for param_group in call.unit.param_groups:
        param_group.backward.trained_elsewhere |= trained
    call.visible = torch.is_grad_enabled()
    call.versions = call.unit.versions()
    _end(call, runtime)


# Autograd's hooks: backward reaches a call, backward leaves a call.


def _note_given(call: UnitCall, inputs: object, runtime: Runtime, begins: bool) -> None:
    """Reshards the parameters when backward leaves this call by one of its inputs.

    Only inputs of its first module count: other modules may get outputs of the first.
    """
    for tensor in tensors_in(inputs):
        if tensor.requires_grad:
            call.given[id(tensor)] = tensor, tensor._version
            if begins and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: runtime.leave_call(call))


def _await_backward(call: UnitCall, output: object, runtime: Runtime) -> None:
    """Tells the runtime when backward reaches an output that this call made."""
    differentiable = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    for tensor in differentiable:
        if _is_given(call, tensor):
            _note_handed_on(tensor, runtime)
            continue
        came = partial(_came, runtime, call)
        if tensor.grad_fn is not None:
            tensor.register_hook(came)  # type: ignore[no-untyped-call]
            call.visible = True
        # A view that is changed in place gets another grad_fn; its base keeps the old one.
        if tensor._base is not None and tensor._base.grad_fn is not None:
            tensor._base.grad_fn.register_prehook(came)
            call.visible = True
    if call.visible:
        call.versions = call.unit.versions()
    if not differentiable and any(param_group.requires_grad for param_group in call.unit.used):
        call.kept = True  # backward may reach the call without a hook


def _hands_out_parameters(call: UnitCall, output: object) -> bool:
    """Whether the output has parameters or views of them, which must then stay unsharded."""
    unsharded = {
        id(parameter) for param_group in call.unit.used for parameter in param_group.unsharded
    }
    return any(id(t) in unsharded or id(t._base) in unsharded for t in tensors_in(output))


def _is_given(call: UnitCall, tensor: torch.Tensor) -> bool:
    """Whether a tensor is an unchanged input of the call."""
    original = call.given.get(id(tensor))
    return original is not None and original[1] == tensor._version


def _came(runtime: Runtime, call: UnitCall, gradients: object) -> None:
    """Begins a call's backward; called before the node that made an output runs."""
    if not call.begun:
        call.unit.check_unchanged(call.versions)
    runtime.begin(call)


def _note_handed_on(tensor: torch.Tensor, runtime: Runtime) -> None:
    """Tells the runtime, once, when backward reaches a tensor that a unit passed on."""

    def came(gradient: object) -> None:
        handle.remove()
        runtime.enter_backward()

    handle = tensor.register_hook(came)  # type: ignore[no-untyped-call]
