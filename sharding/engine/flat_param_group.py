"""The parameter group of FSDP1: parameters end to end in one flat parameter, cut evenly.

The flat parameter is this rank's shard. The optimizer sees the flat parameter itself or, with
`use_orig_params`, the original parameters. Each original parameter is then a view of its elements
in this rank's shard, possibly of none. Over one rank (NO_SHARD) the shard is the unsharded buffer,
without a copy, and original parameters keep their shapes.

Rules:

1. The shard's memory is the truth. Data that a user puts into an original parameter
   (`param.data = ...`, `module.to(...)`) is copied into it before the next all-gather.
2. With flat parameters, modules have plain tensors in place of their parameters, always the same
   ones: views of the unsharded buffer, leaves of autograd, without memory when sharded.
3. A communication hook gets the padded flat gradient, in the same order on all ranks. The tensor
   that it leaves is the gradient, in any dtype if its state has a `parameter_type`.
4. Modules may have whole parameters for a user (`summon_full_params`, state dicts) in the place of
   the sharded ones. A forward then computes with their values, and leaves them in the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sharding.engine.composition import HybridGroups, Purpose
from sharding.engine.param_group import ParamGroup
from sharding.engine.parameter import (
    ChunkPacking,
    FlatPacking,
    Parameter,
    Precision,
    UnshardedBuffer,
    as_dtensor,
    local_of,
    pack,
    sees_what_is_set,
)
from sharding.engine.reduction import AllGather, ReduceScatters, Reduction
from sharding.engine.transport import NoGather, PendingAllGather
from sharding.errors import ArgumentTypeError, MisuseError

FLATTENED = "_sharding_flattened"
"""The attribute of a module that lists the flat parameter groups with its parameters."""
_ORDER = "_sharding_order"
"""The attribute of a module for the order of its parameters before any was flattened."""


class FlatParameter(nn.Parameter):
    """This rank's shard of several parameters, end to end, padded to the same size on all ranks.

    `_fqns`, `_shapes` and `_numels` list these parameters, in order, by their names in the wrapped
    module.
    """

    _fqns: tuple[str, ...]
    _shapes: tuple[torch.Size, ...]
    _numels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommHook:
    """A communication hook and its state."""

    state: object
    hook: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class FlatForm:
    """The form in which a user sees a flat parameter group."""

    use_orig_params: bool
    home: nn.Module
    """The module whose flat parameter a user sees."""
    name: str = "_flat_param"
    unsafe_setattr: bool = False
    """Whether views are set without a module's own `__setattr__`."""


class WholeParameters(Protocol):
    """Whole parameters that modules have for a user (rule 4)."""

    def place(self) -> None:
        """Puts them into the modules."""

    def fill(self, buffer: UnshardedBuffer) -> None:
        """Copies their values, with a user's changes, into a buffer of the group."""


