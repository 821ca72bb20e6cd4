"""A module made ready for flat parameters: the plan of its wrappers, real tensors, devices.

Rules of the plan, which a policy makes before any module is wrapped:

1. `plan_wraps` changes nothing. It asks the policy all questions and raises all errors before
   `auto_wrap` changes the first module.
2. Children come before parents, siblings in the order of registration: a wrapper takes the
   parameters that the wrappers below it have not taken.
3. A module in several places is wrapped once, and the wrapper is put into all of them.
4. Under mixed precision, modules of certain classes (BatchNorm by default) are kept apart: they are
   units without mixed precision, which compute in the dtype of their parameters and return the
   dtype of their inputs. They are found even in modules that a policy does not visit.

`materialize` makes a module's own parameters real, and `broadcast_states` makes them equal on all
ranks, on the device that computes. The texts of warnings and errors about devices are torch's.
Without an accelerator the CPU is the compute device, without a warning.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from sharding.engine.composition import HybridGroups
from sharding.engine.order_check import Row, check_same
from sharding.errors import ArgumentError, ArgumentTypeError, MisuseError
from sharding.torch_versions import current_accelerator
from sharding.wrap import CallablePolicy


@runtime_checkable
class TreePolicy(Protocol):
    """A policy that names its modules at once, like torch's own policies."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class WrapPlan:
    """The modules to wrap, in order, with the arguments of the wrapper."""

    kwargs: Mapping[nn.Module, dict[str, Any]]
    """For each module to wrap, children before parents: the arguments of its wrapper."""
    kept_apart: tuple[nn.Module, ...] = ()
    """The modules that compute without mixed precision; ignored ones are not wrapped."""


def plan_wraps(
    root: nn.Module,
    policy: TreePolicy | CallablePolicy,
    *,
    root_kwargs: Mapping[str, Any],
    ignored_modules: Set[nn.Module] = frozenset(),
    ignored_params: Set[nn.Parameter] = frozenset(),
    is_wrapped: Callable[[nn.Module], bool] = lambda module: False,
) -> WrapPlan:
    """Returns the plan of a policy for the modules below a root.

    `root_kwargs` are the arguments of each wrapper unless the policy overrides them; their
    `mixed_precision` has the classes that are kept apart. `ignored_modules`, which must hold whole
    subtrees, are not wrapped, and `ignored_params` do not count. Changes no module, and does not
    communicate.

    Raises ValueError if `is_wrapped` is true of a module.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    >>> from sharding.wrap import ModuleWrapPolicy
    >>> plan = plan_wraps(model, ModuleWrapPolicy({nn.Sequential}), root_kwargs={"device_id": None})
    >>> plan.kwargs == {model[1]: {"device_id": None}}
    True
    """
    for name, module in root.named_modules():
        if is_wrapped(module):
            raise ArgumentError(
                "FSDP auto wrapping requires modules to not already have "
                f"FSDP applied but found {name} in\n{root}"
            )
    precision = root_kwargs.get("mixed_precision")
    classes = () if precision is None else tuple(precision._module_classes_to_ignore)
    kept_apart = [m for m in root.modules() if m is not root and isinstance(m, classes)]
    alone = [module for module in kept_apart if module not in ignored_modules]
    if isinstance(policy, TreePolicy):
        chosen = policy._run_policy(root, set(ignored_modules), dict(root_kwargs))
    else:
        walk = _Walk(policy, ignored_modules, ignored_params, frozenset(alone))
        walk.visit(root, may_wrap=False)
        chosen = {module: dict(root_kwargs) for module in walk.chosen}
    for module in alone:
        chosen[module] = {**chosen.get(module, root_kwargs), "mixed_precision": None}
    chosen.pop(root, None)
    ordered = {module: chosen[module] for module in _post_order(root, set()) if module in chosen}
    return WrapPlan(ordered, tuple(kept_apart))


