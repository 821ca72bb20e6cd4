"""Computes the norm of gradients that are spread over ranks, and scales the gradients."""

from __future__ import annotations

import math
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from sharding.engine.flat_param_group import FlatParamGroup, flat_param_groups
from sharding.engine.parameter import Parameter
from sharding.engine.unit import units_of
from sharding.errors import ArgumentError

Groups = tuple[ProcessGroup, ...]


def clip_grad_norm(
    module: nn.Module, max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Scales a module's gradients to at most `max_norm`; returns their norm before, as one vector.

    All ranks that share its parameters call this; communicates. Unsharded gradients count once.
    Raises ArgumentError, before it communicates, for a `norm_type` that is not above 0.
    """
    if not norm_type > 0:
        raise ArgumentError(f"norm_type is {norm_type}; give a number above 0, or inf")
    divided: dict[Groups, list[torch.Tensor]] = {}
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
        total = _join_norms(total, _norm(gradients, norm_type, dtype, device, groups), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in every:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    widest = {gradient.dtype.to_real() for gradient in every}
    return total.to(widest.pop()) if len(widest) == 1 else total


def _groups(param_group: FlatParamGroup, parameter: Parameter) -> Groups:
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
    groups: Groups,
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


def _join_norms(a: torch.Tensor, b: torch.Tensor, norm_type: float) -> torch.Tensor:
    joined: torch.Tensor = torch.linalg.vector_norm(torch.stack([a, b]), norm_type)
    return joined
