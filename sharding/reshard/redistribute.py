"""Moves tensors from one layout into another by messages: gathers, scatters, reshards.

`sharding.layout.copies` plans the copies. A rank sends the elements that others lack, and copies
the elements that it has itself. No tensor is gathered to be cut again.

Rules:

1. All ranks of the group take part, with the same tensors in the same order: names, dtypes and
   layouts. The messages follow from these alone, so ranks negotiate nothing.
2. Tensors of at most `budget` bytes in all travel in one message from rank to rank. A larger tensor
   travels in parts. Beside sources and targets, the memory of a rank holds at most the outgoing and
   incoming messages of one batch.
3. Elements that several ranks get are packed once.
4. On one host the messages travel through shared memory (`sharding.reshard.host_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sharding.agreement.channel import waiting_seconds
from sharding.agreement.links import MOST_SECONDS
from sharding.agreement.ranks import Ranks, message_device
from sharding.engine.transport import PendingWork
from sharding.errors import ArgumentError, TransferError
from sharding.layout import Layout
from sharding.layout.box import Piece
from sharding.layout.copies import Exchange, exchange, windows
from sharding.reshard.host_memory import NOTE_SIZE, HostMemory
from sharding.torch_versions import movable

BUDGET_BYTES = 64 << 20
"""The bytes of tensors that travel together."""
ALIGNMENT = 16
"""The alignment of copies in a message: the size of the widest element."""
TAG = 1 << 15
"""The tag of all messages of this module; those of `sharding.engine.transport` are higher."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A tensor with this rank's memory in its present and in its wanted layout."""

    name: str
    source: torch.Tensor
    """This rank's local storage under `have`, in row-major order; empty without elements."""
    have: Layout
    target: torch.Tensor
    """This rank's local storage under `want`: contiguous, of the same dtype."""
    want: Layout


@torch.no_grad()
def redistribute(
    moves: Iterable[Move],
    *,
    group: ProcessGroup | None = None,
    budget: int = BUDGET_BYTES,
    memory: HostMemory | None = None,
) -> None:
    """Fills every target with the elements of its layout.

    All ranks of `group` call this. Moves are taken from the iterable batch by batch, so that their
    targets may be made when they are needed. Sources do not change. A target may share memory only
    with its own source, if the elements are in place already. Raises HoleError if a layout wants
    elements that the other does not hold, TransferError if a rank does not take part in time. This
    function does not tell other ranks of these errors. `memory`, for messages between ranks of one
    host, may be that of several calls of one group; by default it is this call's.

    Local tensors must fit their layouts. A caller that is not sure calls `local_part.check_holds`
    before, and tells the other ranks.

    >>> have, want = Layout.replicated((4,), 1), Layout.single((4,))
    >>> target = torch.zeros(4)
    >>> redistribute([Move("w", torch.arange(4.0), have, target, want)])
    >>> target
    tensor([0., 1., 2., 3.])
    """
    here = Ranks(group).global_rank
    with HostMemory(group) if memory is None else nullcontext(memory) as memory:
        _move(moves, here, group, budget, memory)


