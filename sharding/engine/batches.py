"""Batches: small parameter groups share one message each way between two ranks.

Each message has a fixed cost beside its bytes: system calls, and processes that wake each other.
Parameter groups with the same process groups and the same dtype share one message.

Rules:

1. All ranks put the same groups into a batch, in the same order, so that their messages fit.
2. A batch sends nothing before it starts.
3. The tags of its messages name all groups in it (composition.py).
4. Only small groups share a batch. All ranks count bytes alike, so they form the same batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from sharding.engine.composition import Composition, Item
from sharding.engine.reduction import Reduction
from sharding.engine.transport import PendingAllGather, PendingReduceScatter, Transport
from sharding.errors import TransferError

PREFETCH_BYTES = 2 << 20
"""The most bytes of unsharded buffers that are gathered ahead."""
BATCH_BYTES = 1 << 20
"""Reductions start once this many bytes of unsharded gradients wait."""
IN_FLIGHT = 1
"""The number of batches of reductions that may be in flight."""

Tensors = Sequence[torch.Tensor]


class AllGather:
    """All-gathers that start when the `with` ends."""

    def __init__(self) -> None:
        self._joint: dict[object, JointAllGather] = {}

    def add(
        self, transport: Transport, mine: Tensors, places: Sequence[Tensors], item: Item
    ) -> PendingAllGather:
        """Adds one all-gather; the result is the one of `transport.all_gather`."""
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
    """One all-gather for several parameter groups."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._items: list[Item] = []
        self._mine: list[torch.Tensor] = []
        self._places: list[list[torch.Tensor]] = [[] for _ in range(transport.shard_group.size)]
        self._all_gather: PendingAllGather | None = None
        self._arrived = False
        self._error: Exception | None = None

    def add(self, mine: Tensors, places: Sequence[Tensors], item: Item) -> None:
        """Adds the tensors of another parameter group."""
        self._items.append(item)
        self._mine += mine
        for of_rank, more in zip(self._places, places, strict=True):
            of_rank += more

    def start(self) -> None:
        """Starts the exchange. All ranks of the shard group call this."""
        try:
            composition = Composition(tuple(self._items))
            self._all_gather = self._transport.all_gather(self._mine, self._places, composition)
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else _interrupted(error)
            raise
        self._mine, self._places = [], []

    def wait(self) -> None:
        """Waits until the places are filled. Every parameter group of the all-gather calls it."""
        if self._arrived:
            return
        if self._error is not None:
            raise self._error
        if self._all_gather is None:  # the start of an earlier all-gather raised an error
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
    """The reduce-scatters of a backward: in order, small ones together, few in flight."""

    def __init__(self) -> None:
        self._joint: dict[object, JointReduceScatter] = {}
        self._nbytes = 0
        self._waiting: list[Reduction] = []
        """Reductions of the batch that has not started."""
        self._in_flight: deque[list[Reduction]] = deque()

    def reduce(self, nbytes: int, reduction: Callable[[ReduceScatters], Reduction | None]) -> None:
        """Starts to reduce a group now or with a later batch; may wait for an earlier one."""
        if self._nbytes + nbytes > BATCH_BYTES:
            self.start()
            self._finish_all_but(IN_FLIGHT - 1)
        pending = reduction(self)
        if pending is None:
            return
        self._waiting.append(pending)
        self._nbytes += nbytes
        if self._nbytes > BATCH_BYTES:
            self.start()

    def add(
        self, transport: Transport, parts: Sequence[Tensors], item: Item
    ) -> PendingReduceScatter:
        """Adds one reduce-scatter; the result is the one of `transport.reduce_scatter`."""
        own = parts[transport.shard_group.rank]
        key = transport.shard_group, own[0].dtype, own[0].device
        return self._joint.setdefault(key, JointReduceScatter(transport)).add(parts, item)

    def start(self) -> None:
        """Starts the batch that waits. All ranks call it; may wait for an earlier batch."""
        if not self._waiting:
            return
        self._finish_all_but(IN_FLIGHT - 1)
        for joint in self._joint.values():
            joint.start()
        self._in_flight.append(self._waiting)
        self._joint, self._waiting, self._nbytes = {}, [], 0

    def finish(self) -> None:
        """Waits until the shards have all their gradients."""
        self.start()
        self._finish_all_but(0)

    def forget(self) -> None:
        """After a backward that failed, wait for the reductions in flight and drop them."""
        while self._in_flight:
            for reduction in self._in_flight.popleft():
                with suppress(TransferError):  # the next use of the process group raises it
                    reduction.abandon()
        self._joint, self._waiting, self._nbytes = {}, [], 0

    def _finish_all_but(self, count: int) -> None:
        while len(self._in_flight) > count:
            for reduction in self._in_flight.popleft():
                reduction.finish()


class JointReduceScatter:
    """One reduce-scatter for several parameter groups."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._items: list[Item] = []
        self._parts: list[list[torch.Tensor]] = [[] for _ in range(transport.shard_group.size)]
        self._summing: PendingReduceScatter | None = None
        self._sums: list[torch.Tensor] = []
        self._error: Exception | None = None

    def add(self, parts: Sequence[Tensors], item: Item) -> PendingReduceScatter:
        """Adds the tensors of another parameter group."""
        self._items.append(item)
        own = self._parts[self._transport.shard_group.rank]
        first = len(own)
        for of_rank, more in zip(self._parts, parts, strict=True):
            of_rank += more
        return _GroupSums(self, first, len(own))

    def start(self) -> None:
        """Starts the exchange. All ranks of the shard group call this."""
        self._summing = self._transport.reduce_scatter(self._parts, Composition(tuple(self._items)))
        self._parts = []

    def wait(self) -> list[torch.Tensor]:
        """Returns the sums for all groups. Waits. Every group of the exchange calls this."""
        if self._error is not None:  # a reduce-scatter cannot be awaited twice
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
    """The sums for one parameter group."""

    def __init__(self, joint: JointReduceScatter, first: int, end: int) -> None:
        self._joint = joint
        self._first = first
        self._end = end

    def wait(self) -> list[torch.Tensor]:
        """Returns this rank's sums, flat. Waits."""
        return self._joint.wait()[self._first : self._end]


def _interrupted(error: BaseException) -> Exception:
    return RuntimeError(f"it was interrupted as it started, by {type(error).__name__}")
