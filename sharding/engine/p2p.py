"""The transport by point-to-point messages: each byte is received in its final place.

In a group with point-to-point messages in host memory (gloo), each rank sends its spans from the
shard itself and receives the others' spans in their final places in the unsharded buffer. Gradients
travel the other way and are summed in rank order, so that the sum does not depend on timing. Small
spans for one rank travel together. gloo's own all-gather and reduce-scatter copy through new
buffers and take 3 times as long.

Rules:

1. A tag identifies the composition of an exchange and the lengths of its messages (composition.py).
   Ranks that disagree wait until the time-out and never take one message for another.
2. Autograd sees none of these operations.
3. `wait` raises TransferError when the process of another rank ends or the group's time-out is
   over. The error names the wait of this rank and those of others (waits.py). The memory of
   messages that did not arrive stays as it is: see `sharding.engine.pending_work`.
4. Only `wait` and `all_reduce` wait, so that ranks that call in the same order never block each
   other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import Work

from sharding.engine.composition import Composition, tag_of
from sharding.engine.packing import chunk
from sharding.engine.pending_work import PendingWork
from sharding.engine.shard_group import ShardGroup
from sharding.engine.waits import Missed, report
from sharding.errors import MisuseError, TransferError

SMALL_BYTES = 32 << 10
"""Tensors of fewer bytes are copied into one message."""

Tensors = Sequence[torch.Tensor]
Way = Callable[..., "Work | None"]
"""`dist.isend` or `dist.irecv`."""


class P2PExchange:
    """Messages in flight, all of one composition."""

    __slots__ = ("_composition", "_copies", "_digest", "_pending", "_shard_group", "_sides")

    def __init__(self, shard_group: ShardGroup, composition: Composition) -> None:
        self._shard_group = shard_group
        self._composition = composition
        self._digest = composition.digest
        self._pending = PendingWork(shard_group.group)
        self._sides: list[_Side] = []
        """One for each posted message, in order."""
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        """Copies to make when all messages have arrived: sources, targets."""

    def wait(self) -> None:
        """Waits until all messages are in their places."""
        try:
            self._pending.wait()
        except RuntimeError as error:
            raise self._report(self._sides[self._pending.arrived], error) from error
        if self._copies[0]:
            torch._foreach_copy_(self._copies[1], self._copies[0])

    def send(self, tensors: Tensors, other: int) -> None:
        """Sends flat tensors of one dtype to one other rank."""
        small = _small(tensors)
        if small is None:
            self._post(dist.isend, tensors, other)
            return
        together = [torch.cat(small)] if small else []
        self._post(dist.isend, [*together, *_large(tensors)], other)

    def receive(self, tensors: Tensors, other: int) -> None:
        """Fills flat tensors with those of the same sizes that one other rank sends."""
        small = _small(tensors)
        if small is None:
            self._post(dist.irecv, tensors, other)
            return
        together = []
        if small:
            sizes = [tensor.numel() for tensor in small]
            buffer = torch.empty(sum(sizes), dtype=small[0].dtype, device=small[0].device)
            self._copies[0].extend(torch.split(buffer, sizes))
            self._copies[1].extend(small)
            together.append(buffer)
        self._post(dist.irecv, [*together, *_large(tensors)], other)

    def _post(self, way: Way, tensors: Tensors, other: int) -> None:
        """Starts a message for each tensor."""
        if not tensors:
            return
        group, member = self._shard_group.group, self._shard_group.members[other]
        tag = tag_of(self._digest, tensors)
        named = {"group_dst" if way is dist.isend else "group_src": member}
        for tensor in tensors:
            side = _Side(member, way is dist.irecv, tensor)
            try:
                work = way(tensor, group=group, tag=tag, **named)
            except RuntimeError as error:
                raise self._report(side, error) from error
            if work is None:
                raise MisuseError(
                    f"no message to or from rank {member} could be started: this process is not a "
                    "member of the process group that the module is sharded over"
                )
            self._pending.add(work, tensor)
            self._sides.append(side)

    def _report(self, side: _Side, error: RuntimeError) -> TransferError:
        tensor = side.tensor
        missed = Missed(
            self._composition, side.member, side.is_incoming, tensor.nbytes, tensor.dtype
        )
        return report(self._shard_group, missed, error)


@dataclass(frozen=True, slots=True)
class _Side:
    """The other rank of a message, and its direction."""

    member: int
    """Rank in the group."""
    is_incoming: bool
    tensor: torch.Tensor


class P2PTransport:
    """The transport between some ranks of a gloo group, in host memory."""

    def __init__(self, shard_group: ShardGroup) -> None:
        self.shard_group = shard_group

    def all_gather(
        self, mine: Tensors, places: Sequence[Tensors], composition: Composition
    ) -> P2PExchange:
        """Starts to fill `places[r]` with the `mine` of rank r, on all ranks. Flat tensors."""
        exchange, shard_group = P2PExchange(self.shard_group, composition), self.shard_group
        for other in shard_group.others:
            exchange.receive(places[other], other)
        for other in shard_group.others:
            exchange.send(mine, other)
        torch._foreach_copy_(list(places[shard_group.rank]), list(mine))
        return exchange

    def reduce_scatter(
        self, parts: Sequence[Tensors], composition: Composition
    ) -> P2PReduceScatter:
        """Starts to sum, for each rank r, the `parts[r]` of all ranks. Flat tensors."""
        exchange, shard_group = P2PExchange(self.shard_group, composition), self.shard_group
        mine = parts[shard_group.rank]
        received = [
            mine if r == shard_group.rank else _empty_like(mine) for r in range(shard_group.size)
        ]
        for other in shard_group.others:
            exchange.receive(received[other], other)
        for other in shard_group.others:
            exchange.send(parts[other], other)
        return P2PReduceScatter(exchange, received, shard_group.rank)

    def all_reduce(self, flat: torch.Tensor, composition: Composition) -> None:
        """Sums `flat` over all ranks in rank order, in place, the same on all. Waits."""
        shard_group = self.shard_group
        if shard_group.size == 1:
            return
        slices = [
            flat[slice(*chunk(flat.numel(), shard_group.size, r))] for r in range(shard_group.size)
        ]
        [mine] = self.reduce_scatter([[part] for part in slices], composition).wait()
        then = replace(composition, stage=1)
        self.all_gather([mine], [[part] for part in slices], then).wait()


class P2PReduceScatter:
    """The sums of this rank's part over all ranks, in flight."""

    __slots__ = ("_exchange", "_parts", "_rank")

    def __init__(self, exchange: P2PExchange, parts: list[Tensors], rank: int) -> None:
        self._exchange = exchange
        self._parts = parts
        """By rank, the rank's summands for this rank's part."""
        self._rank = rank

    def wait(self) -> list[torch.Tensor]:
        """Returns the sums, in memory of their own."""
        self._exchange.wait()
        if len(self._parts) == 1:
            return [part.clone() for part in self._parts[0]]
        # The result uses received memory: this rank's own summand is a view of a larger tensor,
        # which the result would keep alive.
        result = list(self._parts[1] if self._rank == 0 else self._parts[0])
        if self._rank == 0:
            torch._foreach_add_(result, list(self._parts[0]))
        else:
            torch._foreach_add_(result, list(self._parts[1]))
        for part in self._parts[2:]:
            torch._foreach_add_(result, list(part))
        return result


def _small(tensors: Tensors) -> list[torch.Tensor] | None:
    """Returns the tensors that share a message; None for a single one, which travels as it is."""
    if len(tensors) == 1 and tensors[0].numel():
        return None
    return [t for t in tensors if 0 < t.nbytes < SMALL_BYTES]


def _large(tensors: Tensors) -> list[torch.Tensor]:
    """Returns the tensors that get a message each."""
    return [tensor for tensor in tensors if tensor.nbytes >= SMALL_BYTES]


def _empty_like(tensors: Tensors) -> list[torch.Tensor]:
    """Returns memory for tensors of the same sizes, allocated and freed in one piece."""
    sizes = [tensor.numel() for tensor in tensors]
    buffer = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    return list(torch.split(buffer, sizes))
