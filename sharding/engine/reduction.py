"""Reduces gradients from unsharded parameters to shards: one parameter group, or a batch of groups.

Each message between two ranks has a fixed cost beside its bytes: system calls, and processes that
wake each other. So small parameter groups with the same process groups and the same dtype share one
message each way, a batch. Rules of batches:

1. All ranks put the same groups into a batch, in the same order, so that their messages fit.
2. A batch sends nothing before it starts.
3. The tags of its messages name all groups in it (composition.py).
4. Only small groups share a batch. All ranks count bytes alike, so they form the same batches.

[Note: outputs of hooks]
A parameter with hooks (chunk_param_group.py) has its inputs of all ranks joined in memory of its
own. Inputs are joined along one dimension. Ranks may have different numbers of indices along it,
their *rows*. Inputs travel as bytes, rows first, so that the rows of a rank are one range of bytes.
The range arrives in its final place if the joined dimension is the first, and is moved there
otherwise.

The storage of an output stays the same object, so that its users find the same tensor when the
storage is filled again. Writes use aliases with version counters of their own: autograd sees no
change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from weakref import WeakMethod

import torch

from sharding.engine.composition import Composition, Item, ShardGroup
from sharding.engine.parameter import Slot
from sharding.engine.transport import (
    PendingAllGather,
    PendingReduceScatter,
    Transport,
    transport_between,
)
from sharding.errors import TransferError


@dataclass(slots=True)
class BackwardState:
    """The state of a group in one backward."""

    first: int | None = None
    """The time of its first use in the forwards that this backward reaches."""
    outstanding: int = 0
    """The uses in all forwards since the last backward that backward has not reached yet."""
    due: int = 0
    """The outstanding uses in the forwards that this backward reaches."""
    arrived: set[int] = field(default_factory=set)
    """The parameters with a gradient that is not reduced yet."""
    final: set[int] = field(default_factory=set)
    """Those of them whose gradient arrived after the last use was reached: none adds to it."""
    trained_elsewhere: bool = False
    """Whether another rank has told that it trains the group in this iteration."""
    reduced: bool = False
    """Whether this backward has started a reduction."""

    def arrive(self, index: int) -> None:
        """Notes a gradient. A reentrant checkpoint in backward may add to it until `due` is 0."""
        self.arrived.add(index)
        if self.due <= 0:
            self.final.add(index)

    def start_reduction(self) -> None:
        """Notes that the arrived gradients go into a reduction."""
        self.reduced = True
        self.clear()

    def clear(self) -> None:
        """Forgets the gradients that have arrived."""
        self.arrived.clear()
        self.final.clear()


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction that was started, perhaps with others in a batch."""

    sums: Callable[[], list[torch.Tensor]]
    """Waits for this rank's sums, with the sums of flags behind them; called once."""
    replicate: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    divide: float
    accumulate: Callable[[list[torch.Tensor], list[float]], None]
    known_flags: list[float] | None
    """Numbers above 0 where the sums of flags are: to read a sum, the host waits for it."""

    def finish(self) -> None:
        """Waits for the sums, divides them and adds them to the accumulated gradients, once."""
        summed = self.replicate(self.sums())
        if not summed:
            return
        *sums, flags = summed
        if self.divide != 1 and sums:
            torch._foreach_div_(sums, self.divide)
        known = self.known_flags
        # The flags have the gradients' dtype.
        self.accumulate(sums, flags.real.tolist() if known is None else known)

    def abandon(self) -> None:
        """Waits, and drops the sums: gloo does not recover from messages without a waiter."""
        self.sums()


class ReplicaSums:
    """The sums of one shard's gradients over the ranks that hold the same shard."""

    def __init__(self, replicas: ShardGroup) -> None:
        self._replicas = replicas
        self._transport: Transport | None = None
        self._waiting: list[torch.Tensor] = []
        """Sums of backwards that did not replicate."""

    def over(
        self, sums: list[torch.Tensor], item: Item, device: torch.device, replicates: bool
    ) -> list[torch.Tensor]:
        """Returns the sums over replicas of these and of waiting ones; empty if these must wait.

        All replicas call this; waits for them.
        """
        if self._replicas.size == 1:
            return sums
        if self._waiting:
            torch._foreach_add_(sums, self._waiting)
            self._waiting = []
        if not replicates:
            self._waiting = sums
            return []
        flat = torch.cat([part.reshape(-1) for part in sums])
        self.all_reduce(flat, item, device)
        return list(torch.split(flat, [part.numel() for part in sums]))

    def all_reduce(self, flat: torch.Tensor, item: Item, device: torch.device) -> None:
        """Sums a flat tensor over the replicas, in place. All replicas call this; waits."""
        if self._transport is None:
            self._transport = transport_between(self._replicas, device)
        self._transport.all_reduce(flat, Composition((item,)))


class GradHooks:
    """Hooks of unsharded parameters: autograd calls them when a gradient is complete."""

    def __init__(self, arrived: Callable[[int], None]) -> None:
        """`arrived` is a bound method, called with the index of the parameter."""
        self._arrived = WeakMethod(arrived)  # no cycle: Python cannot collect one through a hook
        self._hooked: set[int] = set()

    def prepare(self, unsharded: Sequence[torch.Tensor], wants: Callable[[int], bool]) -> int:
        """Sets `requires_grad` of the parameters by `wants`, hooks them; returns their number."""
        count = 0
        for index, leaf in enumerate(unsharded):
            wanted = wants(index)
            count += wanted
            if leaf.requires_grad != wanted:
                leaf.requires_grad_(wanted)
            if wanted and id(leaf) not in self._hooked:
                self._hooked.add(id(leaf))
                hook = partial(_call, self._arrived, index)
                leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return count

    def clear(self) -> None:
        """Drops the parameters, because there are new ones."""
        self._hooked.clear()


