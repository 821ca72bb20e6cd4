"""Parameters that define their own all-gather, by two hooks of the local tensor.

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

All-gather outputs of extensions: the inputs of all ranks, joined in memory that can be freed.

Inputs are joined along one dimension. Ranks may have different numbers of indices along it, their
*rows*. Inputs travel as bytes, rows first, so that the rows of a rank are one range of bytes. The
range arrives in its final place if the joined dimension is the first, and is moved there otherwise.

The storage of an output stays the same object, so that its users find the same tensor when the
storage is filled again. Writes use aliases with version counters of their own: autograd sees no
change.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from math import prod

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh

from sharding.engine.chunk_param_group import ChunkParamGroup, MeshGroups, storage_of
from sharding.engine.composition import Purpose
from sharding.engine.param_group import ParamGroup
from sharding.engine.parameter import ChunkPacking, Parameter, chunk, is_hooked, pack
from sharding.engine.reduction import AllGather
from sharding.engine.transport import PendingAllGather
from sharding.errors import ArgumentError, MisuseError, TorchAssertionError
from sharding.policies import MixedPrecisionPolicy

PLAIN, PARTED = 1, 2
"""Marks of a gradient: one plain tensor, or tensor by tensor. 0 means no gradient."""


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
    """See the rules at the top of this file."""

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
        flat: list[torch.Tensor] = []
        for index, (extension, unsharded) in enumerate(
            zip(self._extensions, self._unsharded, strict=True)
        ):
            gradient, unsharded.grad = unsharded.grad, None
            gradient = self._kept_gradients.release(index, gradient)
            if gradient is None:
                shape, device = extension.entry.shape, unsharded.device
                tensors = [torch.zeros(shape, dtype=self.reduce_dtype, device=device)]
                tensors *= extension.parts_of_gradient
            else:
                present[index], tensors = extension.take_apart(gradient.detach())
                if present[index] == PARTED:
                    present[index] = self.groups.size + 1  # more than the sum of plain marks
            dim = extension.entry.dim
            for tensor in tensors:
                rows_first = tensor.to(self.reduce_dtype)
                rows_first = rows_first.movedim(dim, 0) if dim else rows_first
                flat.append(rows_first.contiguous().view(-1))
        return flat

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
        """The attributes of the subclass for the tensors that are reduced (rule 4)."""

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
        """Returns the layout of the ranks' inputs in an output (rule 1)."""
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
    """Returns the dimension of a mesh that shards."""
    if mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names
    if names is None:
        raise ArgumentError(
            f"a mesh of {mesh.ndim} dimensions needs names for fsdp_pre_all_gather to get the last "
            "of them; pass mesh_dim_names to init_device_mesh"
        )
    return mesh[names[-1]]


@dataclass(frozen=True, slots=True)
class Form:
    """The layout of the ranks' inputs in an output."""

    counts: tuple[int, ...]
    """By rank, the number of rows: indices of the dimension along which the inputs are joined."""
    rest: tuple[int, ...]
    """The sizes of the other dimensions."""
    along: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.rest) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the output."""
        return sum(self.counts) * self.row_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The output's shape."""
        return (*self.rest[: self.along], sum(self.counts), *self.rest[self.along :])

    def rows_first(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns this rank's input without padding, as it travels: bytes, rows first."""
        tensor = tensor.detach().narrow(self.along, 0, self.counts[rank])
        return tensor.movedim(self.along, 0).contiguous().view(-1).view(torch.uint8)


class Output:
    """One tensor that is gathered: its memory is allocated and freed, its storage object stays."""

    def __init__(self, form: Form, device: torch.device) -> None:
        self.form = form
        self._tensor = torch.empty(form.shape, dtype=form.dtype, device=device)
        self._storage = self._tensor.untyped_storage()
        # Bytes that arrive are written through aliases with version counters of their own.
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._bytes.set_(self._storage, 0, (form.nbytes,), (1,))
        self._alias = torch.empty(0, dtype=form.dtype, device=device)
        self._alias.set_(self._storage, 0, form.shape, self._tensor.stride())
        self._landing = self._bytes

    def allocate(self) -> None:
        self._storage.resize_(self.form.nbytes)
        if self.form.along:
            self._landing = torch.empty_like(self._bytes)

    def place(self, rank: int) -> torch.Tensor:
        """Returns the place of the bytes of a rank's input."""
        lo = sum(self.form.counts[:rank]) * self.form.row_bytes
        return self._landing[lo : lo + self.form.counts[rank] * self.form.row_bytes]

    def join(self) -> torch.Tensor:
        """Returns the ranks' inputs, joined, once all have arrived."""
        if self._landing is not self._bytes:
            rows = self._landing.view(self.form.dtype).view(-1, *self.form.rest)
            self._alias.copy_(rows.movedim(0, self.form.along))
            self._landing = self._bytes
        return self._tensor

    def free(self) -> None:
        self._landing = self._bytes
        self._storage.resize_(0)
