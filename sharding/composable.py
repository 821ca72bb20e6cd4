"""`fully_shard` with flat parameters: the entry point that keeps the module's class.

Torch had a function of this name and form up to 2.5. The function of the same name with a DTensor
for each parameter is `sharding.fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from sharding.errors import ArgumentError
from sharding.fsdp1.entry_point import (
    ENTRY_POINT,
    EntryPoint,
    FlatSettings,
    Groups,
    check_not_sharded,
    choose_strategy,
    chosen_groups,
    entry_point_of,
    find_ignored,
    hybrid_groups_of,
    wrap_inside,
)
from sharding.fsdp1.state_dicts import hook_state_dicts
from sharding.fsdp1.torch_state_dict import connect
from sharding.fsdp1.wrapper import clip_grad_norm
from sharding.policies import CPUOffload, MixedPrecision, ShardingStrategy

__all__ = ["clip_grad_norm_", "fully_shard"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def fully_shard(
    module: ModuleT,
    *,
    process_group: Groups | None = None,
    policy: Any = None,
    strategy: ShardingStrategy | None = None,
    mixed_precision: MixedPrecision | None = None,
    cpu_offload: CPUOffload | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    device_id: int | str | torch.device | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    sync_module_states: bool = False,
    forward_prefetch: bool = False,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
) -> ModuleT:
    """Returns `module`; its parameters, gradients and optimizer state are divided over ranks.

    The module keeps its class and its names. It keeps its parameters too, each reduced to this
    rank's elements, flat. `FullyShardedDataParallel` documents the arguments; `policy` is its
    `auto_wrap_policy`. `state_dict()` gives full plain tensors unless
    `FullyShardedDataParallel.set_state_dict_type` sets another kind. All ranks call this, in the
    same order; it communicates only with `sync_module_states`.

    Raises as `FullyShardedDataParallel` does.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = fully_shard(nn.Linear(2, 3), strategy=ShardingStrategy.NO_SHARD)
    >>> type(model).__name__, {k: tuple(v.shape) for k, v in model.state_dict().items()}
    ('Linear', {'weight': (3, 2), 'bias': (3,)})
    >>> dist.destroy_process_group()
    """
    check_not_sharded(module)
    ignored = find_ignored(module, ignored_modules, ignored_states)
    groups = chosen_groups(
        strategy or ShardingStrategy.FULL_SHARD, process_group, None, policy is not None
    )
    settled = choose_strategy(strategy, groups)
    hybrid = hybrid_groups_of(settled, groups)
    shared: dict[str, Any] = {
        "device_id": device_id,
        "param_init_fn": param_init_fn,
        "sync_module_states": sync_module_states,
        "forward_prefetch": forward_prefetch,
    }
    if policy is not None:
        arguments = shared | {
            "process_group": groups,
            "strategy": strategy,
            "mixed_precision": mixed_precision,
            "cpu_offload": cpu_offload,
            "ignored_states": list(ignored.parameters),
        }
        wrap_inside(module, policy, fully_shard, arguments, ignored, hybrid)
    settings = FlatSettings(
        strategy=settled,
        groups=hybrid,
        use_orig_params=True,
        offload=cpu_offload is not None and cpu_offload.offload_params,
        mixed_precision=mixed_precision or MixedPrecision(),
        ignored_modules=ignored.modules,
        ignored_params=ignored.parameters,
        **shared,
    )
    entry_point = EntryPoint(module, module, settings, "")
    module.__dict__[ENTRY_POINT] = entry_point
    hook_state_dicts(entry_point)
    connect()
    module.register_forward_pre_hook(entry_point.before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(entry_point.forward_hooks.after)
    entry_point.forward_hooks.hook_errors(module)
    return module


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales all gradients so that their norm is `max_norm` at most; returns the norm before.

    The norm is that of all gradients as one vector, over all ranks. All ranks call this with the
    outermost module. (`torch.nn.utils.clip_grad_norm_` would see each rank's parts alone.) Raises
    ValueError if the module was not given to `fully_shard`.
    """
    entry_point = entry_point_of(module)
    if entry_point is None:
        raise ArgumentError(
            f"{type(module).__name__} was not given to ckpt.sharding.composable.fully_shard"
        )
    return clip_grad_norm(module, float(max_norm), float(norm_type), entry_point.compute_device)
