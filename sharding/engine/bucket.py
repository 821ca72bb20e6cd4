"""The parameters of a unit that share dtype and `requires_grad`, and their gradients.

How parameters are gathered is said in gathered.py; here, how their gradients are reduced. The kinds
of bucket say how parameters are divided: `ChunkBucket`, `FlatBucket`, `ExtensionBucket`.

Rules:

1. The gradients of a bucket are reduced together, whether they exist on this rank or not; `None` on
   all ranks stays None: a flag for every parameter travels with them.
2. They are summed in rank order and then divided; a power of two of it before, in float16.
3. Nothing but `Reduction.finish` and a communication hook waits for other ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch

from sharding.comm_hooks import predivide_factor
from sharding.engine.batches import Reductions
from sharding.engine.composition import Composition, Item, Purpose
from sharding.engine.gathered import Gathered
from sharding.engine.packing import ChunkPacking, FlatPacking
from sharding.engine.parameter import Parameter, Precision
from sharding.engine.peers import Sharing
from sharding.engine.transport import Summing, Transport, transport_between


class Bucket(Gathered):
    """See the rules at the top of this file."""

    def __init__(
        self, parameters: list[Parameter], sharing: Sharing, precision: Precision, number: int
    ) -> None:
        super().__init__(parameters, sharing, precision, number)
        self.index = -1
        """Its place among the buckets of its runtime, the same on all ranks."""
        self.on_gradient: Callable[[Bucket], None] = _nobody
        """Called when a whole parameter has got its gradient."""
        self.divide: float | None = None
        """What sums of gradients are divided by, in place of the number of ranks."""

        self.first: int | None = None
        """Where it was used first in the forwards that this backward reaches."""
        self.outstanding = 0
        """Uses in forward that backward has not come to yet, of all forwards since the last."""
        self.due = 0
        """Those of them in the forwards that this backward reaches."""
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

        self._replication: Transport | None = None
        self._waiting_sums: list[torch.Tensor] = []
        """Of backwards that did not replicate."""
        self._held: list[torch.Tensor | None] = [None] * len(parameters)
        """Gradients that a backward did not reduce, in the dtype of the reduction."""

    @abstractmethod
    def deliver(self, sums: list[torch.Tensor], flags: list[float]) -> None:
        """The shards have got what was reduced: those of parameters with a gradient anywhere.

        `flags` are sums over ranks as well, of what `_flat_gradients` made of every parameter: 0
        where no rank has a gradient.
        """

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What gradients are sent and summed in."""
        return self.precision.reduce_dtype or self.dtype

    @property
    def is_trained(self) -> bool:
        """True when some parameter is to be trained, here or on a rank that said so."""
        return self.requires_grad or self.trained_elsewhere

    # From backward to the shards.

    def gradient_arrived(self, index: int) -> None:
        """Backward has completed the gradient of a whole parameter."""
        self.arrived.add(index)
        self.on_gradient(self)

    @property
    def is_complete(self) -> bool:
        """True when backward has reached every use and completed every gradient."""
        return self.due <= 0 and 0 < self._wanted == len(self.arrived)

    def hold_gradients(self) -> None:
        """Keep unreduced gradients, in the reduction's dtype, for a later backward that reduces."""
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
        self.reduced = True
        self.arrived.clear()
        present = [0] * len(self.parameters)
        gradients = self._flat_gradients(present)
        flags = torch.tensor(present, dtype=self.reduce_dtype, device=self.device)
        before, after = self._divisors()
        if before != 1:
            torch._foreach_div_(gradients, before)
        parts = [[*of_rank, flags] for of_rank in self._parts(gradients, packing)]
        summing = batch.add(transport, parts, self._next_item(Purpose.REDUCE))
        replicate = partial(self._replicate, self._next_item(Purpose.REPLICATE))
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
        self.end_backward()
        self.reshard()

    def end_backward(self) -> None:
        """The next backward begins with nothing of this one."""
        self.first = None
        self.outstanding = self.due = 0
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
        before = predivide_factor(size)
        return before, size / before

    def _replicate(self, item: Item, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums over all ranks that hold the same shard; none if they are to wait. Waits."""
        if self.sharing.replicas.size == 1:
            return sums
        if self._waiting_sums:
            torch._foreach_add_(sums, self._waiting_sums)
            self._waiting_sums = []
        if not self.replicates:
            self._waiting_sums = sums
            return []
        flat = torch.cat([part.reshape(-1) for part in sums])
        self._between_replicas().all_reduce(flat, Composition((item,)))
        return list(torch.split(flat, [part.numel() for part in sums]))

    def _between_replicas(self) -> Transport:
        if self._replication is None:
            self._replication = transport_between(self.sharing.replicas, self.device)
        return self._replication

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
                if gradient.layout is not torch.strided:
                    raise TypeError(
                        f"{self.parameters[index].name} has a gradient of layout "
                        f"{gradient.layout}, which cannot be reduced to shards; make it dense, by "
                        "sparse=False for an embedding"
                    )
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

    def abandon(self) -> None:
        """Nothing is on its way any more: gloo does not recover from what nobody waits for."""
        self._summing.wait()


class Finished:
    """A reduction that was done when it was started."""

    def finish(self) -> None:
        """The shards have their gradients."""

    def abandon(self) -> None:
        """Nothing is on its way."""


def _nobody(bucket: Bucket) -> None:
    """Nobody asked to be told of gradients."""