def _call(arrived: WeakMethod[Callable[[int], None]], index: int, leaf: torch.Tensor) -> None:
    method = arrived()
    if method is not None:
        method(index)


class KeptGradients:
    """Local gradients of a group, in `reduce_dtype`, that no backward has reduced yet."""

    def __init__(self, count: int) -> None:
        self._kept: list[torch.Tensor | None] = [None] * count

    def keep(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Adds the gradients, by parameter, to the kept ones."""
        for index, gradient in enumerate(gradients):
            self._kept[index] = self.release(index, gradient)

    def release(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Takes out a parameter's kept gradient; returns its sum with `gradient`.

        Returns None if both are missing.
        """
        before, self._kept[index] = self._kept[index], None
        if before is None or gradient is None:
            return gradient if before is None else before
        return before + gradient


def flat_rows_first(
    slots: Sequence[Slot],
    gradients: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Returns each slot's gradient, flat, the divided dimension first; or zeros."""
    flat = []
    for slot, gradient in zip(slots, gradients, strict=True):
        if gradient is None:
            flat.append(torch.zeros(slot.numel, dtype=dtype, device=device))
        else:
            rows = gradient.movedim(slot.dim, 0) if slot.dim else gradient
            flat.append(rows.contiguous().view(-1))
    return flat


def divisors(size: int, dtype: torch.dtype, chosen: float | None) -> tuple[float, float]:
    """Returns the divisors of gradients before and after they are summed over `size` ranks.

    A sum of float16 could overflow, so a power of two divides float16 gradients before the sum,
    which costs range and no precision. The range of other dtypes is large enough.

    >>> divisors(8, torch.float32, None), divisors(8, torch.float16, None)
    ((1.0, 8.0), (4.0, 2.0))
    """
    if chosen is not None:
        return 1.0, chosen
    if dtype != torch.float16:
        return 1.0, float(size)
    before = predivide_factor(size)
    return before, size / before


def predivide_factor(world_size: int) -> float:
    """Returns the power of two that divides gradients before they are summed.

    It is the smallest power whose square is `world_size` or more, or that does not divide it.

    >>> [predivide_factor(world_size) for world_size in (1, 2, 3, 4, 6, 8, 16)]
    [1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0]
    """
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return float(factor)


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


@dataclass(frozen=True, slots=True)
class Form:
    """The layout of the ranks' inputs in an output of hooks."""

    counts: tuple[int, ...]
    """By rank, the number of rows: indices of the dimension along which the inputs are joined."""
    rest: tuple[int, ...]
    """The sizes of the other dimensions."""
    along: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return prod(self.rest) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(self.counts) * self.row_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rest[: self.along], sum(self.counts), *self.rest[self.along :])

    def rows_first(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns this rank's input without padding, as it travels: bytes, rows first."""
        tensor = tensor.detach().narrow(self.along, 0, self.counts[rank])
        return tensor.movedim(self.along, 0).contiguous().view(-1).view(torch.uint8)


class Output:
    """A tensor that is gathered for hooks: its memory comes and goes, its storage object stays."""

    def __init__(self, form: Form, device: torch.device) -> None:
        self.form = form
        self._tensor = torch.empty(form.shape, dtype=form.dtype, device=device)
        self._storage = self._tensor.untyped_storage()
        # Bytes that arrive are written through aliases with version counters of their own.
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._bytes.set_(self._storage, 0, (form.nbytes,), (1,))
        self._alias = torch.empty(0, dtype=form.dtype, device=device)
        self._alias.set_(self._storage, 0, form.shape, self._tensor.stride())
        self._landing = self._bytes

    def allocate(self) -> None:
        self._storage.resize_(self.form.nbytes)
        if self.form.along:
            self._landing = torch.empty_like(self._bytes)

    def place(self, rank: int) -> torch.Tensor:
        """Returns the place of the bytes of a rank's input."""
        lo = sum(self.form.counts[:rank]) * self.form.row_bytes
        return self._landing[lo : lo + self.form.counts[rank] * self.form.row_bytes]

    def join(self) -> torch.Tensor:
        """Returns the ranks' inputs, joined, once all have arrived."""
        if self._landing is not self._bytes:
            rows = self._landing.view(self.form.dtype).view(-1, *self.form.rest)
            self._alias.copy_(rows.movedim(0, self.form.along))
            self._landing = self._bytes
        return self._tensor

    def free(self) -> None:
        self._landing = self._bytes
        self._storage.resize_(0)


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
            name = type(error).__name__
            was_interrupted = RuntimeError(f"it was interrupted as it started, by {name}")
            self._error = error if isinstance(error, Exception) else was_interrupted
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
    ) -> Callable[[], list[torch.Tensor]]:
        """Adds one reduce-scatter; returns a function that waits for this rank's sums."""
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

    def add(self, parts: Sequence[Tensors], item: Item) -> Callable[[], list[torch.Tensor]]:
        """Adds the tensors of another parameter group."""
        self._items.append(item)
        own = self._parts[self._transport.shard_group.rank]
        first = len(own)
        for of_rank, more in zip(self._parts, parts, strict=True):
            of_rank += more
        end = len(own)
        return lambda: self.wait()[first:end]

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
