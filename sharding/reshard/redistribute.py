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
4. On one host the messages travel through shared memory ([Note: host memory]).
5. A rank that fails goes on with the exchange: each of its messages has its mark in the place of
   elements. So no rank waits for it, and the process group stays of use. A rank that gets a mark
   passes it on. Only a message that does not come, and an interrupt, end the exchange at once.

[Note: host memory]
Messages between ranks of one host pass through shared memory, in the place of gloo's connections. A
rank packs its messages into memory that has no name, and tells each receiver where it lies. The
receiver maps it by way of `/proc`, takes its elements, and answers. A byte is copied twice and
passes through no connection: a message by gloo is copied four times.

1. A group uses memory if all of its ranks are on this host, of this user, and have mapped memory of
   each other rank. They find out once, at the first use of the group.
2. A rank packs again after all receivers of its last messages have answered.
3. Each memory has a random number in its name. No other file is opened in its place: `/proc` may be
   that of another namespace of processes, and a rank that fails closes its descriptors.
4. `SHARDING_HOST_MEMORY=0` on all ranks, at the first use of a group, keeps to gloo.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from struct import Struct
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sharding.agreement.channel import MOST_SECONDS, waiting_seconds
from sharding.agreement.ranks import HASH_BITS, Ranks, message_device
from sharding.errors import ArgumentError, ShardingError, TransferError
from sharding.layout import Layout
from sharding.layout.box import Piece
from sharding.layout.copies import Exchange, exchange, windows
from sharding.torch_versions import movable

BUDGET_BYTES = 64 << 20
"""The bytes of tensors that travel together."""
ALIGNMENT = 16
"""The alignment of copies in a message: the size of the widest element."""
HEADER_BYTES = ALIGNMENT
"""In front of the elements of a message that gloo or NCCL carries: the mark (rule 5)."""
MARK_BYTES = 8
TAG = 1 << 15
"""The tag of all messages of this module; those of `sharding.engine.transport` are higher."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A tensor with this rank's memory in its present and in its wanted layout."""

    name: str
    source: torch.Tensor
    """This rank's local storage under `have`, in row-major order; empty without elements."""
    have: Layout
    target: torch.Tensor | Callable[[], torch.Tensor]
    """This rank's local storage under `want`, contiguous and of the same dtype, or makes it."""
    want: Layout


@torch.no_grad()
def redistribute(
    moves: Iterable[Move],
    *,
    group: ProcessGroup | None = None,
    budget: int = BUDGET_BYTES,
    memory: HostMemory | None = None,
    stage: str | None = None,
    failed: list[Exception] | None = None,
) -> None:
    """Fills every target with the elements of its layout.

    All ranks of `group` call this. Moves are taken from the iterable batch by batch, and a target
    that is made is made then. Sources do not change. A target may share memory only with its own
    source, if the elements are in place already. `memory`, for messages between ranks of one host,
    may be that of several calls of one group; by default it is this call's.

    Local tensors must fit their layouts. A caller that is not sure calls `local_part.check_holds`
    before, and tells the other ranks.

    Args:
        stage: the ranks agree under this name once all is moved: an error of one is one of all.
            Without it, only the ranks with which a failed rank exchanges messages hear of it.
        failed: errors of this rank before, with which it sends and takes nothing. An error of this
            call is put there in the place of being raised, if there is no stage.

    Raises:
        HoleError: a layout wants elements that the other does not hold.
        TransferError: a rank does not take part in time, or failed and exchanges messages with this
            one; the error names it.
        RankError: another rank failed, with a stage.

    >>> have, want = Layout.replicated((4,), 1), Layout.single((4,))
    >>> target = torch.zeros(4)
    >>> redistribute([Move("w", torch.arange(4.0), have, target, want)])
    >>> target
    tensor([0., 1., 2., 3.])
    """
    ranks = Ranks(group)
    with HostMemory(group) if memory is None else nullcontext(memory) as memory:
        route = _Route(group, memory, ranks.global_rank)
        if failed:
            route.fail(failed[0])

        def move() -> None:
            _move(moves, route, budget, is_agreed=stage is not None)
            if route.own is not None and stage is not None:
                raise route.own

        if stage is None:
            move()
        else:
            ranks.run_on_all(stage, move)
    error = route.own or route.heard
    if error is not None:
        if failed is None:
            raise error
        if not failed:
            failed.append(error)


