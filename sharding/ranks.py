"""What the processes of a job tell one another: small fixed-size records, never tensors.

Rules:

1. Every rank enters every collective, in the same order. What can fail is done before one, and the
   failure is what the collective carries; then all ranks raise.
2. A record's size does not depend on the world size. Only the commit gathers one record per rank,
   on rank 0.
3. A rank that dies ends the others' collectives with an error when the process group notices: at
   once where a connection breaks, within the group's time-out otherwise.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from sharding.errors import NotAMemberError, RankError
from sharding.layout import Mesh

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

T = TypeVar("T")

RECORD_BYTES = 128
"""Bytes of one rank's record at the commit."""
HASH_BITS = 62
"""Bits of a hash that travel: all of them and their negative fit into an int64."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What every rank knows after `Ranks.agree`."""

    same: tuple[bool, ...]
    """For each hash that was compared: whether it is the same on every rank."""
    number: int
    """Rank 0's number."""


class Ranks:
    """The processes that act together; one alone where there is no process group."""

    rank_error: type[RankError] = RankError
    """What is raised where another rank failed."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.rank, self.world_size = 0, 1
        self.mesh = _world(1)
        """The processes by their rank in the default group, which is what layouts speak of."""
        self.is_subgroup = group is not None
        self.told: tuple[int, str] | None = None
        """The failure that the ranks agreed on: the rank and the class of its error. The same on
        all of them, also where several failed."""
        self._group = group
        self._device: torch.device | None = None
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
            if self.rank < 0:
                raise NotAMemberError("this rank is not in the process group it was given")
            self._device = message_device(group)
            if group is None:
                self.mesh = _world(self.world_size)
            else:
                members = dist.get_process_group_ranks(group)
                self.mesh = Mesh.of_ranks(("world",), (self.world_size,), members)

    @property
    def here(self) -> int:
        """This process in layouts: its rank in the default group."""
        return self.mesh.rank((self.rank,))

    @property
    def alone(self) -> bool:
        """True when there is nobody to talk to."""
        return self.world_size == 1

    def agree(
        self,
        stage: str,
        error: BaseException | None = None,
        hashes: Sequence[int] = (),
        number: int = 0,
    ) -> Agreement:
        """One all-reduce: raises on all ranks when any has an error, compares hashes.

        A rank that failed raises its own exception; the others raise a RankError that names the
        lowest rank that failed. `number`, below 2**62, is rank 0's to give.
        """
        if self.alone:
            if error is not None:
                self.told = (self.rank, type(error).__name__)
                raise error
            return Agreement(tuple(True for _ in hashes), number)
        # The maximum over ranks of x and of -x are equal and opposite exactly when all x are equal.
        worst = 0 if error is None else self.world_size - self.rank
        given = [worst, number if self.rank == 0 else 0]
        for value in hashes:
            given += [value, -value]
        agreed = self._maximum(given)
        if agreed[0]:
            self._raise(stage, self.world_size - agreed[0], error)
        pairs = zip(agreed[2::2], agreed[3::2], strict=True)
        return Agreement(tuple(high == -low for high, low in pairs), agreed[1])

    def attempt(self, stage: str, action: Callable[[], T]) -> T:
        """Run something that may fail on any rank; returns when it has succeeded on all."""
        return self.compare(stage, action, lambda result: (), 0)[0]

    def compare(
        self,
        stage: str,
        action: Callable[[], T],
        hashes: Callable[[T], Sequence[int]],
        count: int,
        number: int = 0,
    ) -> tuple[T, Agreement]:
        """`attempt`, and whether each of `count` hashes of the result is the same on every rank."""
        results, error = attempt(action)
        given = hashes(results[0]) if results else [0] * count
        agreement = self.agree(stage, error, given, number)
        return results[0], agreement

    def common(self, flags: bytes) -> bytes:
        """The bytewise minimum over ranks of equally long byte strings."""
        if self.alone or not flags:
            return flags
        import torch
        import torch.distributed as dist

        tensor = torch.frombuffer(bytearray(flags), dtype=torch.uint8).to(self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return bytes(tensor.cpu().numpy())

    def all_hashes(self, value: int) -> list[int]:
        """Every rank's number, by rank: used only after `agree` found that they differ."""
        import torch
        import torch.distributed as dist

        mine = torch.tensor([value], dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self._group)
        return [int(tensor.item()) for tensor in everyone]

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """The bytes that rank `source` gives, on every rank; compressed on the way."""
        if self.alone:
            return data
        import torch
        import torch.distributed as dist

        root = dist.get_global_rank(self._group, source) if self._group is not None else source
        packed = zlib.compress(data, 1) if self.rank == source else b""
        length = torch.tensor([len(packed)], dtype=torch.int64, device=self._device)
        dist.broadcast(length, root, group=self._group)
        tensor = torch.zeros(int(length.item()), dtype=torch.uint8, device=self._device)
        if self.rank == source:
            tensor.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        dist.broadcast(tensor, root, group=self._group)
        return zlib.decompress(bytes(tensor.cpu().numpy()))

    def gather(self, record: bytes) -> list[bytes]:
        """Every rank's record, by rank, on rank 0; nothing on the others."""
        if self.alone:
            return [record]
        import torch
        import torch.distributed as dist

        root = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        padded = bytearray(record.ljust(RECORD_BYTES, b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(self._device)
        everyone = None
        if self.rank == 0:
            everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.gather(mine, everyone, dst=root, group=self._group)
        return [bytes(t.cpu().numpy()).rstrip(b"\0") for t in everyone or ()]

    def _maximum(self, values: list[int]) -> list[int]:
        """The largest of each value over all ranks.

        In host memory by way of rank 0: gloo's own all-reduce passes 2 * (W - 1) messages on, one
        after the other, at every rank, and takes several times the processor time.
        """
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        if tensor.is_cpu:
            root = dist.get_global_rank(self._group, 0) if self._group is not None else 0
            everyone = tensor.repeat(self.world_size if self.rank == 0 else 1, 1)
            rows = list(everyone.unbind()) if self.rank == 0 else None
            dist.gather(tensor, rows, dst=root, group=self._group)
            tensor = everyone.amax(0)
            dist.broadcast(tensor, root, group=self._group)
        else:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def _raise(self, stage: str, failed: int, error: BaseException | None) -> None:
        said = f"{type(error).__name__}\n{error}" if error is not None else ""
        name, _, message = self.broadcast(said.encode(), failed).decode().partition("\n")
        self.told = (failed, name)
        other = self.rank_error(stage, failed, name, message)
        raise other if error is None else error


@lru_cache(16)
def _world(size: int) -> Mesh:
    """The mesh of the default group; of equal ones the same object."""
    return Mesh.grid(("world",), (size,))


def attempt(action: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """What an action returned, alone in a list, or an empty one and the exception it raised."""
    try:
        return [action()], None
    except Exception as error:
        return [], error


def message_device(group: ProcessGroup | None) -> torch.device:
    """Where a group's messages lie: in host memory if it can, else on the current accelerator."""
    import torch
    import torch.distributed as dist

    backend = str(dist.get_backend(group))
    if any(name in backend for name in ("gloo", "mpi", "ucc", "fake")):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