def _move(
    moves: Iterable[Move], here: int, group: ProcessGroup | None, budget: int, memory: HostMemory
) -> None:
    batch = _Batch(here, group, memory)
    for move in moves:
        itemsize, numel = move.target.itemsize, move.have.numel
        if batch.nbytes + numel * itemsize > budget:
            batch.run()
            batch = _Batch(here, group, memory)
        if not move.target.is_contiguous():
            raise ArgumentError(f"{move.name}: the target is not contiguous in memory")
        plan = exchange(move.have, move.want, here)
        source, target = _flat(move.source.resolve_conj().resolve_neg()), _flat(move.target)
        if numel * itemsize <= budget:
            batch.add(plan, source, target, numel * itemsize)
            continue
        for window in windows(move.have.shape, max(1, budget // itemsize)):
            if batch.nbytes + window.numel * itemsize > budget:
                batch.run()
                batch = _Batch(here, group, memory)
            batch.add(plan.within(window), source, target, window.numel * itemsize)
    batch.run()


def _flat(local: torch.Tensor) -> torch.Tensor:
    """Returns a local tensor's elements in row-major order, end to end; a copy only if needed."""
    return local.detach().reshape(-1).contiguous()  # the result of `reshape` may be strided


@dataclass(slots=True)
class _Message:
    """The parts that travel from one rank to another, end to end."""

    parts: list[torch.Tensor] = field(default_factory=list)
    places: list[tuple[int, Piece]] = field(default_factory=list)
    """For each part: the index of its tensor in the batch, and its piece."""


class _Batch:
    """Tensors that travel together."""

    def __init__(self, here: int, group: ProcessGroup | None, memory: HostMemory) -> None:
        self.nbytes = 0
        self._memory = memory
        self._tensors = 0
        self._here = here
        self._group = group
        self._out: dict[int, _Message] = {}
        self._in: dict[int, _Message] = {}

    def add(self, plan: Exchange, source: torch.Tensor, target: torch.Tensor, nbytes: int) -> None:
        """Adds a move; copies elements that this rank has itself at once."""
        self.nbytes += nbytes
        self._tensors += 1
        for copy in plan.receives:
            place = _view(target, copy.target)
            if copy.source_rank == self._here:
                own = _view(source, copy.source)
                if own.data_ptr() != place.data_ptr():
                    movable(place).copy_(movable(own))
            else:
                self._in.setdefault(copy.source_rank, _Message()).parts.append(place)
        for copy in plan.sends:
            message = self._out.setdefault(copy.target_rank, _Message())
            message.parts.append(_view(source, copy.source))
            message.places.append((self._tensors, copy.source))

    def run(self) -> None:
        """Sends, receives, and puts received elements into their places. Waits."""
        if not self._out and not self._in:
            return
        if self._memory.is_shared:
            self._run_in_memory()
            return
        device = message_device(self._group)
        messages = []
        incoming = {}
        for source, message in self._in.items():
            size = sum(map(_padded_bytes, message.parts))
            incoming[source] = torch.empty(size, dtype=torch.uint8, device=device)
            messages.append(self._message(dist.irecv, incoming[source], source))
        packed: dict[tuple[tuple[int, Piece], ...], torch.Tensor] = {}
        for target, message in self._out.items():
            places = tuple(message.places)
            if places not in packed:
                packed[places] = _packed(message.parts, device)
            messages.append(self._message(dist.isend, packed[places], target))
        if device.type == "cpu":
            _exchange(self._group, messages)
        else:
            _exchange_on_stream(messages)
        for source, message in self._in.items():
            _unpack(incoming[source], message.parts)

    def _run_in_memory(self) -> None:
        """As `run`: packs into memory, tells the receivers, and waits until they have answered."""
        starts: dict[tuple[tuple[int, Piece], ...], int] = {}
        parts: list[torch.Tensor] = []
        end = 0
        for message in self._out.values():
            places = tuple(message.places)
            if places not in starts:
                starts[places] = end
                parts += message.parts
                end += sum(map(_padded_bytes, message.parts))
        _pack(self._memory.reserve(end), parts)
        notes = {source: torch.empty(NOTE_SIZE, dtype=torch.int64) for source in self._in}
        told = {
            target: self._memory.note(starts[tuple(message.places)])
            for target, message in self._out.items()
        }
        self._tell(notes, told)
        for source, message in self._in.items():
            nbytes = sum(map(_padded_bytes, message.parts))
            _unpack(self._memory.bytes_of(notes[source], nbytes), message.parts)
        self._tell(told, notes)  # the answers

    def _tell(
        self, incoming: Mapping[int, torch.Tensor], outgoing: Mapping[int, torch.Tensor]
    ) -> None:
        receives = [self._message(dist.irecv, one, rank) for rank, one in incoming.items()]
        sends = [self._message(dist.isend, one, rank) for rank, one in outgoing.items()]
        _exchange(self._group, [*receives, *sends])

    def _message(
        self, operation: Callable[..., object], buffer: torch.Tensor, other: int
    ) -> dist.P2POp:
        return dist.P2POp(operation, buffer, other, self._group, TAG)


def _exchange(group: ProcessGroup | None, messages: Sequence[dist.P2POp]) -> None:
    """Returns once all messages, in host memory, are sent or received.

    Raises TransferError if a message takes longer than ranks wait for one another.
    """
    pending_work = PendingWork(dist.group.WORLD if group is None else group)
    message = messages[0]
    try:
        for message in messages:
            work = message.op(message.tensor, message.peer, group=group, tag=message.tag)
            pending_work.add(work, message.tensor)
    except RuntimeError as error:
        raise TransferError(f"rank {message.peer} cannot be reached: {error}") from error
    try:
        pending_work.wait(min(waiting_seconds(), MOST_SECONDS))
    except RuntimeError as error:
        message = messages[pending_work.arrived]
        way = "came from" if message.op is dist.irecv else "could be sent to"
        raise TransferError(
            f"nothing {way} rank {message.peer} within {waiting_seconds():g} s, or it has ended: "
            f"{error}; the process group may be of no use any more"
        ) from error


def _exchange_on_stream(messages: list[dist.P2POp]) -> None:
    """Makes the accelerator wait for all messages; the process group has its own time-out."""
    try:
        works = dist.batch_isend_irecv(messages)
    except RuntimeError as error:
        raise TransferError(f"the other ranks cannot be reached: {error}") from error
    for work in works:
        work.wait()


def _view(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Returns the elements of a piece in local storage, in the shape of its box."""
    at = flat.storage_offset() + piece.at
    return flat.as_strided(piece.box.shape, piece.strides, at)


def _padded_bytes(part: torch.Tensor) -> int:
    """Returns the bytes of a part in a message, with padding."""
    return -(-part.numel() * part.itemsize // ALIGNMENT) * ALIGNMENT


def _places(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the places of the parts in a message."""
    at = 0
    for part in parts:
        nbytes = part.numel() * part.itemsize
        yield message[at : at + nbytes].view(part.dtype).view(part.shape)
        at += _padded_bytes(part)


def _packed(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    message = torch.empty(sum(map(_padded_bytes, parts)), dtype=torch.uint8, device=device)
    _pack(message, parts)
    return message


def _pack(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    for place, part in zip(_places(message, parts), parts, strict=True):
        place.copy_(part)


def _unpack(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    for place, part in zip(_places(message, parts), parts, strict=True):
        part.copy_(place)
