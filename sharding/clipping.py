"""The norm of gradients that are spread over ranks, and scaling them to it."""

from __future__ import annotations

import math
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from sharding.flat_bucket import flat_buckets
from sharding.runtime import units_of


def clip_grad_norm(
    module: nn.Module, max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """The norm of all gradients in a module, as of one vector; they are scaled to `max_norm`.

    All ranks that share its parameters call it. What is not sharded counts once.
    """
    sharded: dict[ProcessGroup | None, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for unit in units_of((module,)):
        for bucket in flat_buckets(unit.buckets):
            gradients = sharded.setdefault(bucket.sharing.peers.group, [])
            for parameter in bucket.seen():
                seen.add(id(parameter))
                if parameter.grad is not None:
                    gradients.append(parameter.grad)
    rest = [p.grad for p in module.parameters() if id(p) not in seen and p.grad is not None]
    sharded.setdefault(None, []).extend(rest)
    every = [gradient for gradients in sharded.values() for gradient in gradients]
    if not every:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {dist.get_rank()} with no gradients -- "
            "returning the total norm in the default dtype torch.float32",
            stacklevel=4,
        )
    dtype = torch.float32
    for gradient in every:
        dtype = torch.promote_types(dtype, gradient.dtype)
    total = torch.zeros((), dtype=dtype, device=device)
    for group, gradients in sharded.items():
        total = _joined(total, _norm(gradients, norm_type, dtype, device, group), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in every:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    widest = {gradient.dtype for gradient in every}
    return total.to(widest.pop()) if len(widest) == 1 else total


def _norm(
    gradients: list[torch.Tensor],
    norm_type: float,
    dtype: torch.dtype,
    device: torch.device,
    group: ProcessGroup | None,
) -> torch.Tensor:
    """The norm of gradients of which each rank of a group has a part."""
    norms = [
        torch.linalg.vector_norm(gradient.detach().to(dtype), norm_type).to(device)
        for gradient in gradients
        if gradient.numel()
    ]
    mine = torch.zeros((), dtype=dtype, device=device)
    if norms:
        mine = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if group is None:
        return mine
    if norm_type == math.inf:
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=group)
        return mine
    power = torch.pow(mine, norm_type)
    dist.all_reduce(power, group=group)
    return torch.pow(power, 1.0 / norm_type)


def _joined(a: torch.Tensor, b: torch.Tensor, norm_type: float) -> torch.Tensor:
    joined: torch.Tensor = torch.linalg.vector_norm(torch.stack([a, b]), norm_type)
    return joined