class FlatParamGroup(ParamGroup):
    """See the rules at the top of this file."""

    def __init__(
        self,
        parameters: list[Parameter],
        groups: HybridGroups,
        precision: Precision,
        number: int,
        form: FlatForm,
    ) -> None:
        super().__init__(parameters, groups, precision, number)
        self.form = form
        self.compute_device: torch.device | None = None
        """The device to compute on; None: the device of the shard."""
        self.hook: CommHook | None = None
        self.whole: WholeParameters | None = None
        shapes = [parameter.shape for parameter in parameters]
        self.packing = FlatPacking(pack(shapes, [0] * len(shapes)), groups.shard.size)
        rank = groups.shard.rank
        self._pieces: list[tuple[int, int, int]] = []
        for index, slot in enumerate(self.packing.slots):
            lo, hi = self.packing.piece(index, rank)
            begin = slot.at + lo - rank * self._shard_numel if hi > lo else 0
            self._pieces.append((begin, lo, hi))
        self.keys: dict[nn.Module, list[str]] = {}
        """The order of each module's parameters before any of them was flattened."""
        for parameter in parameters:
            self._note_order(parameter)
        if not form.use_orig_params:
            for owner in self.keys:
                owner.__dict__.setdefault(FLATTENED, []).append(self)
        self.flat = self._flatten()
        for parameter in parameters:
            if not form.use_orig_params:
                parameter.sharded = self.flat
            self._let_go_of_original(parameter)
        if form.use_orig_params:
            self._view_shard()
        else:
            form.home.register_parameter(form.name, self.flat)
            self._buffer(self.dtype).free()
        self.place_sharded()

    # Methods that each kind of parameter group defines.

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def device(self) -> torch.device:
        return self.flat.device if self.compute_device is None else self.compute_device

    @property
    def is_divided(self) -> bool:
        """False if every rank has all elements."""
        return self.groups.shard.size > 1

    def versions(self) -> list[int]:
        """Returns the version counters of the parameters that the optimizer sees."""
        if self.form.use_orig_params:
            return [parameter.sharded._version for parameter in self.parameters]
        return [self.flat._version]

    def optimizer_parameters(self) -> list[nn.Parameter]:
        if self.form.use_orig_params:
            return [parameter.sharded for parameter in self.parameters]
        return [self.flat]

    def gradient_part(self, index: int) -> torch.Tensor | None:
        """Returns this rank's part of a parameter's gradient, in the memory of the gradient."""
        gradient = self.parameters[index].sharded.grad
        if gradient is None or self.form.use_orig_params:
            return gradient
        return self.shard_view(index, gradient)

    def module_parameters(self) -> list[nn.Parameter]:
        """Returns the modules' sharded parameters: those of `optimizer_parameters`, or a user's."""
        if self.whole is not None:
            return self.optimizer_parameters()
        if not self.form.use_orig_params:
            return [_first(self.form.home._parameters.get(self.form.name), self.flat)]
        found = []
        for parameter in self.parameters:
            module, attribute = parameter.owners[0]
            found.append(_first(module._parameters.get(attribute), parameter.sharded))
        return found

    def piece(self, index: int) -> tuple[int, int, int]:
        """Returns where a parameter's part begins in the shard, and its elements `[lo, hi)`."""
        return self._pieces[index]

    def shard_view(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's part of a tensor that is laid out as the shard is."""
        begin, lo, hi = self.piece(index)
        part = flat[begin : begin + hi - lo]
        return part if self.is_divided else part.view(self.parameters[index].shape)

    def take_over_replaced(self) -> None:
        if self.whole is not None:  # the modules have no sharded parameters that could change
            return
        if not self.form.use_orig_params:
            current = self.form.home._parameters.get(self.form.name)
            if current is not None and current is not self.flat:
                self._take_over_flat(current)
            return
        flat, start = self.flat, self.flat.data_ptr()
        moved = False
        for index, parameter in enumerate(self.parameters):
            module, attribute = parameter.owners[0]
            current = module._parameters.get(attribute)
            if current is not None and not self._is_shown:
                parameter.sharded = current
            sharded = parameter.sharded
            begin, lo, hi = self.piece(index)
            same = sharded.dtype == flat.dtype and sharded.device == flat.device
            here = start + begin * flat.element_size()
            if same and (hi == lo or sharded.data_ptr() == here):
                continue
            moved = True
            if sharded.numel() != hi - lo:
                raise MisuseError(
                    "Cannot writeback when the parameter shape changes: "
                    f"{parameter.name} has {sharded.numel()} elements, but this rank's shard of it "
                    f"has {hi - lo}; replace its data by a tensor of the same shape "
                    f"{tuple(self.shard_view(index, flat).shape)}, or use summon_full_params"
                )
        if moved:
            self._take_over_originals()

    @property
    def is_replaced(self) -> bool:
        """True if a user has replaced sharded parameters since the all-gather in force."""
        if not (self.form.use_orig_params and self.is_gathered) or self._is_shown or self.whole:
            return False
        start, itemsize = self.flat.data_ptr(), self.flat.element_size()
        for index, parameter in enumerate(self.parameters):
            module, attribute = parameter.owners[0]
            current = module._parameters.get(attribute, parameter.sharded)
            begin, lo, hi = self.piece(index)
            if current is not parameter.sharded or (
                hi > lo and parameter.sharded.data_ptr() != start + begin * itemsize
            ):
                return True
        return False

    def accumulate_shard_grads(self, sums: list[torch.Tensor], flags: list[float]) -> None:
        [summed] = sums
        if not any(flag > 0 for flag in flags):
            return
        if not (self._hook_casts or self.precision.keep_low_precision_grads):
            summed = summed.to(self.flat.dtype)
        summed = summed.to(self.flat.device)
        if not self.form.use_orig_params:
            _accumulate(self.flat, summed)
            return
        for index, (parameter, flag) in enumerate(zip(self.parameters, flags, strict=True)):
            if flag > 0:
                _accumulate(parameter.sharded, self.shard_view(index, summed))
                _step_in_backward(parameter.sharded)

    def reduce(self, batch: ReduceScatters) -> Reduction | None:
        """Starts the reduction; with a communication hook, the hook does all of it."""
        if self.hook is None:
            return super().reduce(batch)
        self.backward.start_reduction()
        present = [0] * len(self.parameters)
        gradient = self._pad(self._flat_gradients(present))
        flags = torch.tensor(present, dtype=torch.float32, device=self.device)
        self.all_reduce_now(flags)
        output = gradient
        if self.is_divided:
            output = torch.empty(self._shard_numel, dtype=gradient.dtype, device=gradient.device)
            self.hook.hook(self.hook.state, gradient, output)
        else:
            item = self._next_item(Purpose.ALL_REDUCE)
            self._replica_sums.all_reduce(flags, item, self.device)
            self.hook.hook(self.hook.state, gradient)
        self.accumulate_shard_grads([output], flags.tolist())
        return None

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of gradients in messages and sums; the group's own if a hook casts."""
        return self.dtype if self._hook_casts else super().reduce_dtype

    @property
    def _hook_casts(self) -> bool:
        return self.hook is not None and hasattr(self.hook.state, "parameter_type")

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Yields all places in the modules with a parameter of the group, or the flat parameter."""
        yield from super().places()
        yield self.form.home, self.form.name

    def fill_places(self, parameter: Parameter) -> None:
        """Notes that a parameter has got more places."""
        self._note_order(parameter)
        self._let_go_of_original(parameter)
        self._place_one(self.parameters.index(parameter), parameter, self._is_shown)

    # Private parts.

    @property
    def _shard_numel(self) -> int:
        return self.packing.shard_numel

    def _pack(self) -> ChunkPacking | FlatPacking:
        return self.packing

    def _outgoing(self, dtype: torch.dtype) -> list[torch.Tensor]:
        self._check_values(self.flat)
        return [self.flat.detach().to(self.device, dtype)]

    def _check_values(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta and self.device.type != "meta":
            raise MisuseError(
                "An FSDP-managed module unexpectedly has parameters on meta. Make sure to move the "
                f"module to {self.device} before training."
            )

    def _gather(self, batch: AllGather) -> PendingAllGather:
        if self.whole is None:
            return super()._gather(batch)
        self.buffer = self._buffer(self.dtype)
        self.buffer.allocate()
        self.whole.fill(self.buffer)
        return NoGather()

    def _needs_gathering(self, buffer: UnshardedBuffer) -> bool:
        return not buffer.is_over(self.flat)

    def _shared_memory(self, dtype: torch.dtype) -> torch.Tensor | None:
        shared = not self.is_divided and dtype == self.stored_dtype
        return self.flat.data if shared and self.flat.device == self.device else None

    def _leaf(self, index: int, view: torch.Tensor) -> torch.Tensor:
        view = self.as_it_was(index, view)
        if self.form.use_orig_params:
            return nn.Parameter(view, requires_grad=False)
        return view

    def as_it_was(self, index: int, view: torch.Tensor) -> torch.Tensor:
        """Returns the unsharded parameter: a DTensor if tensor parallelism divides it."""
        spec = self.parameters[index].distributed
        return view if spec is None else as_dtensor(view, spec)

    def _parts(
        self, gradients: list[torch.Tensor], packing: ChunkPacking | FlatPacking
    ) -> list[list[torch.Tensor]]:
        flat = self._pad(gradients)
        spans = [packing.spans(rank)[0] for rank in range(self.groups.shard.size)]
        return [[flat[lo:hi]] for lo, hi in spans]

    def _pad(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        missing = self.packing.numel - sum(gradient.numel() for gradient in gradients)
        if missing:
            like = gradients[0]
            gradients = [*gradients, like.new_zeros(missing)]
        return torch.cat(gradients)

    def _flatten(self) -> FlatParameter:
        """Returns this rank's shard, filled from the unsharded parameters."""
        first = self.parameters[0].sharded
        local = torch.zeros(self._shard_numel, dtype=first.dtype, device=first.device)
        for index, parameter in enumerate(self.parameters):
            begin, lo, hi = self.piece(index)
            unsharded = local_of(parameter.sharded.detach(), parameter.distributed).reshape(-1)
            local[begin : begin + hi - lo].copy_(unsharded[lo:hi])
        return self._set_names(FlatParameter(local, requires_grad=first.requires_grad))

    def _set_names(self, flat: FlatParameter) -> FlatParameter:
        """Returns the flat parameter, with the names and shapes of the parameters in it."""
        flat._fqns = tuple(parameter.name for parameter in self.parameters)
        flat._shapes = tuple(torch.Size(parameter.shape) for parameter in self.parameters)
        flat._numels = tuple(slot.numel for slot in self.packing.slots)
        return flat

    def _view_shard(self) -> None:
        """The original parameters are views of the shard."""
        for index, parameter in enumerate(self.parameters):
            view = self.shard_view(index, self.flat.data)
            if isinstance(parameter.sharded, DTensor):  # a DTensor's data cannot be replaced
                trained = parameter.sharded.requires_grad
                parameter.sharded = nn.Parameter(view, requires_grad=trained)
            else:
                parameter.sharded.data = view

    def _take_over_originals(self) -> None:
        first = self.parameters[0].sharded
        self._check_values(first)
        if any(p.sharded.dtype != first.dtype for p in self.parameters):
            raise ArgumentTypeError(
                "the original parameters of one flat parameter have got different dtypes: "
                + ", ".join(f"{p.name} {p.sharded.dtype}" for p in self.parameters)
            )
        with torch.no_grad():
            local = torch.zeros(self._shard_numel, dtype=first.dtype, device=first.device)
            for index, parameter in enumerate(self.parameters):
                self.shard_view(index, local).copy_(parameter.sharded)
            self.flat.data = local
        self._view_shard()
        self._forget_forms()

    def _take_over_flat(self, current: nn.Parameter) -> None:
        if current.shape != self.flat.shape:
            raise MisuseError(
                f"{self.form.name} of shape {tuple(self.flat.shape)} was replaced by a tensor of "
                f"shape {tuple(current.shape)}"
            )
        self.flat = self._set_names(FlatParameter(current.detach(), current.requires_grad))
        for parameter in self.parameters:
            parameter.sharded = self.flat
        self.form.home.register_parameter(self.form.name, self.flat)
        self._forget_forms()

    def _note_order(self, parameter: Parameter) -> None:
        for module, _ in parameter.owners:
            self.keys[module] = module.__dict__.setdefault(_ORDER, list(module._parameters))

    def _let_go_of_original(self, parameter: Parameter) -> None:
        """Takes the original parameter, which the flat one replaces, out of its modules."""
        if not self.form.use_orig_params:
            for module, attribute in parameter.owners:
                module._parameters.pop(attribute, None)

    def place_unsharded(self) -> None:
        """Puts the unsharded parameters into the modules."""
        for index, parameter in enumerate(self.parameters):
            self._place_one(index, parameter, True)

    def place_sharded(self) -> None:
        """Puts the sharded parameters into the modules, or whole ones for a user (rule 4)."""
        if self.whole is not None:
            self.whole.place()
            return
        for index, parameter in enumerate(self.parameters):
            self._place_one(index, parameter, False)

    def _place_one(self, index: int, parameter: Parameter, unsharded: bool) -> None:
        if not self.form.use_orig_params or unsharded:
            leaves = (self.buffer or self._buffer(self.dtype)).leaves
            self._set(parameter, leaves[index])
        else:
            self._set(parameter, parameter.sharded)

    def _set(self, parameter: Parameter, tensor: torch.Tensor) -> None:
        for module, attribute in parameter.owners:
            is_plain = type(module).__setattr__ is nn.Module.__setattr__
            if not (is_plain or self.form.unsafe_setattr) and sees_what_is_set(module):
                setattr(module, attribute, tensor)
            elif self.form.use_orig_params:
                module._parameters[attribute] = tensor  # type: ignore[assignment]
            else:
                module.__dict__[attribute] = tensor


def _first(one: nn.Parameter | None, other: nn.Parameter) -> nn.Parameter:
    return other if one is None else one


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Adds to a parameter's gradient, whose dtype may differ from the parameter's."""
    if parameter.grad is not None:
        parameter.grad += gradient
    elif gradient.dtype == parameter.dtype:
        parameter.grad = gradient
    else:  # torch checks the dtype when a gradient is set, not when its data is set
        parameter.grad = torch.empty_like(parameter)
        parameter.grad.data = gradient


def _step_in_backward(parameter: nn.Parameter) -> None:
    """Runs the optimizers that a user gave the parameter, to step as soon as it has a gradient."""
    for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def flat_param_groups(param_groups: Sequence[ParamGroup]) -> list[FlatParamGroup]:
    return [param_group for param_group in param_groups if isinstance(param_group, FlatParamGroup)]
