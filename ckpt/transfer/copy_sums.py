"""The checksums of a copied file's tensors, whose bytes come in runs, in any order.

`formats.outgoing` has the two kinds. Several threads take the checksums of their runs at once, and
add them one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ckpt.plan.copy_plan import TensorRun
from formats.native.shard_writer import record_of
from formats.outgoing import FilePlan, OutgoingTensor
from formats.zip_plan import SummedRanges, crc32

_Sum = TypeVar("_Sum")


class TensorSums(ABC, Generic[_Sum]):
    """The records of a file's tensors."""

    def __init__(self, plan: FilePlan) -> None:
        self._sizes = [part.nbytes for part in plan.parts if isinstance(part, OutgoingTensor)]
        self._known = 0
        self._records = bytearray()

    @abstractmethod
    def of(self, run: TensorRun, data: memoryview) -> _Sum:
        """Returns the checksums of a run. Changes nothing."""

    @abstractmethod
    def add(self, run: TensorRun, found: _Sum) -> None:
        """Adds the checksums of a run."""

    @abstractmethod
    def _whole(self, tensor: int, nbytes: int) -> bytes | None:
        """Returns the records of a tensor, and forgets them; None unless all runs were added."""

    def taken(self, runs: Sequence[TensorRun], memory: memoryview) -> Callable[[], None]:
        """Takes the checksums of runs, whose places are bytes of `memory`. The result adds them.

        The caller calls the result while no other thread adds or asks.
        """
        found = [(run, self.of(run, memory[run.at : run.at + run.nbytes])) for run in runs]

        def add_all() -> None:
            for run, one in found:
                self.add(run, one)

        return add_all

    def has(self, tensors: int) -> bool:
        """Whether the records of the first `tensors` tensors are known."""
        while self._known < tensors:
            found = self._whole(self._known, self._sizes[self._known])
            if found is None:
                return False
            self._records += found
            self._known += 1
        return True

    @property
    def records(self) -> bytes:
        """The records of the first tensors: of as many as `has` was asked for."""
        return bytes(self._records)

    @property
    def all_records(self) -> bytes:
        """The records of all tensors, whose runs were added."""
        assert self.has(len(self._sizes))
        return bytes(self._records)


class Crc32Sums(TensorSums[int]):
    """The CRC-32 of each tensor, as 4 bytes."""

    def __init__(self, plan: FilePlan) -> None:
        super().__init__(plan)
        self._parts: dict[int, SummedRanges] = {}

    def of(self, run: TensorRun, data: memoryview) -> int:
        """Returns the CRC-32 of a run."""
        return crc32(data)

    def add(self, run: TensorRun, found: int) -> None:
        """Adds the CRC-32 of a run."""
        self._parts.setdefault(run.tensor, SummedRanges()).add(run.lo, run.lo + run.nbytes, found)

    def _whole(self, tensor: int, nbytes: int) -> bytes | None:
        parts = self._parts.get(tensor)
        found = parts.whole(nbytes) if parts is not None else None
        if found is None and nbytes:
            return None
        self._parts.pop(tensor, None)
        return (found or 0).to_bytes(4, "little")


@dataclass(slots=True)
class _Chunks:
    """The chunks of one tensor so far."""

    records: dict[int, bytes] = field(default_factory=dict)
    begun: dict[int, tuple[bytearray, int]] = field(default_factory=dict)
    """Chunks that runs end in: their bytes so far, and how many are missing."""


@dataclass(frozen=True, slots=True)
class _ChunkRun:
    """The chunks of a run."""

    first: int
    """The first whole chunk."""
    records: list[bytes]
    """Those of the whole chunks."""
    ends: list[tuple[int, bytes]]
    """The bytes of chunks that other runs have parts of, each with its first byte."""


class ChunkSums(TensorSums[_ChunkRun]):
    """The record of each chunk of each tensor. A run may begin and end inside a chunk."""

    def __init__(self, plan: FilePlan) -> None:
        super().__init__(plan)
        self._chunk_bytes = plan.chunk_bytes
        self._tensors: dict[int, _Chunks] = {}

    def of(self, run: TensorRun, data: memoryview) -> _ChunkRun:
        """Returns the records of a run's whole chunks, and the bytes of others."""
        step, lo, hi = self._chunk_bytes, run.lo, run.lo + run.nbytes
        begin = min(hi, -(-lo // step) * step)
        end = hi if hi == self._sizes[run.tensor] else max(begin, hi // step * step)
        records = [
            record_of(data[at - lo : min(at + step, end) - lo]) for at in range(begin, end, step)
        ]
        ends = [(at, bytes(data[at - lo : to - lo])) for at, to in ((lo, begin), (end, hi))]
        return _ChunkRun(begin // step, records, [one for one in ends if one[1]])

    def add(self, run: TensorRun, found: _ChunkRun) -> None:
        """Adds the chunks of a run."""
        chunks = self._tensors.setdefault(run.tensor, _Chunks())
        chunks.records.update(enumerate(found.records, found.first))
        for at, data in found.ends:
            self._add_end(chunks, self._sizes[run.tensor], at, data)

    def _add_end(self, chunks: _Chunks, nbytes: int, at: int, data: bytes) -> None:
        """Adds the bytes of a part of one chunk."""
        chunk, start = divmod(at, self._chunk_bytes)
        size = min(self._chunk_bytes, nbytes - chunk * self._chunk_bytes)
        memory, missing = chunks.begun.pop(chunk, (bytearray(), size))
        memory = memory or bytearray(size)
        memory[start : start + len(data)] = data
        if missing > len(data):
            chunks.begun[chunk] = memory, missing - len(data)
        else:
            chunks.records[chunk] = record_of(memory)

    def _whole(self, tensor: int, nbytes: int) -> bytes | None:
        count = -(-nbytes // self._chunk_bytes)
        found = self._tensors.get(tensor)
        if count and (found is None or len(found.records) < count):
            return None
        self._tensors.pop(tensor, None)
        return b"" if found is None else b"".join([found.records[at] for at in range(count)])


def sums_of(plan: FilePlan) -> Crc32Sums | ChunkSums:
    """Returns the checksums to take for a file."""
    return ChunkSums(plan) if plan.chunk_bytes else Crc32Sums(plan)
