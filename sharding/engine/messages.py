"""Gathering and reducing by messages: every byte straight from where it is to where it belongs.

On a group that offers point-to-point messages in host memory (gloo), each rank sends its spans from
the shard itself and receives the others' into their final places in the full buffer; gradients go
the other way and are summed in rank order, so that the sum does not depend on timing. Small spans
for one peer travel together. gloo's own all-gather and reduce-scatter stage through fresh buffers
and take 3 times as long.

Rules:

1. A tag belongs to one bucket, one direction and one turn: ranks that disagree about how often they
   gathered wait until the time-out, and never take one turn's bytes for another's.
2. Nothing here is seen by autograd.
3. `wait` ends with an error when a peer's process ends or when the group's time-out is over. Then
   the memory of what was to arrive stays as it is: see `sharding.engine.posted`.
4. Nothing waits but `wait` and `all_reduce`: what ranks do in the same order cannot block them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import Work

from sharding.engine.packing import chunk
from sharding.engine.peers import Peers
from sharding.engine.posted import Posted

SMALL_BYTES = 32 << 10
"""Tensors of fewer bytes are copied into one message."""

Tensors = Sequence[torch.Tensor]


class Exchange:
    """Messages on their way."""

    __slots__ = ("_copies", "_peers", "_posted")

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._posted = Posted(peers.group)
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        """From, to: to be done when all have arrived."""

    def wait(self) -> None:
        """All messages have arrived and are in their places."""
        self._posted.wait()
        if self._copies[0]:
            torch._foreach_copy_(self._copies[1], self._copies[0])

    def send(self, tensors: Tensors, other: int, tag: int) -> None:
        """Send flat tensors of one dtype to one other."""
        small = _small(tensors)
        if small is None:
            self._send(tensors[0], other, tag)
            return
        if small:
            self._send(torch.cat(small), other, tag)
        for tensor in tensors:
            if tensor.nbytes >= SMALL_BYTES:
                self._send(tensor, other, tag)

    def receive(self, tensors: Tensors, other: int, tag: int) -> None:
        """Fill flat tensors from what one other sends as tensors of these sizes."""
        small = _small(tensors)
        if small is None:
            self._receive(tensors[0], other, tag)
            return
        if small:
            sizes = [tensor.numel() for tensor in small]
            buffer = torch.empty(sum(sizes), dtype=small[0].dtype, device=small[0].device)
            self._copies[0].extend(torch.split(buffer, sizes))
            self._copies[1].extend(small)
            self._receive(buffer, other, tag)
        for tensor in tensors:
            if tensor.nbytes >= SMALL_BYTES:
                self._receive(tensor, other, tag)

    def _send(self, tensor: torch.Tensor, other: int, tag: int) -> None:
        group, member = self._peers.group, self._peers.members[other]
        self._started(dist.isend(tensor, group=group, group_dst=member, tag=tag), tensor, member)

    def _receive(self, tensor: torch.Tensor, other: int, tag: int) -> None:
        group, member = self._peers.group, self._peers.members[other]
        self._started(dist.irecv(tensor, group=group, group_src=member, tag=tag), tensor, member)

    def _started(self, work: Work | None, tensor: torch.Tensor, member: int) -> None:
        if work is None:
            raise RuntimeError(
                f"no message to or from rank {member} could be started: this process is not a "
                "member of the process group that the module is sharded over"
            )
        self._posted.add(work, tensor)


class Messages:
    """The transport between some ranks of a gloo group, in host memory."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def gather(self, mine: Tensors, places: Sequence[Tensors], tag: int) -> Exchange:
        """Send `mine` to all others; fill `places[r]` with what r sends, and this rank's own."""
        exchange, peers = Exchange(self.peers), self.peers
        for other in peers.others:
            exchange.receive(places[other], other, tag)
        for other in peers.others:
            exchange.send(mine, other, tag)
        torch._foreach_copy_(list(places[peers.rank]), list(mine))
        return exchange

    def reduce(self, parts: Sequence[Tensors], tag: int) -> Sum:
        """Start summing: `parts[r]` are this rank's summands of what rank r gets, flat."""
        exchange, peers = Exchange(self.peers), self.peers
        mine = parts[peers.rank]
        received = [mine if r == peers.rank else _empty_like(mine) for r in range(peers.size)]
        for other in peers.others:
            exchange.receive(received[other], other, tag)
        for other in peers.others:
            exchange.send(parts[other], other, tag)
        return Sum(exchange, received, peers.rank)

    def all_reduce(self, flat: torch.Tensor, tag: int) -> None:
        """`flat` is the sum of all ranks' in rank order, on all of them the same. Waits."""
        peers = self.peers
        if peers.size == 1:
            return
        slices = [flat[slice(*chunk(flat.numel(), peers.size, r))] for r in range(peers.size)]
        [mine] = self.reduce([[part] for part in slices], tag).wait()
        self.gather([mine], [[part] for part in slices], tag + 1).wait()


class Sum:
    """The sums over ranks of this rank's part, on their way."""

    __slots__ = ("_exchange", "_parts", "_rank")

    def __init__(self, exchange: Exchange, parts: list[Tensors], rank: int) -> None:
        self._exchange = exchange
        self._parts = parts
        """By rank, what it has of this rank's part."""
        self._rank = rank

    def wait(self) -> list[torch.Tensor]:
        """The sums, in memory of their own."""
        self._exchange.wait()
        if len(self._parts) == 1:
            return [part.clone() for part in self._parts[0]]
        # The result goes to memory that was received: what this rank made of a gradient is part
        # of a larger tensor, which would live as long as the result.
        result = list(self._parts[1] if self._rank == 0 else self._parts[0])
        if self._rank == 0:
            torch._foreach_add_(result, list(self._parts[0]))
        else:
            torch._foreach_add_(result, list(self._parts[1]))
        for part in self._parts[2:]:
            torch._foreach_add_(result, list(part))
        return result


def _small(tensors: Tensors) -> list[torch.Tensor] | None:
    """Those that travel together; None where there is but one tensor, which travels as it is."""
    if len(tensors) == 1 and tensors[0].numel():
        return None
    return [t for t in tensors if 0 < t.nbytes < SMALL_BYTES]


def _empty_like(tensors: Tensors) -> list[torch.Tensor]:
    """Memory for tensors of the same sizes, in one piece, so that it lives and dies at once."""
    sizes = [tensor.numel() for tensor in tensors]
    buffer = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    return list(torch.split(buffer, sizes))
