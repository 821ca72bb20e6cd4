"""The parameter group of `fully_shard`: each parameter is a DTensor, cut by torch.chunk's rule.

A parameter that is a DTensor over a mesh of tensor parallelism is cut further. Its unsharded
parameter is the user's DTensor, over the memory of the unsharded buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from sharding.engine.composition import HybridGroups, ShardGroup
from sharding.engine.param_group import ParamGroup
from sharding.engine.parameter import (
    ChunkPacking,
    FlatPacking,
    Parameter,
    Precision,
    as_dtensor,
    pack,
    shard_in_front,
)
from sharding.engine.reduction import AllGather
from sharding.engine.transport import PendingAllGather
from sharding.errors import ArgumentError, ArgumentTypeError, MisuseError, format_names
from sharding.policies import MixedPrecisionPolicy
from sharding.torch_versions import release_with_groups, side_by_side

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """A device mesh, and the groups of its dimensions."""

    mesh: DeviceMesh
    groups: HybridGroups

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshGroups:
        """Returns the groups of a mesh: its last dimension shards, the first of two replicates."""
        release_with_groups(mesh)
        if mesh.ndim == 1:
            return cls(mesh, HybridGroups(ShardGroup.of(mesh.get_group()), ShardGroup.alone()))
        if mesh.ndim == 2:
            shard, replicate = (ShardGroup.of(mesh.get_group(axis)) for axis in (1, 0))
            return cls(mesh, HybridGroups(shard, replicate))
        raise ArgumentError(
            f"fully_shard takes a mesh of one or two dimensions, to shard over or to replicate and "
            f"to shard over, not of {mesh.ndim}: {mesh}"
        )

    def parameter(self, original: nn.Parameter, dim: int, offload: bool) -> nn.Parameter:
        """Returns the sharded parameter: this rank's part in new memory."""
        unsharded = original.detach()
        spec = self._spec(unsharded, dim)
        if isinstance(unsharded, DTensor):
            unsharded = unsharded.to_local()
        part = unsharded
        if unsharded.ndim:
            rank, parts = self.groups.shard.rank, unsharded.chunk(self.groups.shard.size, dim)
            part = parts[rank] if rank < len(parts) else unsharded.narrow(dim, 0, 0)
        part = part.clone(memory_format=torch.contiguous_format)
        if offload and part.device.type not in ("cpu", "meta"):
            part = part.cpu()
        return nn.Parameter(as_dtensor(part, spec), requires_grad=original.requires_grad)

    def _spec(self, unsharded: torch.Tensor, dim: int) -> DTensorSpec:
        mesh, behind = self.mesh, unsharded._spec if isinstance(unsharded, DTensor) else None
        if isinstance(unsharded, DTensor):
            joined = side_by_side(self.mesh, unsharded.device_mesh)
            if joined is None:
                raise ArgumentError(
                    f"a parameter over {unsharded.device_mesh} cannot be sharded over {self.mesh}: "
                    "make both meshes slices of one mesh with named dimensions, of which those of "
                    "fully_shard come first"
                )
            mesh = joined
        own: Placement = shard_in_front(dim, behind) if unsharded.ndim else Replicate()
        placements = (own, *(() if behind is None else behind.placements))
        replicated = [Replicate()] * (self.mesh.ndim - 1)
        stride = torch.empty(unsharded.shape, device="meta").stride()
        meta = TensorMeta(unsharded.shape, stride, unsharded.dtype)
        return DTensorSpec(mesh, (*replicated, *placements), tensor_meta=meta)


def storage_of(parameter: Parameter) -> torch.Tensor:
    """Returns this rank's shard: the very tensor in the sharded parameter."""
    tensor: torch.Tensor = parameter.sharded._local_tensor  # type: ignore[attr-defined]
    return tensor