def auto_wrap(root: nn.Module, plan: WrapPlan, wrap_fn: Callable[..., nn.Module | None]) -> None:
    """Carries out a plan.

    `wrap_fn(module, **kwargs)` returns the replacement for the module in all its places; None or
    the module itself if it stays. A UserWarning names the modules that are kept apart.
    """
    if plan.kept_apart:
        classes = sorted({repr(type(module)) for module in plan.kept_apart})
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, "
            f"where the wrapped module has submodules of type:\n{{{', '.join(classes)}}}\n"
            "These modules will be wrapped as separate FSDP instances with mixed "
            "precision disabled.",
            stacklevel=4,
        )
    for module in plan.kept_apart:
        _compute_in_own_dtype(module)
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in root.modules():
        for name, child in parent._modules.items():  # named_children() leaves out second names
            if child is not None:
                places[child].append((parent, name))
    for module, kwargs in plan.kwargs.items():
        wrapper = wrap_fn(module, **kwargs)
        if wrapper is None or wrapper is module:
            continue
        for parent, name in places[module]:
            setattr(parent, name, wrapper)


def _post_order(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields the module and its descendants that are not in `seen`, children before parents."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _post_order(child, seen)
    yield module


@dataclass(frozen=True, slots=True)
class _Walk:
    """One walk down and up a tree; asks a policy about each module."""

    policy: CallablePolicy
    ignored_modules: Set[nn.Module]
    ignored_params: Set[nn.Parameter]
    alone: Set[nn.Module]
    """Modules that are wrapped regardless of the policy."""
    chosen: list[nn.Module] = field(default_factory=list)
    seen: set[nn.Module] = field(default_factory=set)
    wrapped: set[nn.Parameter] = field(default_factory=set)
    """The parameters of the modules that are wrapped so far."""

    def visit(self, module: nn.Module, may_wrap: bool = True) -> None:
        """Asks about a module and those below it; adds the answers to `chosen`."""
        self.seen.add(module)
        parameters = self.parameters(module)
        wanted = module in self.alone
        if self.ask(module, True, parameters):
            for child in module.children():
                if child not in self.seen and child not in self.ignored_modules:
                    self.visit(child)
            if may_wrap:
                wanted |= self.ask(module, False, parameters - self.wrapped)
        else:
            for descendant in module.modules():
                if descendant in self.alone:
                    self.wrapped.update(self.parameters(descendant))
        if wanted:
            self.chosen.append(module)
            self.wrapped.update(parameters)

    def ask(self, module: nn.Module, recurse: bool, parameters: set[nn.Parameter]) -> bool:
        numel = sum(parameter.numel() for parameter in parameters)
        return bool(self.policy(module=module, recurse=recurse, nonwrapped_numel=numel))

    def parameters(self, module: nn.Module) -> set[nn.Parameter]:
        return {p for p in module.parameters() if p not in self.ignored_params}


@dataclass(slots=True)
class _OwnDtype:
    """Two hooks: they cast inputs to the dtype of a module's computation, and outputs back."""

    dtype: torch.dtype
    given: torch.dtype | None = None
    """The dtype of the running call's inputs before a cast; None without a cast."""

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.given = None
        cast: tuple[tuple[Any, ...], dict[str, Any]]
        cast = tree_map_only(torch.Tensor, self.enter, (args, kwargs))
        return cast

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output if self.given is None else tree_map_only(torch.Tensor, self.leave, output)

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == self.dtype:
            return tensor
        self.given = tensor.dtype
        return tensor.to(self.dtype)

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.given) if tensor.is_floating_point() else tensor


def _compute_in_own_dtype(module: nn.Module) -> None:
    """Casts a module's floating-point inputs to its parameters' dtype, and outputs back."""
    tensors = chain(module.parameters(), module.buffers())
    dtypes = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
    casts = _OwnDtype(next(dtypes, torch.float32))
    module.register_forward_pre_hook(casts.before, with_kwargs=True)
    module.register_forward_hook(casts.after)


_MADE = "_sharding_made"
"""The attribute of a parameter on the meta device for the parameter that has taken its place."""


