"""Loss scaling for gradients of which each rank sees only its own shards.

An infinite or undefined value is in one rank's shard only. Alone, this rank would skip its step and
lower its scale, and the ranks would train different models from then on. Here the ranks agree.

Rules:

1. All searches for such values (`unscale_`, `step`, and the fused optimizers' own check) go through
   `_unscale_grads_`, and all ranks leave it with the same answer.
2. All ranks communicate there, equally often, whether or not they hold a gradient: the tensors
   exchanged depend on the groups and on the parameters, never on this rank's gradients.

Names and signatures are those of `torch.distributed.fsdp.sharded_grad_scaler`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import overload
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sharding.errors import ArgumentError
from sharding.torch_versions import dereference

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` with which either all ranks step or all skip, with one scale.

    Gradients may be on any device and of any floating-point dtype, float16 included, as
    `keep_low_precision_grads` leaves them. All ranks of `process_group` (None: all ranks) call
    `scale`, `step` and `update`; `step` and `unscale_` communicate.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._process_group = None if process_group is None else ref(process_group)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that step together; None for all ranks. Raises DestroyedGroupError."""
        return None if self._process_group is None else dereference(self._process_group)

    @overload
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...

    @overload
    def scale(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]: ...

    @overload
    def scale(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]: ...

    @overload
    def scale(self, outputs: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]: ...

    def scale(
        self, outputs: torch.Tensor | Iterable[torch.Tensor]
    ) -> torch.Tensor | Iterable[torch.Tensor]:
        """Returns the outputs times the scale, each in its own dtype; keeps lists and tuples.

        The scale is a float32 scalar, which would otherwise turn a half-precision loss into
        float32.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if not isinstance(outputs, Iterable):
            raise ArgumentError("outputs must be a Tensor or an iterable of Tensors")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiplies the gradients in place; returns, on all ranks, whether one was not finite.

        `found_inf` becomes 1.0 if so and is the one value of the result. float16 is allowed,
        also with `allow_fp16=False`.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for values in _gradient_values(parameters):
            alike[values.device, values.dtype].append(values)
        for (device, _), tensors in alike.items():
            found_here = torch.zeros_like(found_inf, device=device)
            # A copy into host memory that nobody waits for is read before it has arrived.
            there = inv_scale.to(device, non_blocking=device.type != "cpu")
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_here, there)
            found_inf.copy_(torch.maximum(found_inf, found_here.to(found_inf.device)))
        for group in self._groups(parameters):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)
        return {found_inf.device: found_inf}

    def _groups(self, parameters: list[nn.Parameter]) -> Iterator[dist.ProcessGroup | None]:
        """Yields the groups that must agree, one after the other, so that all ranks agree.

        The default group has all ranks. A user's group may lack ranks over which a parameter is
        sharded; then the parameters' own meshes agree too.
        """
        if self.process_group is None:
            if dist.is_initialized():
                yield None
            return
        yield self.process_group
        meshes = dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor))
        for mesh in meshes:
            yield from mesh.get_all_groups()


def _gradient_values(parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
    """Yields the memory of this rank's part of each gradient."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            yield gradient._local_tensor
        elif gradient.is_sparse:
            # The sum of finite entries at one place may be infinite.
            parameter.grad = gradient.coalesce()
            yield parameter.grad._values()
        else:
            yield gradient