class ChunkParamGroup(ParamGroup):
    """See the top of this file."""

    def __init__(
        self,
        parameters: list[Parameter],
        placing: MeshGroups,
        policy: MixedPrecisionPolicy,
        number: int,
    ) -> None:
        precision = Precision(policy.param_dtype, policy.reduce_dtype)
        super().__init__(parameters, placing.groups, precision, number)
        self.placing = placing
        self.policy = policy
        self._arrives_rows_first = True
        self.reduced_hook: Callable[[torch.Tensor], None] | None = None
        """The user's hook for the reduced gradients, flat, with the flags behind them."""

    @property
    def stored_dtype(self) -> torch.dtype:
        return storage_of(self.parameters[0]).dtype

    @property
    def device(self) -> torch.device:
        """The device of the unsharded parameters. Raises RuntimeError for the meta device."""
        device = storage_of(self.parameters[0]).device
        if device.type == "meta":
            names = format_names([parameter.name for parameter in self.parameters], 3)
            raise MisuseError(
                f"parameters are on the meta device ({names}); materialize them with "
                "module.to_empty(device=...) and initialize or load them before the first forward"
            )
        if device.type == "cpu" and self.placing.mesh.device_type != "cpu":
            return torch.device(
                self.placing.mesh.device_type, torch.accelerator.current_device_index()
            )
        return device

    def versions(self) -> list[int]:
        """Returns the counters of DTensors plus those of local tensors: each operation counts.

        Foreach and fused optimizers change neither counter.
        """
        shards = [parameter.sharded for parameter in self.parameters]
        return [s._version + s._local_tensor._version for s in shards]  # type: ignore[attr-defined]

    def take_over_replaced(self) -> None:
        """Takes over parameters that, for example, `to_empty()` has replaced."""
        before = self.stored_dtype if self.is_used else None
        for parameter in self.parameters:
            module, attribute = parameter.owners[0]
            current = module._parameters[attribute]
            if current is parameter.sharded or current is None:
                continue
            if not _fits(current, parameter.sharded):
                raise ArgumentTypeError(
                    f"{parameter.name}, which fully_shard made {_describe(parameter.sharded)}, "
                    f"was replaced by {_describe(current)}; replace it by a DTensor with its mesh "
                    "and placements, or copy_ into it"
                )
            parameter.sharded = current
            parameter.place(current)
        if before is not None and self.stored_dtype != before:  # after module.to(dtype)
            self._forget_forms()

    def _parts(
        self, gradients: list[torch.Tensor], packing: ChunkPacking | FlatPacking
    ) -> list[list[torch.Tensor]]:
        assert isinstance(packing, ChunkPacking)
        return [
            [flat[lo:hi] for flat, (lo, hi) in zip(gradients, packing.cuts(rank), strict=True)]
            for rank in range(self.groups.shard.size)
        ]

    def accumulate_shard_grads(self, sums: list[torch.Tensor], flags: list[float]) -> None:
        sums, flags = self._through_hook(sums, flags)
        for parameter, flag, flat in zip(self.parameters, flags, sums, strict=True):
            if flag > 0:
                self._accumulate(parameter, self._as_shard(parameter, flat))

    @property
    def reads_counts(self) -> bool:
        return self.reduced_hook is not None

    def _through_hook(
        self, sums: list[torch.Tensor], flags: list[float]
    ) -> tuple[list[torch.Tensor], list[float]]:
        """Returns the sums and flags after the user's hook, if there is one."""
        if self.reduced_hook is None:
            return sums, flags
        marks = torch.tensor(flags, dtype=sums[0].dtype, device=sums[0].device)
        flat = torch.cat([*(part.reshape(-1) for part in sums), marks])
        self.reduced_hook(flat)
        *parts, marks = torch.split(flat, [*(part.numel() for part in sums), len(flags)])
        return parts, marks.real.tolist()

    def _pack(self) -> ChunkPacking:
        dtype = self.dtype
        shapes = [parameter.shape for parameter in self.parameters]
        dims = [parameter.dim for parameter in self.parameters]
        slots = pack(shapes, dims, max(1, ALIGN_BYTES // dtype.itemsize))
        return ChunkPacking(slots, self.groups.shard.size)

    def _gather(self, batch: AllGather) -> PendingAllGather:
        self._arrives_rows_first = self._kept is None  # a kept part is in row-major order
        return super()._gather(batch)

    def _assemble(self) -> None:
        if self._arrives_rows_first and self.buffer is not None:
            self.buffer.set_row_major()

    def _outgoing(self, dtype: torch.dtype) -> list[torch.Tensor]:
        flat, device, stored_dtype = [], self.device, self.stored_dtype
        for parameter in self.parameters:
            local = storage_of(parameter).detach()
            if local.dtype != stored_dtype and self.precision.param_dtype is None:
                raise MisuseError(
                    f"{parameter.name} has become {local.dtype}, and {self.parameters[0].name} of "
                    f"the same unit is {stored_dtype}; convert all of the unit's parameters, or "
                    "give fully_shard their modules one by one"
                )
            if parameter.dim:
                local = local.movedim(parameter.dim, 0)
            if local.dtype != dtype or local.device != device:
                local = local.to(device, dtype)
            flat.append(local.contiguous().view(-1))
        return flat

    def _leaf(self, index: int, view: torch.Tensor) -> torch.Tensor:
        spec = self.parameters[index].distributed
        if spec is not None:
            view = as_dtensor(view, spec)
        return nn.Parameter(view, requires_grad=False)

    def _as_shard(self, parameter: Parameter, flat: torch.Tensor) -> torch.Tensor:
        """Returns a reduced gradient, flat with rows first, in the shape of the shard."""
        shape = storage_of(parameter).shape
        if not parameter.dim:
            return flat.view(shape)
        moved = (shape[parameter.dim], *shape[: parameter.dim], *shape[parameter.dim + 1 :])
        return flat.view(moved).movedim(0, parameter.dim).contiguous()

    def _accumulate(self, parameter: Parameter, gradient: torch.Tensor) -> None:
        sharded, shard = parameter.sharded, storage_of(parameter)
        if gradient.dtype != shard.dtype or gradient.device != shard.device:
            gradient = gradient.to(shard.device, shard.dtype)
        if sharded.grad is None:
            sharded.grad = as_dtensor(gradient, sharded._spec)  # type: ignore[attr-defined]
        else:
            sharded.grad._local_tensor += gradient  # type: ignore[attr-defined]
        for hook in tuple((getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(sharded)


def _fits(current: nn.Parameter, sharded: nn.Parameter) -> bool:
    """Whether a parameter can take the place of a sharded one."""
    if not isinstance(current, DTensor) or not isinstance(sharded, DTensor):
        return False
    alike = current.shape == sharded.shape and current.placements == sharded.placements
    if not alike or current.device_mesh != sharded.device_mesh:
        return False
    return current._local_tensor.shape == sharded._local_tensor.shape


def _describe(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}"
    local = tuple(tensor._local_tensor.shape)
    return (
        f"a DTensor of shape {tuple(tensor.shape)}, {local} on this rank, with "
        f"{tensor.placements} over {tensor.device_mesh}"
    )
