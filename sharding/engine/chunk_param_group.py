"""The parameter group of `fully_shard`: each parameter is a DTensor, cut by torch.chunk's rule.

A parameter that is a DTensor over a mesh of tensor parallelism is cut further. Its unsharded
parameter is the user's DTensor, over the memory of the unsharded buffer.

[Note: hooks]
A parameter may define its own all-gather, by two hooks of its local tensor.

    fsdp_pre_all_gather(mesh) -> (inputs, metadata)
    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype) -> (unsharded, tensors to free)
    fsdp_post_all_gather(outputs, metadata, param_dtype, out=unsharded) -> None

A shard may be stored, gathered and used in three different forms: quantised, as two tensors, as a
subclass or not. The hooks are methods of a tensor subclass, or attributes of one plain tensor. The
first all-gather of a parameter decides whether it has hooks.

Rules:

1. An output is the inputs of all ranks, joined along the sharded dimension of the parameter (along
   the first if an input has fewer dimensions). If a parameter divides unevenly, each input has this
   rank's rows, or is padded to the largest number of rows of a rank. Padding does not travel.
2. Outputs and the tensors to free keep their storages: `reshard` frees their memory, `unshard`
   fills it again. Autograd's saved views of the unsharded parameter are valid again in backward,
   and autograd sees no change.
3. The hooks run without autograd, and on all ranks in the same order.
4. A gradient of the shard's own subclass is reduced tensor by tensor, and the result is of the
   subclass again, if the subclass wraps floating-point tensors of its own shape. Any other gradient
   is reduced as one plain tensor, if necessary a copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from itertools import islice

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from sharding.engine.composition import HybridGroups, Purpose, ShardGroup
from sharding.engine.param_group import ParamGroup
from sharding.engine.parameter import (
    ChunkPacking,
    FlatPacking,
    Parameter,
    Precision,
    as_dtensor,
    is_hooked,
    pack,
    shard_in_front,
)
from sharding.engine.reduction import AllGather, Form, Output, flat_rows_first
from sharding.engine.transport import PendingAllGather
from sharding.errors import (
    ArgumentError,
    ArgumentTypeError,
    MisuseError,
    TorchAssertionError,
    format_names,
)
from sharding.layout.box import chunk
from sharding.policies import MixedPrecisionPolicy
from sharding.torch_versions import release_with_groups, side_by_side

ALIGN_BYTES = 64
PLAIN, PARTED = 1, 2
"""Marks of a gradient: one plain tensor, or tensor by tensor. 0 means no gradient."""


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


def split_by_hooks(param_group: ParamGroup) -> list[ParamGroup]:
    """Returns the groups for a group's parameters: each one with hooks gets its own group.

    Called before a parameter group is first gathered; all units that use it get the same result.
    """
    if (
        param_group.is_used
        or isinstance(param_group, ExtensionParamGroup)
        or not isinstance(param_group, ChunkParamGroup)
    ):
        return [param_group]
    if all(parameter.param_group is param_group for parameter in param_group.parameters):
        param_group.settle_replaced()
        hooked = [p for p in param_group.parameters if is_hooked(p.sharded, p.name)]
        taken = {id(parameter) for parameter in hooked}
        plain = [p for p in param_group.parameters if id(p) not in taken]
        if hooked:
            placing, policy, number = param_group.placing, param_group.policy, param_group.number
            _move(hooked, ExtensionParamGroup(hooked, placing, policy, number), param_group)
            if plain:
                _move(plain, ChunkParamGroup(plain, placing, policy, number), param_group)
    found = (parameter.param_group for parameter in param_group.parameters)
    return list(dict.fromkeys(each for each in found if isinstance(each, ParamGroup)))


def _move(parameters: list[Parameter], to: ChunkParamGroup, of: ChunkParamGroup) -> None:
    to.reduces, to.replicates, to.divide = of.reduces, of.replicates, of.divide
    to.reduced_hook, to.on_gradient = of.reduced_hook, of.on_gradient
    for parameter in parameters:
        parameter.param_group = to


class ExtensionParamGroup(ChunkParamGroup):
    """Parameters with hooks: see [Note: hooks]."""

    _extensions: Sequence[_Extension] = ()
    _unsharded: Sequence[torch.Tensor] = ()

    @property
    def unsharded(self) -> list[torch.Tensor]:
        """The unsharded parameters, as the hooks made them."""
        return list(self._unsharded)

    @property
    def is_used(self) -> bool:
        """True after the first all-gather."""
        return bool(self._unsharded)

    @property
    def dtype(self) -> torch.dtype:
        """The common dtype of all unsharded parameters."""
        dtypes = {unsharded.dtype for unsharded in self._unsharded if unsharded.is_floating_point()}
        return reduce(torch.promote_types, dtypes) if dtypes else super().dtype

    def _pack(self) -> ChunkPacking:
        slots = [e.entry for e in self._extensions for _ in range(e.parts_of_gradient)]
        packed = pack([p.shape for p in slots], [p.dim for p in slots])
        return ChunkPacking(packed, self.groups.shard.size)

    def _gather(self, batch: AllGather) -> PendingAllGather:
        _, transport = self._packing_and_transport()
        if not self._extensions:
            self._extensions = [
                _Extension(parameter, self.placing, self.policy) for parameter in self.parameters
            ]
        mine: list[torch.Tensor] = []
        places: list[list[torch.Tensor]] = [[] for _ in range(self.groups.shard.size)]
        with torch.inference_mode(False), torch.no_grad():
            for extension in self._extensions:
                for piece, output in extension.start():
                    mine.append(piece)
                    for rank, of_rank in enumerate(places):
                        of_rank.append(output.place(rank))
        return batch.add(transport, mine, places, self._next_item(Purpose.ALL_GATHER))

    def _assemble(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            wholes = [extension.finish() for extension in self._extensions]
        if not self._unsharded:
            self._unsharded = wholes
            self._packing = self._pack()

    def _free(self) -> None:
        for extension in self._extensions:
            extension.free()

    def keep_part(self, size: int) -> None:
        """Keeps nothing: hooks take the whole outputs, not parts of them."""

    # Gradients: a slot for each tensor that a gradient wraps.

    def _flat_gradients(self, present: list[int]) -> list[torch.Tensor]:
        packing, _ = self._packing_and_transport()
        tensors: list[torch.Tensor | None] = []
        for index, (extension, unsharded) in enumerate(
            zip(self._extensions, self._unsharded, strict=True)
        ):
            gradient, unsharded.grad = unsharded.grad, None
            gradient = self._kept_gradients.release(index, gradient)
            if gradient is None:
                tensors += [None] * extension.parts_of_gradient
                continue
            present[index], parts = extension.take_apart(gradient.detach())
            if present[index] == PARTED:
                present[index] = self.groups.size + 1  # more than the sum of plain marks
            tensors += [part.to(self.reduce_dtype) for part in parts]
        return flat_rows_first(packing.slots, tensors, self.reduce_dtype, self.device)

    @property
    def reads_counts(self) -> bool:
        return True  # a flag may be PARTED on another rank

    def accumulate_shard_grads(self, sums: list[torch.Tensor], flags: list[float]) -> None:
        """Puts reduced gradients together and adds them to the gradients of the shards."""
        sums, flags = self._through_hook(sums, flags)
        left = iter(sums)
        for extension, flag in zip(self._extensions, flags, strict=True):
            entry = extension.entry
            mine = list(islice(left, extension.parts_of_gradient))
            if flag > 0:
                tensors = [self._as_shard(entry, tensor) for tensor in mine]
                mark = PARTED if flag > self.groups.size else PLAIN
                self._accumulate(entry, extension.put_together(mark, tensors))


class _Extension:
    """One parameter with hooks: its all-gather outputs, and the unsharded parameter."""

    def __init__(self, entry: Parameter, placing: MeshGroups, policy: MixedPrecisionPolicy) -> None:
        self.entry = entry
        self._shard_group = placing.groups.shard
        self._mesh = _shard_mesh(placing.mesh)
        self._policy = policy
        self._outputs: list[Output] = []
        self._metadata: object = None
        self._unsharded: nn.Parameter | None = None
        self._inner: list[torch.Tensor] = []
        """The plain tensors to free, and those that the unsharded parameter wraps."""
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        """Storages to free, and their bytes."""
        self._names: list[str] = []
        """The attributes of the subclass for the tensors that are reduced (rule 4 of the hooks)."""

    @property
    def parts_of_gradient(self) -> int:
        """The number of tensors that are reduced for the gradient."""
        return len(self._names) or 1

    def start(self) -> list[tuple[torch.Tensor, Output]]:
        """Returns this rank's inputs as bytes, each with its output."""
        inputs, self._metadata = self._inputs()
        forms = [self._form(tensor) for tensor in inputs]
        if self._outputs and forms != [output.form for output in self._outputs]:
            raise MisuseError(
                f"fsdp_pre_all_gather of {self.entry.name} returned {forms} this time and "
                f"{[output.form for output in self._outputs]} before; its inputs must keep their "
                "shapes and dtypes"
            )
        if not self._outputs:
            self._outputs = [
                Output(form, tensor.device) for form, tensor in zip(forms, inputs, strict=True)
            ]
        for output in self._outputs:
            output.allocate()
        pieces = [
            form.rows_first(t, self._shard_group.rank)
            for form, t in zip(forms, inputs, strict=True)
        ]
        return list(zip(pieces, self._outputs, strict=True))

    def finish(self) -> nn.Parameter:
        """Returns the unsharded parameter, made from the outputs, which have arrived."""
        hook = getattr(storage_of(self.entry), "fsdp_post_all_gather")  # noqa: B009
        outputs = tuple(output.join() for output in self._outputs)
        dtype = self.entry.sharded.dtype
        if dtype.is_floating_point:
            dtype = self._policy.param_dtype or dtype
        metadata, self._metadata = self._metadata, None
        if self._unsharded is None:
            unsharded, inner = hook(outputs, metadata, dtype)
            self._unsharded = self._record(unsharded, inner)
            return self._unsharded
        for storage, nbytes in self._freed:
            storage.resize_(nbytes)
        with ExitStack() as kept:
            for tensor in (self._unsharded, *self._inner):
                kept.enter_context(_unsafe_preserve_version_counter(tensor))
            hook(outputs, metadata, dtype, out=self._unsharded)
        return self._unsharded

    def free(self) -> None:
        """Frees the memory of outputs and inner tensors."""
        for output in self._outputs:
            output.free()
        for storage, _ in self._freed:
            storage.resize_(0)

    def take_apart(self, gradient: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
        """Returns a gradient's mark, and the tensors to reduce for it."""
        if self._names and type(gradient) is type(storage_of(self.entry)):
            return PARTED, [getattr(gradient, name) for name in self._names]
        return PLAIN, [_as_plain(gradient)] * self.parts_of_gradient

    def put_together(self, mark: int, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Returns the shard's gradient, from this rank's parts of the reduced tensors."""
        if mark == PLAIN:
            return tensors[0]
        local = storage_of(self.entry).detach()
        _, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {
            name: _at_its_beginning(tensor.to(getattr(local, name).dtype))
            for name, tensor in zip(self._names, tensors, strict=True)
        }
        gradient = type(local).__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, local.shape, local.stride()
        )
        assert isinstance(gradient, torch.Tensor)
        return gradient

    def _inputs(self) -> tuple[list[torch.Tensor], object]:
        """Returns the result of the first hook, called in either of its forms."""
        entry = self.entry
        if not is_hooked(entry.sharded, entry.name):
            raise MisuseError(
                f"the local tensor of {entry.name} was replaced by one without "
                "fsdp_pre_all_gather and fsdp_post_all_gather; set them on the new one"
            )
        hook = getattr(storage_of(entry), "fsdp_pre_all_gather")  # noqa: B009
        signature = inspect.signature(hook)
        if len(signature.parameters) == 1:
            inputs, metadata = hook(self._mesh)
        elif len(signature.parameters) == 5:
            size = torch.Size(entry.shape)
            stride = torch.empty(size, device="meta").stride()
            inputs, metadata = hook(self._mesh, size, stride, entry.owners[0][0], self._policy)
        else:
            raise TorchAssertionError(
                f"Invalid fsdp_pre_all_gather: {signature} of {entry.name}; it takes (mesh) or "
                "(mesh, outer_size, outer_stride, module, mp_policy)"
            )
        plain = [_as_plain(tensor) for tensor in inputs]
        return [t if t.ndim else t.reshape(1) for t in plain], metadata

    def _form(self, tensor: torch.Tensor) -> Form:
        """Returns the layout of the ranks' inputs in an output (rule 1 of the hooks)."""
        entry, shard_group = self.entry, self._shard_group
        rows = entry.shape[entry.dim] if entry.shape else 1
        along = entry.dim if entry.dim < tensor.ndim else 0
        chunks = (chunk(rows, shard_group.size, rank) for rank in range(shard_group.size))
        counts = tuple(hi - lo for lo, hi in chunks)
        length = tensor.shape[along]
        if rows % shard_group.size == 0:
            counts = (length,) * shard_group.size
        elif length not in (counts[shard_group.rank], counts[0]):
            raise TorchAssertionError(
                f"{entry.name} of shape {entry.shape} is unevenly sharded over {shard_group.size} "
                f"ranks: fsdp_pre_all_gather must return tensors with {counts[shard_group.rank]} "
                "rows, or "
                f"padded to {counts[0]}, but one has shape {tuple(tensor.shape)}"
            )
        rest = (*tensor.shape[:along], *tensor.shape[along + 1 :])
        return Form(counts, tuple(rest), along, tensor.dtype)

    def _record(self, unsharded: torch.Tensor, inner: Sequence[torch.Tensor]) -> nn.Parameter:
        """Records the unsharded parameter and its storages, for later all-gathers."""
        entry = self.entry
        size = torch.Size(entry.shape)
        if unsharded.shape != size:
            if unsharded.numel() < size.numel():
                raise ArgumentError(
                    f"fsdp_post_all_gather of {entry.name} returned a tensor of shape "
                    f"{tuple(unsharded.shape)}; the parameter has shape {entry.shape}"
                )
            unsharded = unsharded.as_strided(size, torch.empty(size, device="meta").stride())
        parameter = nn.Parameter(unsharded, requires_grad=False)
        to_free = [plain for tensor in inner for plain in _plain_tensors(tensor)]
        self._inner = [*to_free, *_plain_tensors(unsharded)]
        self._freed = [(t.untyped_storage(), t.untyped_storage().nbytes()) for t in to_free]
        local = storage_of(entry)
        if type(unsharded) is type(local) and hasattr(unsharded, "__tensor_flatten__"):
            names: list[str] = list(unsharded.__tensor_flatten__()[0])
            tensors = [getattr(unsharded, name) for name in names]
            if all(t.shape == size and t.is_floating_point() for t in tensors):
                self._names = names
        return parameter


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor; a copy of a subclass, which decides what it copies into a plain one."""
    if type(tensor) is torch.Tensor:
        return tensor
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    plain.copy_(tensor)
    return plain


def _at_its_beginning(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor at offset 0 of its storage: subclasses may need one inner offset."""
    return tensor.clone() if tensor.storage_offset() else tensor


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors with memory that a tensor wraps; itself if it is plain."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names
    if names is None:
        raise ArgumentError(
            f"a mesh of {mesh.ndim} dimensions needs names for fsdp_pre_all_gather to get the last "
            "of them; pass mesh_dim_names to init_device_mesh"
        )
    return mesh[names[-1]]
