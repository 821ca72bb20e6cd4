"""The transport by the library's collectives, for NCCL and for ranks that are threads.

NCCL prefers one collective for each parameter group, on a stream of its own. Parts are packed end
to end, padded to the largest, and copied to their places. The library decides the order of a sum.

[Note: marks]
A collective has no tag: a rank that runs another unit of the same size would take part without an
error. Each rank therefore keeps a hash of the compositions of all its collectives in a process
group. 32 bits of the hash travel with each reduction, as 32 zeros or ones and their 32 complements,
and are summed. If this rank has a zero and the sum is not zero, another rank has another hash: in
every dtype, a sum of numbers that are not negative is zero only if all of them are zero. The marks
do not detect collectives of different sizes: those fail in the library, or wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from sharding.engine.composition import Composition
from sharding.engine.shard_group import ShardGroup
from sharding.engine.waits import report_unlike

Tensors = Sequence[torch.Tensor]
# torch 2.13 renames these functions, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_parts: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()
"""For each group: the groups of a part of its members, by their ranks in the group."""
_histories: WeakKeyDictionary[ProcessGroup, bytes] = WeakKeyDictionary()
"""By group, a hash of all collectives that this rank has taken part in."""
BITS = 32
MARKS = 2 * BITS
"""Elements that travel with a reduction. See [Note: marks]."""


class CollectiveAllGather:
    """An all-gather in flight."""

    def __init__(
        self, work: Work | None, packed: torch.Tensor, places: Sequence[Tensors], size: int
    ) -> None:
        self._work = work
        self._packed = packed
        self._places = places
        self._size = size

    def wait(self) -> None:
        """Waits until the places are filled."""
        if self._work is not None:
            self._work.wait()
        for row, places in zip(self._packed.chunk(self._size), self._places, strict=True):
            if places:
                parts = torch.split(row[: sum(p.numel() for p in places)], _sizes(places))
                torch._foreach_copy_(list(places), list(parts))


class CollectiveReduceScatter:
    """A reduce-scatter in flight."""

    def __init__(
        self,
        work: Work | None,
        result: torch.Tensor,
        sizes: list[int],
        unlike: Callable[[], Exception],
        marks: list[int],
    ) -> None:
        self._work = work
        self._result = result
        self._sizes = sizes
        self._unlike = unlike
        self._marks = marks

    def wait(self) -> list[torch.Tensor]:
        """Returns sums of this rank's parts. Raises TransferError if ranks reduce other units."""
        if self._work is not None:
            self._work.wait()
            summed = self._result[-MARKS:].tolist()
            if any(total != 0 for mark, total in zip(self._marks, summed, strict=True) if not mark):
                raise self._unlike()
        return list(torch.split(self._result[: sum(self._sizes)], self._sizes))


class CollectiveTransport:
    """The transport of all ranks of a group."""

    def __init__(self, shard_group: ShardGroup) -> None:
        self.shard_group = shard_group
        _group_of(shard_group)

    def all_gather(
        self, mine: Tensors, places: Sequence[Tensors], composition: Composition
    ) -> CollectiveAllGather:
        """Starts to fill `places[r]` with the `mine` of rank r, on all ranks. Flat tensors."""
        size = self.shard_group.size
        numel = max(sum(_sizes(of_rank)) for of_rank in places)
        like = mine[0]
        packed = torch.empty(size * numel, dtype=like.dtype, device=like.device)
        own = packed[self.shard_group.rank * numel :][: sum(_sizes(mine))]
        torch.cat(list(mine), out=own)
        if size == 1:
            return CollectiveAllGather(None, packed, places, size)
        self._note(composition)
        padded = packed[self.shard_group.rank * numel :][:numel].clone()
        work = _all_gather(packed, padded, group=_group_of(self.shard_group), async_op=True)
        return CollectiveAllGather(work, packed, places, size)

    def reduce_scatter(
        self, parts: Sequence[Tensors], composition: Composition
    ) -> CollectiveReduceScatter:
        """Starts to sum, for each rank r, the `parts[r]` of all ranks. Flat tensors."""
        size, mine = self.shard_group.size, parts[self.shard_group.rank]
        numel = max(sum(_sizes(of_rank)) for of_rank in parts) + MARKS
        packed = torch.zeros(size * numel, dtype=mine[0].dtype, device=mine[0].device)
        for rank, of_rank in enumerate(parts):
            torch.cat(list(of_rank), out=packed[rank * numel :][: sum(_sizes(of_rank))])
        unlike = partial(report_unlike, self.shard_group, composition)
        if size == 1:
            return CollectiveReduceScatter(None, packed, _sizes(mine), unlike, [])
        marks = self._note(composition)
        packed.view(size, numel)[:, -MARKS:] = torch.tensor(marks, device=packed.device)
        result = packed.new_empty(numel)
        work = _reduce_scatter(result, packed, group=_group_of(self.shard_group), async_op=True)
        return CollectiveReduceScatter(work, result, _sizes(mine), unlike, marks)

    def all_reduce(self, flat: torch.Tensor, composition: Composition) -> None:
        """Sums `flat` over all ranks, in place, with the same result on all. Waits."""
        if self.shard_group.size > 1:
            self._note(composition)
            dist.all_reduce(flat, group=_group_of(self.shard_group))

    def _note(self, composition: Composition) -> list[int]:
        """Adds a collective to this rank's hash; returns the marks of all its collectives."""
        group = _group_of(self.shard_group)
        assert group is not None
        told = _histories.get(group, b"") + composition.digest
        history = blake2b(told, digest_size=8).digest()
        _histories[group] = history
        number = int.from_bytes(history, "little")
        bits = [number >> bit & 1 for bit in range(BITS)]
        return [*bits, *(1 - bit for bit in bits)]


def _group_of(shard_group: ShardGroup) -> ProcessGroup | None:
    """Returns the process group of exactly these ranks, which make it on the first call."""
    group = shard_group.group
    if group is None or shard_group.size == dist.get_world_size(group):
        return group
    groups = _parts.setdefault(group, {})
    if shard_group.members not in groups:
        ranks = [dist.get_global_rank(group, member) for member in shard_group.members]
        groups[shard_group.members] = dist.new_group(
            ranks, backend=dist.get_backend(group), use_local_synchronization=True
        )
    return groups[shard_group.members]


def _sizes(tensors: Tensors) -> list[int]:
    return [tensor.numel() for tensor in tensors]
