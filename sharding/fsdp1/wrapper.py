"""`FullyShardedDataParallel`: the entry point that wraps a module, with torch's signature."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sharding.engine.flat_param_group import (
    CommHook,
    FlatParameter,
    FlatParamGroup,
    flat_param_groups,
)
from sharding.engine.parameter import Parameter
from sharding.engine.runtime import is_running
from sharding.engine.unit import Unit, refuse_copy, units_of
from sharding.errors import ArgumentError, MisuseError, TorchAssertionError
from sharding.fsdp1.entry_point import (
    ENTRY_POINT,
    HYBRID,
    EntryPoint,
    FlatSettings,
    Groups,
    check_not_sharded,
    choose_strategy,
    chosen_groups,
    entry_points,
    find_ignored,
    hybrid_groups_of,
    wrap_inside,
)
from sharding.fsdp1.state_dicts import (
    get_state_dict_type,
    hook_state_dicts,
    set_state_dict_type,
    state_dict_type,
)
from sharding.fsdp1.torch_state_dict import OptimStateDicts, connect
from sharding.fsdp1.unsharded import summon_full_params
from sharding.policies import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    TrainingState,
)

WRAPPED = "_fsdp_wrapped_module"
"""The wrapper's attribute for the module; it is a part of parameters' names."""

HYBRID_HOOK = "Communication hook is not supported for hybrid strategies"


class FullyShardedDataParallel(OptimStateDicts, nn.Module):
    """A module whose parameters, gradients and optimizer state are divided over ranks.

    Wrap inner modules first, or pass a policy that chooses them; then the outermost one; make the
    optimizer afterwards. It trains like the module with the mean of the ranks' gradients. All ranks
    of the group make it, in the same order; it communicates only with `sync_module_states`, or to
    make groups of nodes for hybrid strategies.

    Args:
        module: the module to wrap. Its unit has the parameters that no inner instance has.
        process_group: the ranks to shard over; for hybrid strategies a pair, the ranks to shard
            over and those to replicate over. By default all ranks, or by nodes for hybrid ones.
        sharding_strategy: by default FULL_SHARD.
        cpu_offload: whether shards and gradients are kept in host memory.
        auto_wrap_policy: chooses the inner modules that become units; see `sharding.wrap`.
        backward_prefetch: the time at which backward gathers the next unit.
        mixed_precision: the dtypes for computation, reduction and buffers.
        ignored_modules: modules to leave as they are, with all modules in them.
        param_init_fn: initializes modules on the meta device.
        device_id: the device to compute on; modules elsewhere are moved.
        sync_module_states: whether all ranks get the first rank's parameters and buffers.
        forward_prefetch: whether forward gathers the next unit ahead, in the last forward's order.
        limit_all_gathers: accepted, and without effect: buffers are never more than two units'.
        use_orig_params: whether the optimizer sees the module's own parameters, each with this
            rank's elements, in place of flat ones.
        ignored_states: parameters, or modules, to leave as they are.
        device_mesh: a mesh in place of process_group: of one dimension, or two (replicate, shard).

    Raises:
        ValueError, TypeError: arguments that contradict each other or the module.
        MisuseError: parameters on several devices, or on a device that does not exist.

    >>> import torch, torch.distributed as dist
    >>> from ckpt.sharding import FullyShardedDataParallel, ShardingStrategy
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = FullyShardedDataParallel(
    ...     torch.nn.Linear(2, 3), sharding_strategy=ShardingStrategy.NO_SHARD
    ... )
    >>> [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    [('_fsdp_wrapped_module._flat_param', (9,))]
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> model.params[0].grad[6:]
    tensor([4., 4., 4.])
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Groups | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        check_not_sharded(module)
        ignored = find_ignored(module, ignored_modules, ignored_states)
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        has_policy = auto_wrap_policy is not None
        groups = chosen_groups(strategy, process_group, device_mesh, has_policy)
        settled = choose_strategy(sharding_strategy, groups)
        hybrid = hybrid_groups_of(settled, groups, device_mesh)
        shared: dict[str, Any] = {
            "backward_prefetch": backward_prefetch,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
        }
        if has_policy:
            arguments = shared | {
                "process_group": groups if device_mesh is None else None,
                "device_mesh": device_mesh,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "mixed_precision": mixed_precision,
                "ignored_states": list(ignored.parameters),
            }
            wrap_inside(module, auto_wrap_policy, type(self), arguments, ignored, hybrid)
        elif isinstance(module, nn.ModuleList | nn.ModuleDict):
            warnings.warn(
                "FSDP will not all-gather parameters for containers that do not implement forward: "
                f"{module}",
                stacklevel=2,
            )
        settings = FlatSettings(
            strategy=settled,
            groups=hybrid,
            offload=cpu_offload is not None and cpu_offload.offload_params,
            mixed_precision=mixed_precision or MixedPrecision(),
            ignored_modules=ignored.modules,
            ignored_params=ignored.parameters,
            **shared,
        )
        self._comm_hook: Callable[..., Any] | None = None
        self._comm_hook_state: object = None
        self._device_mesh = device_mesh
        self._fsdp_wrapped_module = module
        self._sharding_entry_point = EntryPoint(self, module, settings, f"{WRAPPED}.")
        hook_state_dicts(self._sharding_entry_point)
        connect()
        self._entry_point.forward_hooks.hook_errors(self)

    # The interface for users.

    @property
    def module(self) -> nn.Module:
        """The module that is wrapped."""
        return cast(nn.Module, self._modules[WRAPPED])

    @property
    def compute_device(self) -> torch.device:
        """The device of the computation."""
        return self._entry_point.compute_device

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in force: NO_SHARD over one rank."""
        return self._entry_point.settings.strategy

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks to shard over; those to replicate over if the module is not sharded."""
        return self._entry_point.settings.groups.group

    @property
    def rank(self) -> int:
        """This process's rank in `process_group`."""
        return dist.get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        """The number of ranks in `process_group`."""
        return dist.get_world_size(self.process_group)

    @property
    def training_state(self) -> TrainingState:
        """Whether the instance runs, or gives a user whole parameters, or neither."""
        if self._unit.summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.FORWARD_BACKWARD if is_running(self._unit) else TrainingState.IDLE

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes that it was given; all None by default."""
        return self._entry_point.settings.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether shards and gradients are in host memory."""
        return CPUOffload(self._entry_point.settings.offload)

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """The time at which backward gathers the next unit."""
        return self._entry_point.settings.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """Whether forward gathers the next unit ahead."""
        return self._entry_point.settings.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """The value that it was given, which has no effect."""
        return self._entry_point.settings.limit_all_gathers

    @property
    def params(self) -> list[FlatParameter]:
        """The flat parameters of this instance: none, one, or one for each dtype."""
        return [param_group.flat for param_group in flat_param_groups(self._unit.param_groups)]

    @property
    def _unit(self) -> Unit:
        return self._entry_point.unit

    @property
    def _entry_point(self) -> EntryPoint:
        return cast(EntryPoint, self.__dict__[ENTRY_POINT])

    def check_is_root(self) -> bool:
        """Returns True for the outermost instance."""
        return self._entry_point.check_is_root()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the module's forward, with unsharded parameters."""
        args, kwargs = self._entry_point.before_forward(self, args, kwargs)
        output = self.module(*args, **kwargs)
        return self._entry_point.forward_hooks.after(self, args, output)

    def __getattr__(self, name: str) -> Any:
        """Returns the wrapper's attribute, or else the module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: int) -> Any:
        """Returns the module's item at an index."""
        return self.module.__getitem__(key)  # type: ignore[operator]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_copy(self)

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse_copy(self)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Calls `fn` with every inner module; unshards parameters before and writes them back.

        Raises ArgumentError in forward, in backward and inside `summon_full_params`.
        """
        if self.training_state is not TrainingState.IDLE:
            raise ArgumentError(
                f"apply: expected to be in states [{TrainingState.IDLE}] but current state is "
                f"{self.training_state}"
            )
        with self.summon_full_params(self, recurse=False, writeback=True):
            return super().apply(fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and parameters; inside summon_full_params names without wrappers."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield self._clean(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and buffers; inside summon_full_params names without wrappers."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._clean(name), buffer

    def _clean(self, name: str) -> str:
        return name.replace(f"{WRAPPED}.", "") if self._unit.summoned else name

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FullyShardedDataParallel:
        """Reshards, then applies `to`, `half`, `cuda` and others to the sharded parameters."""
        for unit in units_of((self,)):
            unit.reshard()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    # Training.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block, backward adds gradients up on every rank and does not reduce them.

        The next backward outside reduces them; until then they stay unsharded.
        """
        if not self.check_is_root():
            raise MisuseError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on "
                "root FSDP module."
            )
        param_groups = [
            param_group for unit in units_of((self,)) for param_group in unit.param_groups
        ]
        before = [param_group.reduces for param_group in param_groups]
        for param_group in param_groups:
            param_group.reduces = False
        try:
            yield
        finally:
            for param_group, reduces in zip(param_groups, before, strict=True):
                param_group.reduces = reduces

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm is `max_norm` at most; returns the norm before.

        The norm is that of all gradients as one vector, over all ranks. All ranks call this on the
        root.
        """
        if not self.check_is_root():
            raise MisuseError("`clip_grad_norm_()` should only be called on the root FSDP instance")
        return clip_grad_norm(self, float(max_norm), float(norm_type), self.compute_device)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Makes `hook(state, gradient, shard)`, or `hook(state, gradient)`, reduce gradients.

        The hook writes the reduced gradient into `shard`, with NO_SHARD into `gradient`. Called on
        the root, for all instances. Raises AssertionError if a hook is registered already, for an
        inner instance and for hybrid strategies; ValueError for an object that cannot be called.
        """
        if not callable(hook):
            raise ArgumentError(f"The communication hook must be callable but got {hook}")
        if not self.check_is_root():
            raise TorchAssertionError("register_comm_hook can only be called on a root instance.")
        instances = list(entry_points(self))
        for entry_point in instances:
            if (
                entry_point.hook is not None
                or getattr(entry_point.owner, "_comm_hook", None) is not None
            ):
                raise TorchAssertionError("A communication hook is already registered")
            if entry_point.settings.strategy in HYBRID:
                raise TorchAssertionError(f"{HYBRID_HOOK}: {entry_point.settings.strategy}")
        for entry_point in instances:
            entry_point.hook = CommHook(state, hook)
            if isinstance(entry_point.owner, FullyShardedDataParallel):
                entry_point.owner._comm_hook, entry_point.owner._comm_hook_state = hook, state
            for param_group in flat_param_groups(entry_point.unit.param_groups):
                param_group.hook = entry_point.hook

    # Over all instances in a module.

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """Returns the instances in a module, with itself; only the outermost with `root_only`."""
        instances = [
            d for d in entry_points(module) if isinstance(d.owner, FullyShardedDataParallel)
        ]
        return [d.owner for d in instances if not root_only or d.check_is_root()]

    summon_full_params = staticmethod(summon_full_params)
    set_state_dict_type = staticmethod(set_state_dict_type)
    get_state_dict_type = staticmethod(get_state_dict_type)
    state_dict_type = staticmethod(state_dict_type)


