"""Messages between ranks of one host through shared memory, in the place of gloo's connections.

A rank packs its messages into memory that has no name, and tells each receiver where it lies. The
receiver maps it by way of `/proc`, takes its elements, and answers. A byte is copied twice and
passes through no connection: a message by gloo is copied four times.

Rules:

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
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from struct import Struct
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sharding.agreement.ranks import HASH_BITS, Ranks, message_device
from sharding.errors import ShardingError, TransferError

STAGE = "finding the ranks of this host"
VARIABLE = "SHARDING_HOST_MEMORY"
_PLACE = Struct("!qqq")
"""A process, one of its descriptors, and the number of the memory there."""
_shares: WeakKeyDictionary[ProcessGroup, bool] = WeakKeyDictionary()


def shares_memory(group: ProcessGroup | None) -> bool:
    """Whether the ranks of a group exchange messages through memory (rule 1).

    All ranks of the group call this. The first call of a group communicates.
    """
    key = dist.group.WORLD if group is None and dist.is_initialized() else group
    if key is None:
        return False
    if key not in _shares:
        _shares[key] = _find(group)
    return _shares[key]


def _find(group: ProcessGroup | None) -> bool:
    ranks = Ranks(group)
    if ranks.is_single_process or "gloo" not in str(dist.get_backend(group)):
        return False
    if message_device(group).type != "cpu":
        return False
    if not ranks.agree(STAGE, hashes={"host": _host()}).same["host"]:
        return False
    number, descriptor = secrets.randbits(62), -1
    try:
        with suppress(OSError):  # this rank has no memory, and no other rank finds it
            descriptor = _new_memory(number, 1)
        mine = _PLACE.pack(os.getpid(), descriptor, number)
        everyone = _PLACE.iter_unpack(ranks.merge_records(STAGE, mine, b"".join))
        is_mapped = all(_is_mapped(*place) for place in everyone)
        answers = ranks.merge_records(STAGE, bytes([is_mapped]), b"".join)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return all(answers)


def _host() -> int:
    """Returns a hash of this host and user, equal where memory is shared; else a random number."""
    with suppress(OSError):  # a system without these files
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        processes = os.stat("/proc/self/ns/pid").st_ino
        said = f"{platform.node()} {boot} {processes} {os.geteuid()}"
        if os.environ.get(VARIABLE) != "0":
            digest = sha256(said.encode()).digest()
            return int.from_bytes(digest[:8], "big") >> (64 - HASH_BITS)
    return secrets.randbits(HASH_BITS)


def _is_mapped(process: int, descriptor: int, number: int) -> bool:
    with suppress(TransferError):
        return len(_open(process, descriptor, number, 1)) == 1
    return False


def _new_memory(number: int, nbytes: int) -> int:
    descriptor = os.memfd_create(_name(number), os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _name(number: int) -> str:
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
        """Returns memory for messages of so many bytes; those before have been read (rule 2)."""
        if nbytes > len(self._mine):
            self._free()
            self._number = secrets.randbits(62)
            try:
                self._descriptor = _new_memory(self._number, nbytes)
                self._mine = _map(self._descriptor, nbytes)
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
            memory = _open(process, descriptor, number, size)
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


def _open(process: int, descriptor: int, number: int, nbytes: int) -> torch.Tensor:
    """Returns the memory that another process has (rule 3)."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        if _name(number) not in os.readlink(path):
            raise TransferError(f"{path} is another file than the memory of a rank")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _map(opened, nbytes)
        finally:
            os.close(opened)
    except OSError as error:
        raise TransferError(
            f"the memory of process {process}, another rank, cannot be read: {error}; the process "
            f"has ended, or the system refuses: then set {VARIABLE}=0 on all ranks to send "
            "messages by gloo"
        ) from error


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