@dataclass(slots=True)
class _Route:
    """The way of all messages of one exchange, and the failure of which this rank knows."""

    group: ProcessGroup | None
    memory: HostMemory
    here: int
    own: Exception | None = None
    """The failure of this rank."""
    heard: TransferError | None = None
    """The failure of another rank."""
    mark: int = 0
    """The rank that failed, counted from 1; 0 for none."""
    later: list[torch.Tensor] = field(default_factory=list)
    """Marks on an accelerator, which are looked at once, at the end."""

    def fail(self, error: Exception) -> None:
        """Notes the first failure of this rank."""
        if not self.mark:
            self.own, self.mark = error, self.here + 1

    def hear(self, marks: Iterable[torch.Tensor]) -> None:
        for mark in marks:
            if not self.mark and (number := int(mark)):
                self.mark = number
                self.heard = TransferError(
                    f"rank {number - 1} failed while tensors travelled between the ranks: its own "
                    "error has the cause"
                )


def _move(moves: Iterable[Move], route: _Route, budget: int, is_agreed: bool) -> None:
    """Runs all batches; a failure of this rank is noted, so that the exchange goes on (rule 5).

    `is_agreed` tells whether the ranks agree afterwards, which answers the messages in memory.
    """
    batch = _Batch(route)
    for move in moves:
        source = target = None
        itemsize, numel = move.source.itemsize, move.have.numel
        if batch.nbytes + numel * itemsize > budget:
            batch.run()
            batch = _Batch(route)
        if not route.mark:
            try:
                source, target = _storage_of(move)
            except Exception as error:
                route.fail(error)
        plan = exchange(move.have, move.want, route.here)
        if numel * itemsize <= budget:
            batch.add(plan, source, target, numel * itemsize, itemsize)
            continue
        for window in windows(move.have.shape, max(1, budget // itemsize)):
            if batch.nbytes + window.numel * itemsize > budget:
                batch.run()
                batch = _Batch(route)
            batch.add(plan.within(window), source, target, window.numel * itemsize, itemsize)
    batch.run(is_last=is_agreed)
    route.hear(route.later)


def _storage_of(move: Move) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the elements of source and target, flat; makes the target."""
    target = move.target if isinstance(move.target, torch.Tensor) else move.target()
    if not target.is_contiguous():
        raise ArgumentError(f"{move.name}: the target is not contiguous in memory")
    return _flat(move.source.resolve_conj().resolve_neg()), _flat(target)


def _flat(local: torch.Tensor) -> torch.Tensor:
    """Returns a local tensor's elements in row-major order, end to end; a copy only if needed."""
    return local.detach().reshape(-1).contiguous()  # the result of `reshape` may be strided


@dataclass(slots=True)
class _Message:
    """The parts that travel from one rank to another, end to end."""

    nbytes: int = 0
    """Of all parts, with padding."""
    parts: list[torch.Tensor] = field(default_factory=list)
    """Incomplete once this rank has failed."""
    places: list[tuple[int, Piece]] = field(default_factory=list)
    """For each part that is sent: the index of its tensor in the batch, and its piece."""


class _Batch:
    """Tensors that travel together."""

    def __init__(self, route: _Route) -> None:
        self.nbytes = 0
        self._route = route
        self._tensors = 0
        self._out: dict[int, _Message] = {}
        self._in: dict[int, _Message] = {}

    def add(
        self,
        plan: Exchange,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        nbytes: int,
        itemsize: int,
    ) -> None:
        """Adds a move; copies elements that this rank has itself at once.

        A rank that has failed has no tensors, and adds the messages alone.
        """
        self.nbytes += nbytes
        self._tensors += 1
        here = self._route.here
        for copy in plan.receives:
            place = None if target is None else _view(target, copy.target)
            if copy.source_rank == here:
                if source is not None and place is not None:
                    self._copy(_view(source, copy.source), place)
                continue
            message = self._in.setdefault(copy.source_rank, _Message())
            message.nbytes += _pad(copy.target.box.numel * itemsize)
            if place is not None:
                message.parts.append(place)
        for copy in plan.sends:
            message = self._out.setdefault(copy.target_rank, _Message())
            message.nbytes += _pad(copy.source.box.numel * itemsize)
            if source is not None:
                message.parts.append(_view(source, copy.source))
                message.places.append((self._tensors, copy.source))

    def _copy(self, own: torch.Tensor, place: torch.Tensor) -> None:
        if own.data_ptr() == place.data_ptr():
            return
        try:
            movable(place).copy_(movable(own))
        except Exception as error:
            self._route.fail(error)

    def run(self, is_last: bool = False) -> None:
        """Sends, receives, and puts received elements into their places. Waits.

        `is_last` tells that the ranks agree next.
        """
        if not self._out and not self._in:
            return
        if self._route.memory.is_shared:
            self._run_in_memory(is_last)
            return
        route, device = self._route, message_device(self._route.group)
        incoming = {
            rank: torch.empty(HEADER_BYTES + message.nbytes, dtype=torch.uint8, device=device)
            for rank, message in self._in.items()
        }
        outgoing = self._pack_messages(device)
        marks = [_mark_of(buffer) for buffer in incoming.values()]
        if device.type == "cpu":
            self._send_and_receive(incoming, outgoing)
            route.hear(marks)
        else:
            _exchange_on_stream(self._messages(incoming, outgoing))
            route.later += marks
        self._take(lambda rank: incoming[rank][HEADER_BYTES:])

    def _pack_messages(self, device: torch.device) -> dict[int, torch.Tensor]:
        """Returns the messages by receiver; of a rank that has failed, its mark alone (rule 5)."""
        route = self._route
        packed: dict[tuple[tuple[int, Piece], ...], torch.Tensor] = {}
        messages: dict[int, torch.Tensor] = {}
        if not route.mark:
            try:
                for rank, message in self._out.items():
                    places = tuple(message.places)
                    if places not in packed:
                        packed[places] = _new_message(message.nbytes, 0, device)
                        _pack(packed[places][HEADER_BYTES:], message.parts)
                    messages[rank] = packed[places]
                return messages
            except Exception as error:
                route.fail(error)
        # gloo takes a shorter message in the place of a longer one; NCCL waits for all bytes.
        is_short = device.type == "cpu"
        return {
            rank: _new_message(0 if is_short else message.nbytes, route.mark, device)
            for rank, message in self._out.items()
        }

    def _run_in_memory(self, is_last: bool) -> None:
        """As `run`: packs into memory, tells the receivers, and waits until they have answered."""
        route, memory = self._route, self._route.memory
        starts: dict[tuple[tuple[int, Piece], ...], int] = {}
        parts: list[torch.Tensor] = []
        end = 0
        for message in self._out.values():
            places = tuple(message.places)
            if places not in starts:
                starts[places] = end
                parts += message.parts
                end += message.nbytes
        if not route.mark:
            try:
                _pack(memory.reserve(end), parts)
            except Exception as error:
                route.fail(error)
        notes = {source: torch.empty(NOTE_SIZE, dtype=torch.int64) for source in self._in}
        received = {
            target: memory.note(starts[tuple(message.places)], route.mark)
            for target, message in self._out.items()
        }
        self._send_and_receive(notes, received)
        route.hear([note[MARK] for note in notes.values()])
        self._take(lambda rank: memory.bytes_of(notes[rank], self._in[rank].nbytes))
        if is_last:
            return  # the agreement of the ranks is the answer
        for note in notes.values():
            note[MARK] = route.mark
        self._send_and_receive(received, notes)  # the answers
        route.hear([answer[MARK] for answer in received.values()])

    def _take(self, bytes_from: Callable[[int], torch.Tensor]) -> None:
        """Puts received elements into their places, unless a rank has failed."""
        try:
            for rank, message in self._in.items():
                if self._route.mark:
                    return
                _unpack(bytes_from(rank), message.parts)
        except Exception as error:
            self._route.fail(error)

    def _send_and_receive(
        self, incoming: Mapping[int, torch.Tensor], outgoing: Mapping[int, torch.Tensor]
    ) -> None:
        _exchange(self._route.group, self._messages(incoming, outgoing))

    def _messages(
        self, incoming: Mapping[int, torch.Tensor], outgoing: Mapping[int, torch.Tensor]
    ) -> list[dist.P2POp]:
        return [
            dist.P2POp(operation, buffer, other, self._route.group, TAG)
            for operation, buffers in ((dist.irecv, incoming), (dist.isend, outgoing))
            for other, buffer in buffers.items()
        ]


def _exchange(group: ProcessGroup | None, messages: Sequence[dist.P2POp]) -> None:
    """Returns once all messages, in host memory, are sent or received.

    Raises TransferError if a message takes longer than ranks wait for one another.
    """
    from sharding.engine.transport import PendingWork  # imports FSDP: half a second

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
            f"{error}; the process group may be unusable now"
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


def _pad(nbytes: int) -> int:
    """Returns the bytes of a part in a message, with padding."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _places(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    at = 0
    for part in parts:
        nbytes = part.numel() * part.itemsize
        yield message[at : at + nbytes].view(part.dtype).view(part.shape)
        at += _pad(nbytes)


def _new_message(nbytes: int, mark: int, device: torch.device) -> torch.Tensor:
    """Returns memory for a message of so many bytes behind the header, which has the mark."""
    message = torch.empty(HEADER_BYTES + nbytes, dtype=torch.uint8, device=device)
    _mark_of(message).fill_(mark)
    return message


def _mark_of(message: torch.Tensor) -> torch.Tensor:
    return message[:MARK_BYTES].view(torch.int64)


def _pack(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    for place, part in zip(_places(message, parts), parts, strict=True):
        place.copy_(part)


def _unpack(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    for place, part in zip(_places(message, parts), parts, strict=True):
        part.copy_(place)


HOST_STAGE = "finding the ranks of this host"
VARIABLE = "SHARDING_HOST_MEMORY"
_PLACE = Struct("!qqq")
"""A process, one of its descriptors, and the number of the memory there."""
_shares: WeakKeyDictionary[ProcessGroup, bool] = WeakKeyDictionary()


def shares_memory(group: ProcessGroup | None) -> bool:
    """Whether the ranks of a group exchange messages through memory ([Note: host memory]).

    All ranks of the group call this. The first call of a group communicates.
    """
    key = dist.group.WORLD if group is None and dist.is_initialized() else group
    if key is None:
        return False
    if key not in _shares:
        _shares[key] = _find_shared(group)
    return _shares[key]


def _find_shared(group: ProcessGroup | None) -> bool:
    ranks = Ranks(group)
    if ranks.is_single_process or "gloo" not in str(dist.get_backend(group)):
        return False
    if message_device(group).type != "cpu":
        return False
    if not ranks.agree(HOST_STAGE, hashes={"host": _host_hash()}).same["host"]:
        return False
    number, descriptor = secrets.randbits(62), -1
    try:
        with suppress(OSError):  # this rank has no memory, and no other rank finds it
            descriptor = _new_memory(number, 1)
        mine = _PLACE.pack(os.getpid(), descriptor, number)
        everyone = _PLACE.iter_unpack(ranks.merge_records(HOST_STAGE, mine, b"".join))
        is_mapped = all(_is_mapped(*place) for place in everyone)
        answers = ranks.merge_records(HOST_STAGE, bytes([is_mapped]), b"".join)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return all(answers)


def _host_hash() -> int:
    """Returns a hash of this host and user, equal where memory is shared; else a random number."""
    with suppress(OSError):  # a system without these files
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        processes = os.stat("/proc/self/ns/pid").st_ino
        identity = f"{platform.node()} {boot} {processes} {os.geteuid()}"
        if os.environ.get(VARIABLE) != "0":
            digest = sha256(identity.encode()).digest()
            return int.from_bytes(digest[:8], "big") >> (64 - HASH_BITS)
    return secrets.randbits(HASH_BITS)


def _is_mapped(process: int, descriptor: int, number: int) -> bool:
    with suppress(TransferError):
        return len(_open_memory(process, descriptor, number, 1)) == 1
    return False


def _new_memory(number: int, nbytes: int) -> int:
    descriptor = os.memfd_create(_memory_name(number), os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _memory_name(number: int) -> str:
    return f"ckpt-messages-{number:016x}"


NOTE_SIZE = 6
"""The elements of a note."""
MARK = NOTE_SIZE - 1
"""The element of a note that belongs to the caller."""


class HostMemory:
    """The memory of a rank's outgoing messages, and of the other ranks' as this rank sees it.

    All ranks of the group make one at a time, use it for the same exchanges and close it, or leave
    its block.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.is_shared = shares_memory(group)
        """Whether the ranks exchange messages through memory; nothing else may be used if not."""
        self._descriptor = -1
        self._number = 0
        self._mine = torch.empty(0, dtype=torch.uint8)
        self._theirs: dict[int, tuple[int, torch.Tensor]] = {}
        """By process: the number of its memory, and the memory."""

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Returns memory for messages of so many bytes; those before have been read."""
        if nbytes > len(self._mine):
            self._free()
            self._number = secrets.randbits(62)
            try:
                self._descriptor = _new_memory(self._number, nbytes)
                self._mine = _map_memory(self._descriptor, nbytes)
            except OSError as error:
                raise ShardingError(
                    f"this host gives no {nbytes:,} bytes of shared memory for messages: {error}; "
                    f"set {VARIABLE}=0 on all ranks to send messages by gloo"
                ) from error
        return self._mine[:nbytes]

    def note(self, at: int, mark: int = 0) -> torch.Tensor:
        """Returns the message that tells a receiver where its bytes begin."""
        place = [os.getpid(), self._descriptor, self._number, len(self._mine), at, mark]
        return torch.tensor(place, dtype=torch.int64)

    def bytes_of(self, note: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Returns the bytes of a message, where its sender has packed them."""
        process, descriptor, number, size, at, _ = note.tolist()
        known, memory = self._theirs.get(process, (0, self._mine))
        if known != number:
            memory = _open_memory(process, descriptor, number, size)
            self._theirs[process] = number, memory
        return memory[at : at + nbytes]

    def close(self) -> None:
        """Lets go of all memory, also of that of other ranks."""
        self._free()
        self._theirs.clear()

    def _free(self) -> None:
        self._mine = torch.empty(0, dtype=torch.uint8)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open_memory(process: int, descriptor: int, number: int, nbytes: int) -> torch.Tensor:
    """Returns the memory that another process has ([Note: host memory])."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        if _memory_name(number) not in os.readlink(path):
            raise TransferError(f"{path} is another file than the memory of a rank")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _map_memory(opened, nbytes)
        finally:
            os.close(opened)
    except OSError as error:
        raise TransferError(
            f"the memory of process {process}, another rank, cannot be read: {error}; the process "
            f"has ended, or the system refuses: then set {VARIABLE}=0 on all ranks to send "
            "messages by gloo"
        ) from error


def _map_memory(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
