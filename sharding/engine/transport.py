"""Transports move tensors between ranks: two of them behind one protocol, chosen by the backend.

The environment variable SHARDING_TRANSPORT overrides the choice: `p2p`, the default with gloo; or
`collectives`, gloo's own, for comparisons, or for a network that point-to-point messages overload.
A unit reads the variable at its first all-gather; it must be equal on all ranks. A part of the
ranks of a gloo group (`reshard_after_forward=2`) always uses `p2p`: collectives would need a
process group, and torch makes one reliably only if all ranks of the default group take part.

All ranks of the shard group call every method, in the same order, with the same sizes and the same
composition. Point-to-point messages of different compositions never meet. A collective meets any
collective of the other ranks, and detects a difference afterwards.

[Note: point-to-point messages]
Each byte is received in its final place. In a group with point-to-point messages in host memory
(gloo), each rank sends its spans from the shard itself and receives the others' spans in their
final places in the unsharded buffer. Gradients travel the other way and are summed in rank order,
so that the sum does not depend on timing. Small spans for one rank travel together. gloo's own
all-gather and reduce-scatter copy through new buffers and take 3 times as long.

Rules:

1. A tag identifies the composition of an exchange and the lengths of its messages
   (`sharding.engine.composition`). Ranks that disagree wait until the time-out and never take one
   message for another.
2. Autograd sees none of these operations.
3. `wait` raises TransferError when the process of another rank ends or the group's time-out is
   over. The error names the wait of this rank and those of others. The memory of messages that did
   not arrive stays as it is: see the last rules here.
4. Only `wait` and `all_reduce` wait, so that ranks that call in the same order never block each
   other.

[Note: collectives]
They serve NCCL and ranks that are threads. NCCL prefers one collective for each parameter group, on
a stream of its own. Parts are packed end to end, padded to the largest, and copied to their places.
The library decides the order of a sum.

[Note: marks]
A collective has no tag: a rank that runs another unit of the same size would take part without an
error. Each rank therefore keeps a hash of the compositions of all its collectives in a process
group. 32 bits of the hash travel with each reduction, as 32 zeros or ones and their 32 complements,
and are summed. If this rank has a zero and the sum is not zero, another rank has another hash: in
every dtype, a sum of numbers that are not negative is zero only if all of them are zero. The marks
do not detect collectives of different sizes: those fail in the library, or wait.

[Note: messages in flight]
Memory that gloo may still read or write outlives the messages. gloo's thread copies between a
connection and the address that a message was posted with. A message without a waiter stays posted,
after an interrupt or the failure of another message of its exchange. Gloo still receives its data,
which does not stop the messages behind it.

Rules:

1. A message that is posted and not awaited stays referenced until its process group is gone.
2. The owner of a storage empties and fills it; references do not keep it filled. An owner does
   neither to the storage of a posted message until `wait` has returned.
3. An interrupt (KeyboardInterrupt) comes before a wait or after it, never in the middle: gloo
   forgets a request once it is asked for. `wait` may be called again after an interrupt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from operator import methodcaller
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from sharding.engine.composition import (
    Composition,
    ShardGroup,
    Side,
    report,
    report_unlike,
    tag_of,
)
from sharding.errors import ArgumentError, MisuseError
from sharding.layout.box import chunk


class PendingAllGather(Protocol):
    """An all-gather in flight."""

    def wait(self) -> None:
        """Waits until the places are filled. Called once."""


class NoGather:
    """The all-gather of a group that is not divided."""

    def wait(self) -> None:
        """Returns at once: the parameters are in place."""


class PendingReduceScatter(Protocol):
    """A reduce-scatter in flight."""

    def wait(self) -> list[torch.Tensor]:
        """Returns this rank's sums, flat. Waits. Called once."""


class Transport(Protocol):
    """A transport between ranks. Tensors are contiguous, one-dimensional and of one dtype."""

    shard_group: ShardGroup

    def all_gather(
        self,
        mine: Sequence[torch.Tensor],
        places: Sequence[Sequence[torch.Tensor]],
        composition: Composition,
    ) -> PendingAllGather:
        """Starts to fill `places[r]` with the `mine` of rank r, on all ranks."""

    def reduce_scatter(
        self, parts: Sequence[Sequence[torch.Tensor]], composition: Composition
    ) -> PendingReduceScatter:
        """Starts to sum, for each rank r, the `parts[r]` of all ranks."""

    def all_reduce(self, flat: torch.Tensor, composition: Composition) -> None:
        """Sums `flat` over all ranks, in place. Waits."""