def own_modules(
    root: nn.Module, ignored: Set[nn.Module], inner: Set[nn.Module]
) -> Iterator[nn.Module]:
    """Yields the modules that are neither ignored nor in an inner unit, parents first."""
    if root in ignored or root in inner:
        return
    yield root
    for child in root.children():
        yield from own_modules(child, ignored, inner)


def materialize(
    modules: list[nn.Module], device: torch.device, init: Callable[[nn.Module], None] | None
) -> None:
    """Moves parameters and buffers from the meta device to `device`, with values.

    Calls `init` with each of the modules, in order. Without `init`, modules with tensors on the
    meta device get memory, and their `reset_parameters()` is called. Tied parameters stay tied.
    Raises ArgumentTypeError if such a module lacks this method, and RuntimeError if a tensor is
    still on the meta device.
    """
    if init is not None and not callable(init):
        raise ArgumentError(f"Expected param_init_fn={init} to be callable but got {type(init)}")
    for module in modules:
        before = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
        own = list(chain(module.parameters(recurse=False), module.buffers(recurse=False)))
        if init is not None:
            init(module)
        elif any(tensor.is_meta for tensor in own):
            reset = getattr(module, "reset_parameters", None)
            if reset is None:
                raise ArgumentTypeError(
                    f"{type(module).__name__} has parameters on the meta device and no "
                    "reset_parameters(); pass param_init_fn to say how it gets its values"
                )
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                reset()
        for name, parameter in before.items():
            _tie(module, name, parameter)


