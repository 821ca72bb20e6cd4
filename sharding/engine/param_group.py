"""The parameters of a unit that share dtype and `requires_grad`: unsharded and reduced together.

[Note: tensor names]
in `sharding/engine/__init__.py` fixes the words for tensors and their shapes.
The subclasses divide the parameters: `ChunkParamGroup`, `FlatParamGroup`, `ExtensionParamGroup`.

Rules:

1. The unsharded buffer's storage is one object for the life of the group. `reshard` frees its
   memory and `unshard` fills it again, so that autograd's views from forward are valid in backward.
2. Only these wait for other ranks: `wait`, `fetch`, the `_now` methods, `Reduction.finish`, a
   communication hook, and `reshard` of a group whose all-gather is in flight.
3. A buffer whose all-gather failed belongs to the messages that may still arrive: it is neither
   freed nor filled again. The same holds after an interrupt, until all messages have arrived.
4. All ranks reduce the gradients of a group together, also a rank without gradients. A flag for
   each parameter travels with them; a parameter without a gradient on any rank keeps `grad` None.
5. Gradients are summed in rank order, then divided. float16 gradients are divided by a power of two
   before the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch
from torch import nn

from sharding.engine.composition import (
    Composition,
    HybridGroups,
    Item,
    Purpose,
    key_of,
    leave_failure,
)
from sharding.engine.parameter import (
    ChunkPacking,
    FlatPacking,
    KeptPart,
    Parameter,
    Precision,
    UnshardedBuffer,
    local_of,
)
from sharding.engine.reduction import (
    PREFETCH_BYTES,
    AllGather,
    BackwardState,
    GradHooks,
    KeptGradients,
    ReduceScatters,
    Reduction,
    ReplicaSums,
    divisors,
    flat_rows_first,
)
from sharding.engine.transport import NoGather, PendingAllGather, Transport, transport_between
from sharding.errors import ArgumentTypeError, MisuseError, TransferError, format_names


class ParamGroup(ABC):
    """See the rules at the top of this file."""

    def __init__(
        self, parameters: list[Parameter], groups: HybridGroups, precision: Precision, number: int
    ) -> None:
        self.parameters = parameters
        self.groups = groups
        self.precision = precision
        self.number = number
        """The number among the groups of a process group, equal on all ranks."""
        self.index = -1
        """The position among the groups of the runtime, equal on all ranks."""
        self.name = ", ".join([parameter.name for parameter in parameters][:2])
        """The name in errors; the runtime sets a better one."""
        self.full_precision = False
        """Whether to gather in the dtype of the shards, despite the policy."""
        self.reduces = True
        """Whether backward reduces its gradients; False leaves them to a later backward."""
        self.replicates = True
        """Whether backward sums over replicas; False leaves the sum to a later backward."""
        self.divide: float | None = None
        """The divisor of summed gradients, in place of the number of ranks."""
        self.on_gradient: Callable[[ParamGroup], None] = lambda _: None
        """A function that is called when an unsharded parameter has its gradient."""

        self.is_unsharded = False
        """Whether the unsharded buffer holds the parameters."""
        self.holders: set[object] = set()
        """The calls and others that need the parameters unsharded now."""
        self.buffer: UnshardedBuffer | None = None
        self.backward = BackwardState()
        self._buffers: dict[torch.dtype, UnshardedBuffer] = {}
        self._is_shown = False
        """Whether the modules have the unsharded parameters."""
        self._packing: ChunkPacking | FlatPacking | None = None
        self._transport: Transport | None = None
        self._all_gather: PendingAllGather | None = None
        self._error: Exception | None = None
        """The error that ended an all-gather (rule 3)."""
        self._gathered_versions: list[int] = []
        self._kept: KeptPart | None = None
        """The source of the next all-gather, in the place of the shards."""
        self._key = 0
        """The key in tags (`key_of`); 0 before it is known."""
        self._sequence = [0] * len(Purpose)
        """By purpose, the number of the last exchange."""
        self._grad_hooks = GradHooks(self.gradient_arrived)
        self._wanted = 0
        """The number of unsharded parameters that require a gradient."""
        self._replica_sums = ReplicaSums(groups.replicate)
        self._kept_gradients = KeptGradients(len(parameters))

    # The kinds of group implement these.

    @property
    @abstractmethod
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the shards."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the unsharded parameters. Raises MisuseError for the meta device."""

    @abstractmethod
    def versions(self) -> list[int]:
        """Returns the version counters of the shards: most changes of the shards change them."""

    @abstractmethod
    def take_over_replaced(self) -> None:
        """Makes a tensor that a user put in the place of a sharded parameter the sharded parameter.

        Raises ArgumentTypeError or RuntimeError for a tensor that cannot take its place.
        """

    def settle_replaced(self) -> None:
        """Calls `take_over_replaced`; leaves its error to the ranks that wait for this one."""
        try:
            self.take_over_replaced()
        except Exception as error:
            leave_failure(self.groups.shard, error)
            raise

    @abstractmethod
    def _pack(self) -> ChunkPacking | FlatPacking:
        """Returns the place of each parameter in the unsharded buffer."""

    @abstractmethod
    def _outgoing(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Returns the all-gather input: this rank's spans, flat, in `dtype`."""

    @abstractmethod
    def _parts(
        self, gradients: list[torch.Tensor], packing: ChunkPacking | FlatPacking
    ) -> list[list[torch.Tensor]]:
        """Returns the reduce-scatter input: by rank, flat, its part of every slot's gradient."""

    @abstractmethod
    def accumulate_shard_grads(self, sums: list[torch.Tensor], flags: list[float]) -> None:
        """Adds reduced gradients to the accumulated gradients of the shards. Local.

        `sums` are this rank's parts of the summed gradients, flat. `flags` are the sums over ranks
        of the flags that `_flat_gradients` made: 0 if no rank has a gradient.
        """

    def place_unsharded(self) -> None:
        """Puts the unsharded parameters into the modules."""
        for parameter, leaf in zip(self.parameters, self.unsharded, strict=True):
            parameter.place(leaf)

    def place_sharded(self) -> None:
        """Puts the sharded parameters into the modules."""
        for parameter in self.parameters:
            parameter.place(parameter.sharded)

    def wants_gradient(self, index: int) -> bool:
        return self.parameters[index].sharded.requires_grad

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Yields every place in the modules that has a parameter of the group."""
        for parameter in self.parameters:
            yield from parameter.owners

    def fill_places(self, parameter: Parameter) -> None:
        """Fills the new places of a parameter like its other places."""
        parameter.place(parameter.sharded)

    # Dtypes.

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the all-gather and of the unsharded parameters."""
        stored = self.stored_dtype
        if self.full_precision or not stored.is_floating_point:
            return stored
        return self.precision.param_dtype or stored

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are sent and summed."""
        if not self.dtype.is_floating_point:  # a complex gradient has no cast to a real dtype
            return self.dtype
        return self.precision.reduce_dtype or self.dtype

    @property
    def requires_grad(self) -> bool:
        """True if a parameter of the group is trained."""
        return any(self.wants_gradient(index) for index in range(len(self.parameters)))

    @property
    def is_trained(self) -> bool:
        """True if a parameter of the group is trained on this rank, or on one that has told so."""
        return self.requires_grad or self.backward.trained_elsewhere

    # Unshard and reshard.

    @property
    def unsharded(self) -> list[torch.Tensor]:
        """The unsharded parameters; none before the first all-gather."""
        return [] if self.buffer is None else self.buffer.leaves

    @property
    def is_used(self) -> bool:
        """True after the first all-gather: the layout in memory is fixed."""
        return bool(self._buffers)

    @property
    def unsharded_bytes(self) -> int:
        """The bytes of the last unsharded buffer; `PREFETCH_BYTES` before the first one."""
        return PREFETCH_BYTES if self.buffer is None else self.buffer.unsharded_bytes

    def unshard(self, batch: AllGather) -> None:
        """Starts the all-gather with the batch, unless it is done or in flight.

        All ranks of the group call it in the same order. Raises MisuseError after an all-gather
        that failed.
        """
        if self._error is not None:
            names = format_names([parameter.name for parameter in self.parameters], 3)
            raise MisuseError(
                f"the ranks could not gather the parameters {names} before "
                f"({self._error}), and this process group cannot gather them any more: start the "
                "job again; the shards can still be saved"
            ) from self._error
        if not self.is_gathered:
            self.settle_replaced()
            self._gathered_versions = self.versions()
            self._all_gather = self._gather(batch)

    @property
    def is_gathered(self) -> bool:
        """True if the parameters are unsharded or in flight."""
        return self.is_unsharded or self._all_gather is not None

    @property
    def is_replaced(self) -> bool:
        """True if other tensors are in the places of the sharded parameters, as far as known."""
        return False

    @property
    def is_stale(self) -> bool:
        """True if the shards are known to have changed since they were gathered."""
        return self.is_gathered and self._gathered_versions != self.versions()

    def wait(self) -> None:
        """Waits for the all-gather; puts the unsharded parameters into the modules."""
        if self._all_gather is not None:
            self._await(self._all_gather)
            self._assemble()
        if not self.is_unsharded:
            self.is_unsharded = True
            self._wanted = self._grad_hooks.prepare(self.unsharded, self.wants_gradient)
            self._is_shown = False
        if not self._is_shown:
            self._is_shown = True
            self.place_unsharded()

    def _await(self, gathering: PendingAllGather) -> None:
        """Waits for an all-gather. After an error it never ends; after an interrupt it may."""
        try:
            gathering.wait()
        except Exception as error:
            self._all_gather, self._error = None, error
            raise
        self._all_gather = None

    def show_sharded(self) -> None:
        """Puts the sharded parameters into the modules; unsharded ones may stay in memory."""
        if self._is_shown:
            self._is_shown = False
            self.place_sharded()

    def reshard(self) -> None:
        """Puts the sharded parameters into the modules and frees the unsharded buffer."""
        self.holders.clear()
        if self._all_gather is not None:
            # No caller needs the parameters now, and a later `unshard` raises the error.
            with suppress(TransferError):
                self._await(self._all_gather)
                self._free()
        if self.is_unsharded:
            self.is_unsharded = False
            self.show_sharded()
            self._free()

    def release(self, holder: object) -> None:
        """Reshards if no other holder needs the parameters unsharded."""
        self.holders.discard(holder)
        if not self.holders:
            self.reshard()

    def keep_part(self, size: int) -> None:
        """Before a release: keep this rank's part among `size` ranks for the next all-gather."""
        if self.is_unsharded and self.buffer is not None and len(self.holders) <= 1:
            self._kept = KeptPart.of(self.buffer, self.groups.shard.part(size))

    def drop_kept(self) -> None:
        """Drops a kept part: the next all-gather reads the shards."""
        self._kept = None

    def fetch(self) -> UnshardedBuffer:
        """Returns a new `stored_dtype` buffer with the unsharded parameters. Collective; waits."""
        packing, _ = self._packing_and_transport()
        buffer = UnshardedBuffer.of(packing.slots, packing.numel, self.stored_dtype, self.device)
        self.all_gather_now(self._outgoing(self.stored_dtype), buffer)
        return buffer

    def all_gather_now(self, mine: list[torch.Tensor], buffer: UnshardedBuffer) -> None:
        """Fills a buffer of the group's layout from all ranks' spans. Collective; waits."""
        packing, transport = self._packing_and_transport()
        composition = Composition((self._next_item(Purpose.ALL_GATHER),))
        transport.all_gather(mine, buffer.places(packing), composition).wait()

    def all_reduce_now(self, flat: torch.Tensor) -> None:
        """All-reduces a flat tensor over the shard group, in place. Collective; waits."""
        _, transport = self._packing_and_transport()
        transport.all_reduce(flat, Composition((self._next_item(Purpose.REDUCE_SCATTER),)))

    def _packing_and_transport(self) -> tuple[ChunkPacking | FlatPacking, Transport]:
        if self._packing is None or self._transport is None:
            self._packing = self._pack()
            self._transport = transport_between(self.groups.shard, self.device)
        return self._packing, self._transport

    def _gather(self, batch: AllGather) -> PendingAllGather:
        """Starts to fill the unsharded buffer."""
        packing, transport = self._packing_and_transport()
        self.buffer = self._buffer(self.dtype)
        self.buffer.allocate()
        if self._kept is not None:
            kept, self._kept = self._kept, None
            among = transport_between(kept.shard_group, self.device)
            item = self._next_item(Purpose.REGATHER)
            return batch.add(among, kept.part, kept.places(self.buffer), item)
        if not self._needs_gathering(self.buffer):
            return NoGather()
        mine = self.buffer.split(packing.spans(self.groups.shard.rank), self._outgoing(self.dtype))
        item = self._next_item(Purpose.ALL_GATHER)
        return batch.add(transport, mine, self.buffer.places(packing), item)

    def _needs_gathering(self, buffer: UnshardedBuffer) -> bool:
        """Returns False if the buffer is the memory of the shards."""
        return True

    def _buffer(self, dtype: torch.dtype) -> UnshardedBuffer:
        """Returns the unsharded buffer of a dtype; a new one has memory."""
        if dtype not in self._buffers:
            packing, memory = self._packing or self._pack(), self._shared_memory(dtype)
            self._buffers[dtype] = UnshardedBuffer(
                packing.slots, packing.numel, dtype, self.device, self._leaf, memory
            )
        return self._buffers[dtype]

    def _shared_memory(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns the shard if it is the unsharded buffer of this dtype too; None if it is not."""
        return None

    def _leaf(self, index: int, view: torch.Tensor) -> torch.Tensor:
        """Returns the unsharded parameter over a view of the unsharded buffer."""
        return nn.Parameter(view, requires_grad=False)

    def _assemble(self) -> None:  # noqa: B027 - most kinds have nothing to do
        """Makes the unsharded parameters of an all-gather that has arrived."""

    def _free(self) -> None:
        """Frees the memory of the unsharded parameters."""
        if self.buffer is not None:
            self.buffer.free()

    def _forget_forms(self) -> None:
        """Drops buffers and layout: the parameters have another dtype, shape or device."""
        self._buffers.clear()
        self.buffer = None
        self._packing = self._transport = None
        self._grad_hooks.clear()

    def set_name(self, name: str, parameters: list[str]) -> None:
        """Sets the name for errors; `parameters` are the names in the root module, for tags."""
        self.name = name
        self._key = key_of(self.number, parameters, (p.shape for p in self.parameters))

    def _next_item(self, purpose: Purpose) -> Item:
        """Returns this group's part of the next exchange for a purpose."""
        if not self._key:
            self.set_name(self.name, [parameter.name for parameter in self.parameters])
        self._sequence[purpose] += 1
        return Item(self.name, self._key, purpose, self._sequence[purpose])

    # From gradients of unsharded parameters to accumulated gradients.

    def gradient_arrived(self, index: int) -> None:
        """Notes that backward has added to the gradient of an unsharded parameter."""
        self.backward.arrive(index)
        self.on_gradient(self)

    @property
    def is_complete(self) -> bool:
        """True if no further gradient comes in this backward."""
        return 0 < self._wanted == len(self.backward.final)

    def hold_gradients(self) -> None:
        """Keeps gradients, in `reduce_dtype`, for a later backward that reduces. Local."""
        self.backward.clear()
        if self.reduce_dtype != self.dtype:
            self._kept_gradients.keep(self._take_gradients())

    def reduce(self, batch: ReduceScatters) -> Reduction | None:
        """Takes the gradients from the unsharded parameters; reduces them with the batch.

        Returns None if they are reduced already.

        All ranks of the group call it in the same order. Raises ArgumentTypeError for a sparse
        gradient.
        """
        packing, transport = self._packing_and_transport()
        self.backward.start_reduction()
        present = [0] * len(self.parameters)
        gradients = self._flat_gradients(present)
        flags = torch.tensor(present, dtype=self.reduce_dtype)
        flags = flags.to(self.device, non_blocking=True)  # pageable memory: nobody waits
        known = None if self.reads_counts or 0 in present else [1.0] * len(present)
        before, after = divisors(self.groups.size, self.reduce_dtype, self.divide)
        if before != 1:
            torch._foreach_div_(gradients, before)
        parts = [[*of_rank, flags] for of_rank in self._parts(gradients, packing)]
        sums = batch.add(transport, parts, self._next_item(Purpose.REDUCE_SCATTER))
        item = self._next_item(Purpose.ALL_REDUCE)
        return Reduction(
            sums, partial(self._replicate, item), after, self.accumulate_shard_grads, known
        )

    @property
    def reads_counts(self) -> bool:
        """Whether the group needs the sums of flags, and not only whether they are above 0."""
        return False

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all unsharded gradients in `reduce_dtype`."""
        return self._packing_and_transport()[0].numel * self.reduce_dtype.itemsize

    def forget(self) -> None:
        """Drops the gradients of a backward that ended with an error."""
        buffers = self._buffers.values()
        for leaf in (*self.unsharded, *(leaf for buffer in buffers for leaf in buffer.leaves)):
            leaf.grad = None
        self._kept_gradients = KeptGradients(len(self.parameters))
        self._replica_sums = ReplicaSums(self.groups.replicate)
        self.end_backward()
        self.reshard()

    def end_backward(self) -> None:
        self.backward = BackwardState()

    def _replicate(self, item: Item, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the sums over the shard's replicas; empty if a later backward sums. Waits."""
        return self._replica_sums.over(sums, item, self.device, self.replicates)

    def _flat_gradients(self, present: list[int]) -> list[torch.Tensor]:
        """Returns each slot's gradient, flat, rows first; without one, zeros and a flag of 0."""
        packing, _ = self._packing_and_transport()
        release = self._kept_gradients.release
        gradients = [release(*taken) for taken in enumerate(self._take_gradients())]
        present[:] = [int(gradient is not None) for gradient in gradients]
        return flat_rows_first(packing.slots, gradients, self.reduce_dtype, self.device)

    def _take_gradients(self) -> list[torch.Tensor | None]:
        """Returns this rank's gradients in `reduce_dtype`; the unsharded parameters lose theirs.

        Raises ArgumentTypeError for a sparse gradient.
        """
        taken: list[torch.Tensor | None] = [None] * len(self.parameters)
        for index, leaf in enumerate(self.unsharded):  # none before the first all-gather
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:
                continue
            parameter = self.parameters[index]
            if gradient.layout is not torch.strided:
                raise ArgumentTypeError(
                    f"{parameter.name} has a gradient of layout {gradient.layout}, which cannot be "
                    "reduced to shards; make it dense, by sparse=False for an embedding"
                )
            local = local_of(gradient.detach(), parameter.distributed)
            taken[index] = local.to(self.reduce_dtype)
        return taken