def transport_between(shard_group: ShardGroup, device: torch.device) -> Transport:
    """Returns the fastest transport of these ranks for this device, or the chosen one.

    Raises ArgumentError if the chosen one does not exist, or cannot be used here.
    """
    asked = os.environ.get("SHARDING_TRANSPORT", "")
    if asked not in ("", "p2p", "collectives"):
        raise ArgumentError(
            f"SHARDING_TRANSPORT={asked!r}: there are 'p2p' and 'collectives'; unset it for "
            "the faster of them"
        )
    if shard_group.group is None:
        return P2PTransport(shard_group)
    by_message = "gloo" in str(dist.get_backend(shard_group.group)) and device.type == "cpu"
    if asked == "p2p" and not by_message:
        raise ArgumentError(
            f"SHARDING_TRANSPORT='p2p' needs gloo and tensors in host memory, not "
            f"{dist.get_backend(shard_group.group)} and {device}; unset it"
        )
    is_part = shard_group.size < dist.get_world_size(shard_group.group)
    if by_message and (is_part or asked != "collectives"):
        return P2PTransport(shard_group)
    return CollectiveTransport(shard_group)


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
        self._sides: list[Side] = []
        """One for each posted message, in order."""
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        """Copies to make when all messages have arrived: sources, targets."""

    def wait(self) -> None:
        """Waits until all messages are in their places."""
        try:
            self._pending.wait()
        except RuntimeError as error:
            missed = self._sides[self._pending.arrived]
            raise report(self._shard_group, self._composition, missed, error) from error
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
            side = Side(member, way is dist.irecv, tensor)
            try:
                work = way(tensor, group=group, tag=tag, **named)
            except RuntimeError as error:
                raise report(self._shard_group, self._composition, side, error) from error
            if work is None:
                raise MisuseError(
                    f"no message to or from rank {member} could be started: this process is not a "
                    "member of the process group that the module is sharded over"
                )
            self._pending.add(work, tensor)
            self._sides.append(side)


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


@dataclass(frozen=True, slots=True)
class P2PReduceScatter:
    """The sums of this rank's part over all ranks, in flight."""

    exchange: P2PExchange
    parts: list[Tensors]
    """By rank, the rank's summands for this rank's part."""
    rank: int

    def wait(self) -> list[torch.Tensor]:
        """Returns the sums, in memory of their own."""
        self.exchange.wait()
        if len(self.parts) == 1:
            return [part.clone() for part in self.parts[0]]
        # The result uses received memory: this rank's own summand is a view of a larger tensor,
        # which the result would keep alive.
        first, second, *others = self.parts
        if self.rank == 0:
            first, second = second, first
        result = list(first)
        for part in (second, *others):
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


@dataclass(frozen=True, slots=True)
class CollectiveAllGather:
    """An all-gather in flight."""

    work: Work | None
    packed: torch.Tensor
    places: Sequence[Tensors]
    size: int

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        for row, places in zip(self.packed.chunk(self.size), self.places, strict=True):
            if places:
                parts = torch.split(row[: sum(p.numel() for p in places)], _sizes(places))
                torch._foreach_copy_(list(places), list(parts))


@dataclass(frozen=True, slots=True)
class CollectiveReduceScatter:
    """A reduce-scatter in flight."""

    work: Work | None
    result: torch.Tensor
    sizes: list[int]
    unlike: Callable[[], Exception]
    """Makes the error for ranks that reduce other units."""
    marks: list[int]

    def wait(self) -> list[torch.Tensor]:
        """Returns sums of this rank's parts. Raises TransferError if ranks reduce other units."""
        if self.work is not None:
            self.work.wait()
            summed = self.result[-MARKS:].tolist()
            if any(total != 0 for mark, total in zip(self.marks, summed, strict=True) if not mark):
                raise self.unlike()
        return list(torch.split(self.result[: sum(self.sizes)], self.sizes))


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
        # CUDA copies from pageable memory at once: the host does not wait for queued work.
        there = torch.tensor(marks).to(packed.device, non_blocking=True)
        packed.view(size, numel)[:, -MARKS:] = there
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
        digests = _histories.get(group, b"") + composition.digest
        history = blake2b(digests, digest_size=8).digest()
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


Message = tuple[Work, torch.Tensor]

_kept: WeakKeyDictionary[ProcessGroup, list[Message]] = WeakKeyDictionary()


class PendingWork:
    """Messages of one group, awaited together."""

    __slots__ = ("_arrived", "_kept", "_messages")

    def __init__(self, group: ProcessGroup | None) -> None:
        self._messages: list[Message] = []
        self._arrived: list[object] = []
        """One item for each message that was awaited."""
        self._kept = [] if group is None else _kept.setdefault(group, [])

    def add(self, work: Work, tensor: torch.Tensor) -> None:
        """A message and its memory."""
        self._messages.append((work, tensor))

    @property
    def arrived(self) -> int:
        """The number of messages, in the order of `add`, that have surely arrived or been sent."""
        return len(self._arrived)

    def wait(self, seconds: float | None = None) -> None:
        """Waits until all have arrived or are sent: `seconds` each, or the group's time-out.

        Raises the RuntimeError of the first message that has not: the one at index `arrived`.
        """
        awaited = methodcaller("wait", *([] if seconds is None else [timedelta(seconds=seconds)]))
        works = [work for work, _ in self._messages[self.arrived :]]
        self._arrived.extend(map(awaited, works))  # one step of the interpreter: rule 3

    def __del__(self) -> None:
        self._kept.extend(self._messages[self.arrived :])