def _tie(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Puts the parameter that was first made for a tied one into its other places too."""
    made = module._parameters.get(name)
    if made is None or made.is_meta:
        return
    first = vars(parameter).setdefault(_MADE, made)
    if first is not made:
        setattr(module, name, first)


def broadcast_states(tensors: list[torch.Tensor], groups: HybridGroups) -> None:
    """Copies the first rank's tensors to all ranks of the shard and the replicate group.

    All ranks call this, with tensors of the same shapes. Waits.
    """
    # Tensor parallelism gives the ranks of both groups the same part of a DTensor.
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in (t.detach() for t in tensors)]
    for group in (groups.shard.group, groups.replicate.group):
        if group is None:
            continue
        first = dist.get_global_rank(group, 0)
        works = [dist.broadcast(part, first, group=group, async_op=True) for part in parts]
        for work in works:
            if work is not None:
                work.wait()


def check_states(
    module: nn.Module,
    tensors: Iterable[torch.Tensor],
    units: Container[nn.Module],
    groups: HybridGroups,
    device: torch.device,
) -> None:
    """Raises MisuseError on all ranks if they would broadcast other tensors of a module, or units.

    All ranks of both groups call this, before the broadcast; `device` is that of messages. Waits.
    """
    names = {id(t): n for n, t in chain(module.named_parameters(), module.named_buffers())}
    rows: list[Row] = [
        (names[id(tensor)], {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype)})
        for tensor in tensors
    ]
    rows += [(f"the unit {path}", {}) for path, part in module.named_modules() if part in units]
    among = [each for each in (groups.shard, groups.replicate) if each.size > 1]
    check_same("states to synchronize", rows, among, device)


def check_reachable(tensors: list[torch.Tensor], groups: HybridGroups) -> None:
    """Raises ArgumentError if the process group cannot send tensors in host memory."""
    if str(dist.get_backend(groups.group)) == "nccl" and any(
        t.device.type == "cpu" for t in tensors
    ):
        raise ArgumentError(
            "The module has CPU parameters or buffers when `sync_module_states=True`, which "
            "requires them to be on GPU. Please specify the `device_id` argument or move the "
            "module to GPU before passing it to FSDP."
        )


CPU = torch.device("cpu")


def device_given(device_id: int | str | torch.device | None, rank: int) -> torch.device | None:
    """Returns the device that `device_id` means. Warns if it lacks an index.

    Raises MisuseError if there is no such device.
    """
    if device_id is None:
        return None
    if isinstance(device_id, str):
        try:
            device_id = torch.device(device_id)
        except RuntimeError as error:
            raise ArgumentError(f"device_id={device_id!r} is no device: {error}") from error
    accelerator = current_accelerator()
    if not isinstance(device_id, torch.device):
        if accelerator is None:
            raise MisuseError(
                f"device_id={device_id} names an accelerator, but this machine has none; pass "
                'torch.device("cpu") or nothing'
            )
        device = torch.device(accelerator.type, device_id)
    else:
        device = device_id
    if device.type in ("cpu", "meta"):
        return device
    if accelerator is None or device.type != accelerator.type:
        raise MisuseError(f"device_id={device_id} is not a device of this machine")
    index: int | None = device.index
    if index is None:
        current = torch.device(device.type, torch.accelerator.current_device_index())
        warnings.warn(
            f"FSDP got the argument `device_id` {device_id} on rank {rank}, which does not have an "
            f"explicit index. FSDP will use the current device {current}. If this is incorrect, "
            "please explicitly set the current device before FSDP initialization or pass in the "
            "explicit device index as the `device_id` argument.",
            stacklevel=4,
        )
        return current
    if index >= torch.accelerator.device_count():
        raise MisuseError(
            f"device_id={device_id} does not exist: this machine has "
            f"{torch.accelerator.device_count()} devices of type {device.type}"
        )
    return device


def compute_device(parameters: Iterable[nn.Parameter], device: torch.device | None) -> torch.device:
    """Returns the device of a module's computation: the given one, or that of its parameters.

    For parameters in host memory it is the accelerator, if there is one. Raises ArgumentError if
    the parameters are on another device than the given one.
    """
    found = next((p.device for p in parameters if p.device.type not in ("cpu", "meta")), None)
    if device is not None and device.type != "meta":
        if found is not None and found != device:
            raise ArgumentError(f"Inconsistent compute device and `device_id`: {found} vs {device}")
        return device
    if found is not None:
        return found
    accelerator = current_accelerator()
    if accelerator is None:
        return CPU
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def check_one_device(tensors: Iterable[torch.Tensor], wanted: torch.device | None) -> None:
    """Raises MisuseError if a module is on several devices and none is given."""
    devices = {tensor.device for tensor in tensors}
    real = {device for device in devices if device.type not in ("cpu", "meta")}
    if len(real) > 1:
        raise MisuseError(
            f"FSDP only supports single device modules but got params on {sorted(map(str, real))}"
        )
    if len(devices) > 1 and wanted is None:
        raise MisuseError(
            f"The module has parameters on {sorted(map(str, devices))}; please pass in device_id "
            "to have it on one device"
        )


def warn_of_host_memory(parameters: Iterable[nn.Parameter], compute: torch.device) -> None:
    """Warns a user whose module is not on the machine's accelerator."""
    if compute.type != "cpu" and any(p.device.type == "cpu" for p in parameters):
        warnings.warn(
            "The passed-in `module` is on CPU and will thus have FSDP's sharding initialization "
            "run on CPU, which may be slower than on GPU. We recommend passing in the `device_id` "
            "argument for FSDP to move `module` to GPU for the sharding initialization. `module` "
            "must also be on GPU device to work with the `sync_module_states=True` flag since "
            "that requires GPU communication.",
            stacklevel=4,
        )


def check_trainable_on(device: torch.device, compute: torch.device, offload: bool) -> None:
    """Raises MisuseError if parameters have moved to another device since they were sharded."""
    if offload and device.type != "cpu":
        raise MisuseError(
            "An FSDP-managed module with parameter CPU offloading enabled has parameters on "
            f"{device}. Make sure to not move the module from CPU when offloading parameters."
        )
    if not offload and device != compute:
        raise MisuseError(
            f"An FSDP-managed module unexpectedly has parameters on {device}. Make sure to move "
            f"the module to {compute} before training."
        )
