"""The parameters of a unit that share dtype and `requires_grad`: sharded, whole, and back.

Words: the *sharded* parameter is what the optimizer sees; the *whole* parameter is a view of the
bucket's full buffer, a leaf of autograd, that the module has while it computes. This file says when
and in which order things happen; how parameters are divided and what the optimizer sees is said by
the kinds of bucket: `ChunkBucket` and `FlatBucket`.

Rules:

1. The full buffer's storage is one object for the bucket's life, emptied by `reshard` and filled
   again by `unshard`: what autograd saved of it in forward is right again in backward.
2. The gradients of a bucket are reduced together, whether they exist on this rank or not; `None` on
   all ranks stays None: a flag for every parameter travels with them.
3. Nothing but `wait`, `Reduction.finish` and a communication hook waits for other ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from sharding.batches import AHEAD_BYTES, Gathers, Reductions
from sharding.full_buffer import FullBuffer, plain
from sharding.packing import ChunkPacking, FlatPacking
from sharding.peers import Peers, Sharing
from sharding.transport import Gathering, Summing, Transport, transport_between

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

GATHER, REDUCE, REPLICATE, REGATHER = range(4)
"""What messages are for; each has tags of its own."""
TURNS = 64
"""How many turns of one purpose go by before a tag is used again."""


@dataclass(eq=False)
class Parameter:
    """One parameter of a unit, and every place in the modules that has it."""

    name: str
    owners: list[tuple[nn.Module, str]]
    sharded: nn.Parameter
    dim: int
    shape: tuple[int, ...]
    """Unsharded."""
    bucket: Bucket | None = None
    distributed: DTensorSpec | None = None
    """What the whole parameter is as a DTensor, where tensor parallelism divides it besides."""

    def place(self, tensor: torch.Tensor) -> None:
        """Put the sharded or the whole parameter into its modules."""
        for module, attribute in self.owners:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = tensor  # type: ignore[assignment]
            else:  # it wants to know: nn.LSTM keeps a list of its own
                setattr(module, attribute, tensor)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a bucket's gathered parameters and reductions; None leaves them alone."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    """Whether shards get gradients in the dtype they were reduced in."""


class Bucket(ABC):
    """See the rules at the top of this file."""

    def __init__(
        self, parameters: list[Parameter], sharing: Sharing, precision: Precision, tag: int
    ) -> None:
        self.parameters = parameters
        self.sharing = sharing
        self.precision = precision
        self.tag = tag
        """The first of those that its messages carry."""
        self.index = -1
        """Its place among the buckets of its runtime, the same on all ranks."""
        self.is_whole = False
        """Whether the full buffer has the whole parameters."""
        self._is_shown = False
        """Whether the modules have them."""
        self.holders: set[object] = set()
        """Who needs the parameters whole now."""
        self.on_gradient: Callable[[Bucket], None] = _nobody
        """Called when a whole parameter has got its gradient."""
        self.full_precision = False
        """Whether parameters are gathered in the dtype they are kept in, whatever the policy."""
        self.divide: float | None = None
        """What sums of gradients are divided by, in place of the number of ranks."""

        self.first: int | None = None
        """Where it was used first in the forwards that this backward reaches."""
        self.outstanding = 0
        """Uses in forward that backward has not reached yet."""
        self.arrived: set[int] = set()
        """Of which parameters this backward has completed the gradient, not reduced yet."""
        self.trained_elsewhere = False
        """Whether another rank has said that it trains it in this iteration."""
        self.reduced = False
        """Whether this backward has started a reduction."""
        self.reduces = True
        """Whether a backward reduces gradients, or leaves them to a later one."""
        self.replicates = True
        """Whether sums go on to the ranks that hold the same shard, or wait for those that do."""
        self.owes = False
        """Whether backwards that did not reduce have left gradients to one that will."""

        self.buffer: FullBuffer | None = None
        self._buffers: dict[torch.dtype, FullBuffer] = {}
        self._packing: ChunkPacking | FlatPacking | None = None
        self._transport: Transport | None = None
        self._replication: Transport | None = None
        self._gathering: Gathering | None = None
        self._kept: tuple[torch.Tensor, Peers] | None = None
        """This rank's part of the full buffer among fewer ranks, to gather from in backward."""
        self._turns = [0, 0, 0, 0]
        self._hooked: set[int] = set()
        self._wanted = 0
        """How many of the whole parameters require a gradient."""
        self._waiting_sums: list[torch.Tensor] = []
        """Of backwards that did not replicate."""
        self._gathered_versions: list[int] = []
        self._held: list[torch.Tensor | None] = [None] * len(parameters)

    # What the kinds of bucket say.

    @property
    @abstractmethod
    def stored_dtype(self) -> torch.dtype:
        """What the shards are kept in."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the parameters are used. Raises RuntimeError where they cannot be."""

    @abstractmethod
    def versions(self) -> list[int]:
        """Version counters of the shards: they tell whether they were changed, most of the time."""

    @abstractmethod
    def wants_gradient(self, index: int) -> bool:
        """Whether a parameter is to be trained."""

    @abstractmethod
    def take_over_replaced(self) -> None:
        """What a user put in the place of the sharded parameters is what is sharded."""

    @abstractmethod
    def _pack(self) -> ChunkPacking | FlatPacking:
        """Where everything lies."""

    @abstractmethod
    def _outgoing(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """This rank's spans, flat."""

    @abstractmethod
    def _place_whole(self) -> None:
        """The modules have the whole parameters."""

    @abstractmethod
    def _place_sharded(self) -> None:
        """The modules have the sharded parameters."""

    @abstractmethod
    def deliver(self, sums: list[torch.Tensor], flags: list[float]) -> None:
        """The shards have got what was reduced: those of parameters with a gradient anywhere.

        `flags` are sums over ranks as well, of what `_flat_gradients` made of every parameter: 0
        where no rank has a gradient.
        """

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Every place in the modules that has a parameter of the bucket."""
        for parameter in self.parameters:
            yield from parameter.owners

    def placed_more(self, parameter: Parameter) -> None:
        """A parameter has more places than before: what is there is what is in the others."""
        parameter.place(parameter.sharded)

    # Dtypes.

    @property
    def dtype(self) -> torch.dtype:
        """What the parameters are gathered and used in."""
        stored = self.stored_dtype
        if self.full_precision or not stored.is_floating_point:
            return stored
        return self.precision.param_dtype or stored

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What gradients are sent and summed in."""
        return self.precision.reduce_dtype or self.dtype

    @property
    def requires_grad(self) -> bool:
        """True when some parameter is to be trained."""
        return any(self.wants_gradient(index) for index in range(len(self.parameters)))

    @property
    def is_trained(self) -> bool:
        """True when some parameter is to be trained, here or on a rank that said so."""
        return self.requires_grad or self.trained_elsewhere

    # Whole and sharded.

    @property
    def whole(self) -> list[torch.Tensor]:
        """The whole parameters."""
        return [] if self.buffer is None else self.buffer.leaves

    @property
    def is_used(self) -> bool:
        """True once it has been gathered: its form is settled."""
        return bool(self._buffers)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer, as it was used last; as if large where there is none."""
        return AHEAD_BYTES if self.buffer is None else self.buffer.numel * self.buffer.raw.itemsize

    def unshard(self, batch: Gathers) -> None:
        """Gather with the batch, unless the parameters are whole or on their way."""
        if not self.is_gathered:
            self.take_over_replaced()
            self._gathered_versions = self.versions()
            self._gathering = self._gather(batch)

    @property
    def is_gathered(self) -> bool:
        """True when the parameters are whole or on their way."""
        return self.is_whole or self._gathering is not None

    @property
    def is_stale(self) -> bool:
        """True when the shards are known to have changed since they were gathered."""
        return self.is_gathered and self._gathered_versions != self.versions()

    def wait(self) -> None:
        """The whole parameters are in the modules."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self._assemble()
        if not self.is_whole:
            self.is_whole = True
            self._wanted = sum(map(self._prepare_for_autograd, range(len(self.parameters))))
            self._is_shown = False
        if not self._is_shown:
            self._is_shown = True
            self._place_whole()

    def show_sharded(self) -> None:
        """The modules have the sharded parameters, whether the whole ones stay in memory or not."""
        if self._is_shown:
            self._is_shown = False
            self._place_sharded()

    def reshard(self) -> None:
        """The sharded parameters are in the modules, and the full buffer has no memory."""
        self.holders.clear()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self._free()
        if self.is_whole:
            self.is_whole = False
            self.show_sharded()
            self._free()

    def release(self, holder: object) -> None:
        """Reshard when nobody else needs the parameters whole."""
        self.holders.discard(holder)
        if not self.holders:
            self.reshard()

    def keep_part(self, size: int) -> None:
        """Before a release: keep this rank's part among `size` ranks, to gather from next time."""
        if self.is_whole and self.buffer is not None and len(self.holders) <= 1:
            peers = self.sharing.peers.part(size)
            lo, hi = _even_part(self.buffer.numel, peers.size, peers.rank)
            self._kept = self.buffer.raw[lo:hi].clone(), peers

    def drop_kept(self) -> None:
        """What was kept is not used: the next gather is from the shards."""
        self._kept = None

    def fetch(self) -> FullBuffer:
        """The whole parameters in the dtype they are kept in, in a buffer of their own. Waits."""
        packing, transport = self._settled()
        stored = self.stored_dtype
        buffer = FullBuffer(packing.slots, packing.numel, stored, self.device, plain)
        outgoing, places = self._outgoing(stored), buffer.places(packing)
        transport.gather(outgoing, places, self._next_tag(GATHER)).wait()
        return buffer

    def _settled(self) -> tuple[ChunkPacking | FlatPacking, Transport]:
        if self._packing is None or self._transport is None:
            self._packing = self._pack()
            self._transport = transport_between(self.sharing.peers, self.device)
            self._replication = transport_between(self.sharing.replicas, self.device)
        return self._packing, self._transport

    def _gather(self, batch: Gathers) -> Gathering:
        """Start filling the full buffer."""
        packing, transport = self._settled()
        self.buffer = self._buffer(self.dtype)
        self.buffer.allocate()
        if self._kept is not None:
            part, peers = self._kept
            self._kept = None
            ranges = [_even_part(self.buffer.numel, peers.size, r) for r in range(peers.size)]
            among = transport_between(peers, self.device)
            places = [[self.buffer.raw[lo:hi]] for lo, hi in ranges]
            return batch.add(among, [part], places, self._next_tag(REGATHER))
        if not self._needs_gathering(self.buffer):
            return _Nothing()
        outgoing, places = self._outgoing(self.dtype), self.buffer.places(packing)
        return batch.add(transport, outgoing, places, self._next_tag(GATHER))

    def _needs_gathering(self, buffer: FullBuffer) -> bool:
        """Whether the buffer is other memory than the shards'."""
        return True

    def _buffer(self, dtype: torch.dtype) -> FullBuffer:
        """The bucket's buffer of a dtype; it has memory when it is new."""
        if dtype not in self._buffers:
            packing, _ = self._settled()
            leaf = self._leaf
            buffer = FullBuffer(packing.slots, packing.numel, dtype, self.device, leaf)
            self._buffers[dtype] = buffer
            self._hooked.clear()
        return self._buffers[dtype]

    def _leaf(self, index: int, view: torch.Tensor) -> torch.Tensor:
        """The whole parameter over a view of the full buffer."""
        return nn.Parameter(view, requires_grad=False)

    def _assemble(self) -> None:  # noqa: B027 - most kinds have nothing to do
        """What `_gather` started has arrived: the whole parameters are made of it."""

    def _free(self) -> None:
        """Give back the memory of the whole parameters."""
        if self.buffer is not None:
            self.buffer.free()

    def _forget_forms(self) -> None:
        """The parameters are others than before: nothing that was made for them fits."""
        self._buffers.clear()
        self.buffer = None
        self._packing = self._transport = None
        self._hooked.clear()

    def _next_tag(self, purpose: int) -> int:
        turn = self._turns[purpose]
        self._turns[purpose] = (turn + 1) % TURNS
        return self.tag + 2 * (purpose * TURNS + turn)

    def _prepare_for_autograd(self, index: int) -> bool:
        """Whether the whole parameter requires a gradient, as the sharded one does, and tells."""
        whole, wanted = self.whole[index], self.wants_gradient(index)
        if whole.requires_grad != wanted:
            whole.requires_grad_(wanted)
        if wanted and id(whole) not in self._hooked:
            self._hooked.add(id(whole))
            hook = partial(self._has_gradient, index)
            whole.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return wanted

    def _has_gradient(self, index: int, whole: torch.Tensor) -> None:
        self.arrived.add(index)
        self.on_gradient(self)

    # Gradients.

    @property
    def is_complete(self) -> bool:
        """True when backward has reached every use and completed every gradient."""
        return self.outstanding <= 0 and 0 < self._wanted == len(self.arrived)

    def hold_gradients(self) -> None:
        """Keep unreduced gradients, in the reduction's dtype, for a later backward that reduces."""
        self.owes = True
        self.arrived.clear()
        if self.reduce_dtype != self.dtype:
            for index, whole in enumerate(self.whole):
                gradient, whole.grad = whole.grad, None
                if gradient is not None:
                    gradient = self._local(index, gradient).to(self.reduce_dtype)
                    self._held[index] = self._plus_held(index, gradient)

    def reduce(self, batch: Reductions) -> Reduction | Finished:
        """Reduce the gradients of the whole parameters, which lose them, with the batch."""
        packing, transport = self._settled()
        self.reduced, self.owes = True, False
        self.arrived.clear()
        present = [0] * len(self.parameters)
        gradients = self._flat_gradients(present)
        flags = torch.tensor(present, dtype=self.reduce_dtype, device=self.device)
        before, after = self._divisors()
        if before != 1:
            torch._foreach_div_(gradients, before)
        parts = [[*of_rank, flags] for of_rank in self._parts(gradients, packing)]
        summing = batch.add(transport, parts, self._next_tag(REDUCE))
        replicate = partial(self._replicate, self._next_tag(REPLICATE))
        return Reduction(self, summing, replicate, after)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients as they are reduced."""
        return self._settled()[0].numel * self.reduce_dtype.itemsize

    def forget(self) -> None:
        """A backward ended with an error: its gradients that are not in the shards are gone."""
        for buffer in self._buffers.values():
            for leaf in buffer.leaves:
                leaf.grad = None
        self._held = [None] * len(self.parameters)
        self.owes = False
        self.end_backward()
        self.reshard()

    def end_backward(self) -> None:
        """The next backward begins with nothing of this one."""
        self.first = None
        self.outstanding = 0
        self.arrived.clear()
        self.reduced = self.trained_elsewhere = False

    def _parts(
        self, gradients: list[torch.Tensor], packing: ChunkPacking | FlatPacking
    ) -> list[list[torch.Tensor]]:
        """By rank, what it gets of every slot's gradient."""
        assert isinstance(packing, ChunkPacking)
        return [
            [flat[lo:hi] for flat, (lo, hi) in zip(gradients, packing.cuts(rank), strict=True)]
            for rank in range(self.sharing.peers.size)
        ]

    def _divisors(self) -> tuple[float, float]:
        """What gradients are divided by before and after they are summed.

        float16 would overflow, so there a power of two comes before: its range is all it costs. To
        other dtypes a power of two makes no difference, wherever it comes.
        """
        size = self.sharing.size
        if self.divide is not None:
            return 1.0, self.divide
        if self.reduce_dtype != torch.float16:
            return 1.0, float(size)
        before = predivisor(size)
        return before, size / before

    def _replicate(self, tag: int, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums over all ranks that hold the same shard; none if they are to wait. Waits."""
        if self._replication is None or self.sharing.replicas.size == 1:
            return sums
        if self._waiting_sums:
            torch._foreach_add_(sums, self._waiting_sums)
            self._waiting_sums = []
        if not self.replicates:
            self._waiting_sums = sums
            return []
        flat = torch.cat([part.reshape(-1) for part in sums])
        self._replication.all_reduce(flat, tag)
        return list(torch.split(flat, [part.numel() for part in sums]))

    def _flat_gradients(self, present: list[int]) -> list[torch.Tensor]:
        """By slot, the gradient, flat, rows first; zeros, and not present, where there is none."""
        packing, _ = self._settled()
        dtype, flat = self.reduce_dtype, []
        for index, (slot, gradient) in enumerate(
            zip(packing.slots, self._take_gradients(), strict=True)
        ):
            if gradient is None:
                flat.append(torch.zeros(slot.numel, dtype=dtype, device=self.device))
                continue
            present[index] = 1
            if slot.dim:
                gradient = gradient.movedim(slot.dim, 0)
            flat.append(gradient.contiguous().view(-1))
        return flat

    def _take_gradients(self) -> list[torch.Tensor | None]:
        """By parameter, its gradient in the reduction's dtype, with what was held; they lose it."""
        taken: list[torch.Tensor | None] = []
        dtype = self.reduce_dtype
        for index, whole in enumerate(self.whole or [None] * len(self.parameters)):
            gradient = None
            if whole is not None:
                gradient, whole.grad = whole.grad, None
            if gradient is not None:
                gradient = self._local(index, gradient.detach())
                if gradient.dtype != dtype:
                    gradient = gradient.to(dtype)
            taken.append(self._plus_held(index, gradient))
            self._held[index] = None
        return taken

    def _local(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """What this rank reduces of a gradient: all of it, unless it is itself distributed."""
        return gradient

    def _plus_held(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        held = self._held[index]
        if held is None or gradient is None:
            return gradient if held is None else held
        return held + gradient


class Reduction:
    """Gradients on their way to the ranks that hold the shards."""

    def __init__(
        self,
        bucket: Bucket,
        summing: Summing,
        replicate: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        divide: float,
    ) -> None:
        self.bucket = bucket
        self._summing = summing
        self._replicate = replicate
        self._divide = divide

    def finish(self) -> None:
        """The shards have their gradients. Once only."""
        summed = self._replicate(self._summing.wait())
        if not summed:
            return
        *sums, flags = summed
        if self._divide != 1 and sums:
            torch._foreach_div_(sums, self._divide)
        self.bucket.deliver(sums, flags.tolist())


class Finished:
    """A reduction that was done when it was started."""

    def finish(self) -> None:
        """The shards have their gradients."""


class _Nothing:
    """What is gathered where there is nothing to gather."""

    def wait(self) -> None:
        """It is there."""


def predivisor(size: int) -> float:
    """The power of two nearest the square root of the ranks: half of the range on either side.

    >>> [predivisor(size) for size in (1, 2, 4, 8)]
    [1.0, 2.0, 2.0, 4.0]
    """
    factor = 1
    while size % factor == 0 and size / factor > factor:
        factor *= 2
    return float(factor)


def _even_part(numel: int, size: int, rank: int) -> tuple[int, int]:
    step = -(-numel // size)
    return min(numel, rank * step), min(numel, (rank + 1) * step)


def _nobody(bucket: Bucket) -> None:
    """Nobody asked to be told of gradients."""