Divided = tuple[ProcessGroup, ...]
"""The process groups over which a gradient is divided."""


def clip_grad_norm(
    module: nn.Module, max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Scales a module's gradients to at most `max_norm`; returns their norm before, as one vector.

    All ranks that share its parameters call this; communicates. Unsharded gradients count once.
    Raises ArgumentError, before it communicates, for a `norm_type` that is not above 0.
    """
    if not norm_type > 0:
        raise ArgumentError(f"norm_type is {norm_type}; give a number above 0, or inf")
    divided: dict[Divided, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for unit in units_of((module,)):
        for param_group in flat_param_groups(unit.param_groups):
            seen |= {id(parameter) for parameter in param_group.optimizer_parameters()}
            for index, parameter in enumerate(param_group.parameters):
                if (part := param_group.gradient_part(index)) is not None:
                    divided.setdefault(_groups(param_group, parameter), []).append(part)
    rest = [p.grad for p in module.parameters() if id(p) not in seen and p.grad is not None]
    divided.setdefault((), []).extend(rest)
    every = [gradient for gradients in divided.values() for gradient in gradients]
    if not every:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {dist.get_rank()} with no gradients -- "
            "returning the total norm in the default dtype torch.float32",
            stacklevel=4,
        )
    dtype = torch.float32
    for gradient in every:
        dtype = torch.promote_types(dtype, gradient.dtype.to_real())
    total = torch.zeros((), dtype=dtype, device=device)
    for groups, gradients in divided.items():
        norm = _norm(gradients, norm_type, dtype, device, groups)
        total = torch.linalg.vector_norm(torch.stack([total, norm]), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in every:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    widest = {gradient.dtype.to_real() for gradient in every}
    return total.to(widest.pop()) if len(widest) == 1 else total


def _groups(param_group: FlatParamGroup, parameter: Parameter) -> Divided:
    """Returns the process groups over which a parameter is divided, tensor parallelism included."""
    groups = [] if param_group.groups.shard.group is None else [param_group.groups.shard.group]
    spec = parameter.distributed
    if spec is not None:
        axes = [axis for axis, placed in enumerate(spec.placements) if not placed.is_replicate()]
        groups += [spec.mesh.get_group(axis) for axis in axes]
    return tuple(groups)


def _norm(
    gradients: list[torch.Tensor],
    norm_type: float,
    dtype: torch.dtype,
    device: torch.device,
    groups: Divided,
) -> torch.Tensor:
    """Returns the norm of gradients of which each rank of the groups has a part."""
    wide = [g.detach().to(torch.promote_types(dtype, g.dtype)) for g in gradients if g.numel()]
    norms = [torch.linalg.vector_norm(gradient, norm_type).to(device) for gradient in wide]
    mine = torch.zeros((), dtype=dtype, device=device)
    if norms:
        mine = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for group in groups:
        if norm_type == math.inf:
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=group)
        else:
            power = torch.pow(mine, norm_type)
            dist.all_reduce(power, group=group)
            mine = torch.pow(power, 1.0 / norm_type)
    return mine
