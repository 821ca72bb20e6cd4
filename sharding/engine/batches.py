"""Small parameter groups travel together: one message each way between two ranks.

A message has a fixed price, whatever it carries: system calls, and processes that wake each other.
Parameter groups that are shared by the same ranks and gathered or reduced in the same dtype share
it.

Rules:

1. All ranks put the same into a batch, in the same order: then their messages fit.
2. Nothing is on its way before the batch starts.
3. What travels together is named in full by its messages' tags (see composition.py).
4. Only small parameter groups travel together: all ranks count their bytes alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch

from sharding.engine.composition import Composition, Item
from sharding.engine.transport import PendingAllGather, PendingReduceScatter, Transport
from sharding.errors import TransferError

PREFETCH_BYTES = 2 << 20
"""Of unsharded buffers that are gathered and not used yet."""
BATCH_BYTES = 1 << 20
"""Of unsharded gradients that wait for others."""
IN_FLIGHT = 1
"""How many batches of reductions may be on their way."""

Tensors = Sequence[torch.Tensor]


class PendingReduction(Protocol):
    """The reduction of one parameter group (reduction.py)."""

    def finish(self) -> None:
        """Wait for it; then the shards have their gradients."""
        ...

    def abandon(self) -> None:
        """Wait for it and drop the result."""
        ...


class Reducible(Protocol):
    """The part of a parameter group (param_group.py) that its reductions need."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all its gradients as they are reduced."""
        ...

    def reduce(self, batch: ReduceScatters) -> PendingReduction:
        """Put its gradients into a batch."""
        ...


class AllGather:
    """Gathers that start when the `with` ends."""

    def __init__(self) -> None:
        self._joint: dict[object, JointAllGather] = {}

    def add(
        self, transport: Transport, mine: Tensors, places: Sequence[Tensors], item: Item
    ) -> PendingAllGather:
        """One more: what `transport.all_gather` would return."""
        key = transport.shard_group, mine[0].dtype, mine[0].device
        joint = self._joint.setdefault(key, JointAllGather(transport))
        joint.add(mine, places, item)
        return joint

    def __enter__(self) -> AllGather:
        return self

    def __exit__(self, *_: object) -> None:
        for joint in self._joint.values():
            joint.start()


class JointAllGather:
    """One gather for several parameter groups."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._items: list[Item] = []
        self._mine: list[torch.Tensor] = []
        self._places: list[list[torch.Tensor]] = [[] for _ in range(transport.shard_group.size)]
        self._all_gather: PendingAllGather | None = None
        self._arrived = False
        self._error: Exception | None = None

    def add(self, mine: Tensors, places: Sequence[Tensors], item: Item) -> None:
        """Another parameter group's."""
        self._items.append(item)
        self._mine += mine
        for of_rank, more in zip(self._places, places, strict=True):
            of_rank += more

    def start(self) -> None:
        """It is on its way."""
        try:
            composition = Composition(tuple(self._items))
            self._all_gather = self._transport.all_gather(self._mine, self._places, composition)
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else _interrupted(error)
            raise
        self._mine, self._places = [], []

    def wait(self) -> None:
        """What was gathered is in its places. Every parameter group asks."""
        if self._arrived:
            return
        if self._error is not None:
            raise self._error
        if self._all_gather is None:  # what started before it ended with an error
            self.start()
        assert self._all_gather is not None
        try:
            self._all_gather.wait()
        except Exception as error:
            self._error = error
            raise
        self._arrived = True
        self._all_gather = None


class ReduceScatters:
    """The reductions of a backward: in order, small ones together, few on their way."""

    def __init__(self) -> None:
        self._joint: dict[object, JointReduceScatter] = {}
        self._nbytes = 0
        self._waiting: list[PendingReduction] = []
        """What travels together when enough has come."""
        self._in_flight: deque[list[PendingReduction]] = deque()

    def reduce(self, param_group: Reducible) -> None:
        """Reduce a parameter group's gradients, now or when enough has come."""
        if self._nbytes + param_group.gradient_bytes > BATCH_BYTES:
            self.start()
            self._finish_all_but(IN_FLIGHT - 1)
        self._waiting.append(param_group.reduce(self))
        self._nbytes += param_group.gradient_bytes
        if self._nbytes > BATCH_BYTES:
            self.start()

    def add(
        self, transport: Transport, parts: Sequence[Tensors], item: Item
    ) -> PendingReduceScatter:
        """One more: what `transport.reduce_scatter` would return."""
        own = parts[transport.shard_group.rank]
        key = transport.shard_group, own[0].dtype, own[0].device
        return self._joint.setdefault(key, JointReduceScatter(transport)).add(parts, item)

    def start(self) -> None:
        """What came is on its way."""
        if not self._waiting:
            return
        self._finish_all_but(IN_FLIGHT - 1)
        for joint in self._joint.values():
            joint.start()
        self._in_flight.append(self._waiting)
        self._joint, self._waiting, self._nbytes = {}, [], 0

    def finish(self) -> None:
        """All gradients are in their shards."""
        self.start()
        self._finish_all_but(0)

    def forget(self) -> None:
        """A backward ended with an error: nothing is on its way."""
        while self._in_flight:
            for reduction in self._in_flight.popleft():
                with suppress(TransferError):  # whoever uses the group next gets it
                    reduction.abandon()
        self._joint, self._waiting, self._nbytes = {}, [], 0

    def _finish_all_but(self, count: int) -> None:
        while len(self._in_flight) > count:
            for reduction in self._in_flight.popleft():
                reduction.finish()


class JointReduceScatter:
    """One sum for several parameter groups."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._items: list[Item] = []
        self._parts: list[list[torch.Tensor]] = [[] for _ in range(transport.shard_group.size)]
        self._summing: PendingReduceScatter | None = None
        self._sums: list[torch.Tensor] = []
        self._error: Exception | None = None

    def add(self, parts: Sequence[Tensors], item: Item) -> PendingReduceScatter:
        """Another parameter group's."""
        self._items.append(item)
        own = self._parts[self._transport.shard_group.rank]
        first = len(own)
        for of_rank, more in zip(self._parts, parts, strict=True):
            of_rank += more
        return _GroupSums(self, first, len(own))

    def start(self) -> None:
        """It is on its way."""
        self._summing = self._transport.reduce_scatter(self._parts, Composition(tuple(self._items)))
        self._parts = []

    def wait(self) -> list[torch.Tensor]:
        """All the sums. Every parameter group asks."""
        if self._error is not None:  # it is not waited for again
            raise self._error
        if self._summing is not None:
            summing, self._summing = self._summing, None
            try:
                self._sums = summing.wait()
            except Exception as error:
                self._error = error
                raise
        return self._sums


class _GroupSums:
    """One parameter group's sums of several parameter groups'."""

    def __init__(self, joint: JointReduceScatter, first: int, end: int) -> None:
        self._joint = joint
        self._first = first
        self._end = end

    def wait(self) -> list[torch.Tensor]:
        """This rank's sums."""
        return self._joint.wait()[self._first : self._end]


def _interrupted(error: BaseException) -> Exception:
    return RuntimeError(f"it was interrupted as it started, by {type(error).__name__}")
