"""Gathering and reducing by the library's collectives: where messages are not to be had or slower.

NCCL prefers one collective per bucket, on a stream of its own; ranks that are threads of one
process have nothing else. Parts are packed end to end, padded to the largest, and copied to their
places. The order of a sum is the library's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import Work

from sharding.peers import Peers

Tensors = Sequence[torch.Tensor]


class Gathering:
    """An all-gather on its way."""

    def __init__(
        self, work: Work | None, packed: torch.Tensor, places: Sequence[Tensors], size: int
    ) -> None:
        self._work = work
        self._packed = packed
        self._places = places
        self._size = size

    def wait(self) -> None:
        """What was gathered is in its places."""
        if self._work is not None:
            self._work.wait()
        for row, places in zip(self._packed.chunk(self._size), self._places, strict=True):
            if places:
                parts = torch.split(row[: sum(p.numel() for p in places)], _sizes(places))
                torch._foreach_copy_(list(places), list(parts))


class Summing:
    """A reduce-scatter on its way."""

    def __init__(self, work: Work | None, result: torch.Tensor, sizes: list[int]) -> None:
        self._work = work
        self._result = result
        self._sizes = sizes

    def wait(self) -> list[torch.Tensor]:
        """The sums of this rank's parts."""
        if self._work is not None:
            self._work.wait()
        return list(torch.split(self._result[: sum(self._sizes)], self._sizes))


class Collectives:
    """The transport of all ranks of a group."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def gather(self, mine: Tensors, places: Sequence[Tensors], tag: int) -> Gathering:
        """Send `mine` to all others; fill `places[r]` with what r sends, and this rank's own."""
        size = self.peers.size
        numel = max(sum(_sizes(of_rank)) for of_rank in places)
        like = mine[0]
        packed = torch.empty(size * numel, dtype=like.dtype, device=like.device)
        own = packed[self.peers.rank * numel :][: sum(_sizes(mine))]
        torch.cat(list(mine), out=own)
        if size == 1:
            return Gathering(None, packed, places, size)
        padded = packed[self.peers.rank * numel :][:numel].clone()
        work = dist.all_gather_into_tensor(packed, padded, group=self.peers.group, async_op=True)
        return Gathering(work, packed, places, size)

    def reduce(self, parts: Sequence[Tensors], tag: int) -> Summing:
        """Start summing: `parts[r]` are this rank's summands of what rank r gets, flat."""
        size, mine = self.peers.size, parts[self.peers.rank]
        numel = max(sum(_sizes(of_rank)) for of_rank in parts)
        packed = torch.zeros(size * numel, dtype=mine[0].dtype, device=mine[0].device)
        for rank, of_rank in enumerate(parts):
            torch.cat(list(of_rank), out=packed[rank * numel :][: sum(_sizes(of_rank))])
        if size == 1:
            return Summing(None, packed, _sizes(mine))
        result = packed.new_empty(numel)
        work = dist.reduce_scatter_tensor(result, packed, group=self.peers.group, async_op=True)
        return Summing(work, result, _sizes(mine))

    def all_reduce(self, flat: torch.Tensor, tag: int) -> None:
        """`flat` is the sum of all ranks', on all of them the same. Waits."""
        if self.peers.size > 1:
            dist.all_reduce(flat, group=self.peers.group)


def _sizes(tensors: Tensors) -> list[int]:
    return [tensor.numel() for tensor in tensors]
