"""Executes a `LoadPlan`: read, verify, place, scatter, stage. The only executor of loads.

`ckpt.load` runs plans whose tensors lie in files, `ckpt.state_dict.load` runs plans whose tensors
lie in the memory of ranks. A plan names its targets by number; `LoadRun` has their memory.

Rules:

1. Bytes are verified by the rank that reads them, before they travel.
2. The memory of all tensors that are staged at once stays within `stage_bytes`.
3. A read that fails in a scatter round, or a cast, does not stop the rounds: the other ranks wait
   for messages. The error is raised after the last round.
4. `half_loaded` and `name_touched` make the errors of a load that failed half-way.

[Note: targets that share memory]
Their records are compared before the load changes any of them:

1. Records that lie in the same bytes are equal. Records with checksums of 128 bits are equal if all
   checksums are, and differ otherwise. These comparisons read no data.
2. Other records have no checksums, compressed chunks, or chunks of other sizes. The rank then reads
   its part of both records: in blocks of `BLOCK_BYTES` for two names of one tensor, as a whole and
   within the budget for views of different shapes.
3. Each rank compares its own parts. A difference on one rank ends the load on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch

from ckpt.errors import (
    DamagedLoadError,
    Difference,
    MismatchedLoadError,
    MismatchError,
    PartialLoadError,
    RankError,
    ReplacedError,
    ReplacedLoadError,
)
from ckpt.match.match_builder import Casting, Target, narrows
from ckpt.match.overlaps import Placed, conflict, differing, group_bytes, is_same_view
from ckpt.plan.load_plan import LoadItem, LoadPlan, Stage, TensorRead
from ckpt.plan.read_plan import NOWHERE, ReadRequest, requests_for
from ckpt.plan.scatter_plan import ScatterRound, TensorMove
from ckpt.state.memory import copy_in_range, empty_for, is_conj_or_neg, memory_of, torch_dtype
from ckpt.transfer.read import RangeReader, ReadPolicy, Unchanged, read_requests
from ckpt.transfer.record_sums import RecordSums, Verify, run_twice
from formats.catalog import Catalog, StoredPiece, TensorRecord
from formats.errors import FormatError, UnsupportedError
from formats.native.shard import Progress
from formats.storage import Reader
from sharding.agreement.ranks import result_or_error
from sharding.errors import ArgumentError, describe_error
from sharding.layout import Box, Piece
from sharding.reshard.redistribute import HostMemory, Move, redistribute

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@contextmanager
def half_loaded(touched: Iterable[str], reads: bool = True) -> Iterator[None]:
    """Errors in the block name the tensors that `touched` has at the time of the error.

    `reads` tells whether the block reads the checkpoint, whose damage its errors may show.

    Raises:
        DamagedLoadError: bytes of the checkpoint are missing or changed.
        ReplacedLoadError: the checkpoint was replaced meanwhile.
        MismatchedLoadError: a module misses or refuses names.
        PartialLoadError: any other failure.
    """
    try:
        yield
    except Exception as error:
        names = list(touched)
        if reads and isinstance(error, FormatError):
            raise DamagedLoadError(str(error), names) from error
        if reads and isinstance(error, ReplacedError):
            raise ReplacedLoadError(str(error), names) from error
        if isinstance(error, MismatchError):
            raise MismatchedLoadError(error.url, error.differences, names) from error
        raise PartialLoadError(f"{type(error).__name__}: {describe_error(error)}", names) from error


@contextmanager
def name_touched(touched: Iterable[str]) -> Iterator[None]:
    """A RankError in the block names the tensors that this rank, which did not fail, has filled."""
    try:
        yield
    except RankError as error:
        error.touched = tuple(touched)
        raise


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The execution of plans for one set of targets."""

    targets: Sequence[Target]
    """The targets, by their numbers in plans."""
    group: ProcessGroup | None = None
    """The ranks that exchange tensors."""
    casting: Casting | None = None
    """The casts to other dtypes that the caller allows."""
    touched: dict[str, None] = field(default_factory=dict)
    """Names of targets that reads have begun to fill."""

    def read(self, plan: LoadPlan, source: FileSource, stage_bytes: int) -> None:
        """Fulfils `plan.reads`. Does not communicate.

        Raises as `half_loaded` does, with the names of targets that were begun.
        """
        with half_loaded(self.touched):
            run_twice(lambda: self._read_all(plan, source, stage_bytes), source.sums)

    def _read_all(self, plan: LoadPlan, source: FileSource, stage_bytes: int) -> None:
        ranges = fresh = source.range_reader()
        if source.policy.unchanged is not Unchanged.READ:
            fresh = source.range_reader(Unchanged.READ)  # for stages without a version's bytes
        memory = [memoryview(b"")] * len(self.targets)
        for batch in _batches(plan.reads, stage_bytes):
            requests: list[ReadRequest] = []
            for_stages: list[ReadRequest] = requests if fresh is ranges else []
            staged: list[tuple[TensorRead, Stage, torch.Tensor]] = []
            for read in batch:
                name, target, some, stage = read
                self.touched[name] = None
                local, has_base = self.targets[target].local, True
                if stage is None:
                    memory[target] = memory_of(local)
                else:
                    dtype = torch_dtype(stage.dtype.torch_name)
                    into = torch.empty(stage.shape, dtype=dtype, device="cpu")
                    memory[target] = memory_of(into)
                    staged.append((read, stage, into))
                    has_base = source.policy.unchanged is Unchanged.DELTA and dtype == local.dtype
                    if has_base:
                        into.copy_(_rows(local, stage, into))
                (requests if has_base else for_stages).extend(some)
            ranges.run(requests, memory, source.progress)
            if fresh is not ranges:
                fresh.run(for_stages, memory, source.progress)
            for read, stage, into in staged:
                memory[read.target] = memoryview(b"")
                self._cast(read.name, into, _rows(self.targets[read.target].local, stage, into))
        ranges.finish(source.progress)

    def exchange(self, plan: LoadPlan, source: FileSource, budget: int) -> None:
        """Fulfils `plan.exchanges` and `plan.scatter_rounds`, after `read`.

        Called by all ranks of the group, with the same `budget` in bytes; communicates. Raises as
        `half_loaded` does, with the names of all targets.
        """
        failed: list[Exception] = []
        with HostMemory(self.group) as memory:
            self._redistribute(map(self._share, plan.exchanges), budget // 2, memory, failed)
            for scatter_round in plan.scatter_rounds:
                self._scatter(scatter_round, source, plan.names, failed, memory)
        if failed:
            raise failed[0]

    def move(self, plan: LoadPlan, sources: Mapping[str, torch.Tensor], budget: int) -> None:
        """Fulfils `plan.peer_moves`; `sources` has this rank's part of each tensor by name.

        Called by all ranks of the group, with the same `budget` in bytes; communicates. A target of
        another dtype, or without contiguous elements, is staged. A number beyond the range of its
        target is an error once all ranks have what they wait for.
        """
        error: Exception | None = None
        failed: list[Exception] = []
        with HostMemory(self.group) as memory:
            for batch in plan.peer_moves:
                staged: list[tuple[str, torch.Tensor, torch.Tensor]] = []
                moves = (self._from_peers(move, sources[move.name], staged) for move in batch)
                self._redistribute(moves, budget, memory, failed)
                for name, target, into in staged:
                    if error is None and not failed:
                        _, error = result_or_error(partial(self._cast, name, into, target))
        if failed:
            raise failed[0]
        if error is not None:
            raise error

    def _cast(self, name: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies into a tensor of perhaps another dtype.

        Raises ArgumentError for a number beyond its range, unless all casts are allowed.
        """
        if self.casting is Casting.UNSAFE or not narrows(source.dtype, target.dtype):
            target.copy_(source)
            return
        remedy = "load into a wider dtype, or pass casting='unsafe' to cast nevertheless"
        try:
            copy_in_range(name, source, target, remedy)
        except UnsupportedError as error:
            raise ArgumentError(f"dtype='target': {error}") from None  # nothing is damaged

    def _redistribute(
        self, moves: Iterable[Move], budget: int, memory: HostMemory, failed: list[Exception]
    ) -> None:
        redistribute(moves, group=self.group, budget=budget, memory=memory, failed=failed)

    def _share(self, move: TensorMove) -> Move:
        """Returns a move from this rank's share of a target into the whole target."""
        local = self.targets[move.target].local
        lo, hi = move.source
        return Move(move.name, local.reshape(-1)[lo:hi], move.have, local, move.want)

    def _scatter(
        self,
        scatter_round: ScatterRound,
        source: FileSource,
        names: Sequence[str],
        failed: list[Exception],
        memory: HostMemory,
    ) -> None:
        """Executes one round, and frees the memory of its sources (rule 3)."""
        moves = []
        for name, _, (lo, hi), have, target, want in scatter_round.moves:
            local = self.targets[target].local
            buffer = torch.empty(hi - lo, dtype=local.dtype, device="cpu")
            moves.append(Move(name, buffer, have, local, want))
        if scatter_round.requests and not failed:
            ranges = source.range_reader(Unchanged.READ)  # new memory has no chunk already
            sources = [memory_of(move.source) for move in moves]
            try:
                with half_loaded(names):
                    ranges.run(scatter_round.requests, sources, source.progress)
                    ranges.finish(source.progress)
            except Exception as error:
                failed.append(error)
        first = 0
        for count, nbytes in scatter_round.sends:
            self._redistribute(moves[first : first + count], nbytes, memory, failed)
            first += count

    def _from_peers(
        self,
        move: TensorMove,
        buffer: torch.Tensor,
        staged: list[tuple[str, torch.Tensor, torch.Tensor]],
    ) -> Move:
        def new() -> torch.Tensor:
            if move.target == NOWHERE:
                return buffer.new_empty(0)
            into = local = self.targets[move.target].local
            if local.dtype != buffer.dtype or not local.is_contiguous() or is_conj_or_neg(local):
                into = torch.empty(local.shape, dtype=buffer.dtype, device=local.device)
                staged.append((move.name, local, into))
            return into

        return Move(move.name, buffer, move.have, new, move.want)


@dataclass(frozen=True, slots=True)
class FileSource:
    """The source of a plan's reads, and the policy of the reads."""

    reader: Reader
    sums: RecordSums
    policy: ReadPolicy
    progress: Progress | None

    def range_reader(self, unchanged: Unchanged | None = None) -> RangeReader:
        """Returns a reader of byte ranges with scratch memory of its own.

        `unchanged` takes the place of the policy's treatment of chunks that the target has.
        """
        unchanged = self.policy.unchanged if unchanged is None else unchanged
        return RangeReader(self.reader, self.sums, replace(self.policy, unchanged=unchanged))


def _rows(local: torch.Tensor, stage: Stage, into: torch.Tensor) -> torch.Tensor:
    """Returns the part of a target that a stage's memory is for."""
    return local if into.shape == local.shape else local[stage.lo : stage.lo + len(into)]


def _batches(reads: Sequence[TensorRead], stage_bytes: int) -> Iterator[Sequence[TensorRead]]:
    """Yields reads that run together: their staged memory stays within `stage_bytes`."""
    first, staged = 0, 0
    for at, read in enumerate(reads):
        nbytes = 0 if read.stage is None else read.stage.nbytes
        if at > first and staged + nbytes > stage_bytes:
            yield reads[first:at]
            first, staged = at, 0
        staged += nbytes
    if first < len(reads):
        yield reads[first:]


BLOCK_BYTES = 16 << 20
"""Bytes of each of two records that are in memory at the same time."""
DIGEST_BYTES = 16
"""Bytes of a checksum by which equal chunks are known: 128 bits."""


@dataclass(frozen=True, slots=True)
class SharedTargets:
    """Compares the records of items whose targets share memory."""

    reader: Reader
    catalog: Catalog
    targets: Sequence[Target]
    rank: int
    budget: int
    """Bytes of host memory that a comparison may take."""
    verify: Verify

    def differences(self, groups: Sequence[tuple[LoadItem, ...]]) -> Iterator[Difference]:
        """Yields a difference, with two names, for each group that would get different values."""
        for group in groups:
            parts = [part for part in map(self._part, group) if part.local.numel()]
            if len(parts) < 2:
                continue
            if all(parts[0].is_like(other) for other in parts[1:]):
                first, *others = parts
                unlike = (other for other in others if not self._are_equal(first, other))
                found = (differing(first.name, other.name, other.nbytes) for other in unlike)
                yield from found
            else:
                yield from self._as_placed(parts)

    def _part(self, item: LoadItem) -> _Part:
        record, local = self.catalog.tensors[item.source], self.targets[item.target].local
        return _Part(item.name, record, local, tuple(item.layout.pieces(self.rank)))

    def _are_equal(self, one: _Part, other: _Part) -> bool:
        """Whether both records have equal elements in the boxes of this rank."""
        a, b = one.record, other.record
        for piece in one.pieces:
            if a.dtype == b.dtype:
                found = [list(record.pieces.locate(piece.box)) for record in (a, b)]
                same = same_bytes(*found)
                if same is not None:
                    if not same:
                        return False
                    continue
            most = BLOCK_BYTES // max(a.dtype.itemsize, b.dtype.itemsize)
            for box in piece.box.cut(most):
                first, second = (self._read(record, box, one.local.dtype) for record in (a, b))
                if not np.array_equal(memory_of(first), memory_of(second)):
                    return False
        return True

    def _read(self, record: TensorRecord, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Reads a box as a packed tensor of a target's dtype."""
        tensor = empty_for(record, box.shape)
        requests = requests_for(record, [Piece.packed(box)])
        read_requests(self.reader, requests, [memory_of(tensor)], self.verify)
        return tensor.to(dtype)

    def _as_placed(self, parts: Sequence[_Part]) -> Iterator[Difference]:
        """Yields the difference of views with different shapes, by values placed as the targets."""
        needed = group_bytes([part.local for part in parts])
        if needed > self.budget:
            first, other = parts[0].name, parts[1].name
            yield Difference(
                other,
                "structure",
                f"shares memory with {first} in the target as a view of another shape; to compare "
                f"their saved values takes {needed} bytes of memory, and the budget is "
                f"{self.budget} bytes; leave one out with exclude=, or raise CKPT_MEMORY_BUDGET",
            )
            return
        found = conflict([self._read_part(part) for part in parts])
        if found is not None:
            yield found

    def _read_part(self, part: _Part) -> Placed:
        values = empty_for(part.record, part.local.shape)
        requests = requests_for(part.record, part.pieces)
        read_requests(self.reader, requests, [memory_of(values)], self.verify)
        return Placed(part.name, part.local, values.to(part.local.dtype))


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of an item."""

    name: str
    record: TensorRecord
    local: torch.Tensor
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.local.numel() * self.local.itemsize

    def is_like(self, other: _Part) -> bool:
        """Whether the two targets are equal views with equal pieces."""
        here, there = self.local, other.local
        is_one = here.data_ptr() == there.data_ptr() and is_same_view(here, there)
        return is_one and self.pieces == other.pieces


def same_bytes(a: Sequence[StoredPiece], b: Sequence[StoredPiece]) -> bool | None:
    """Whether stored pieces hold equal bits, by place and checksums; None if these cannot tell.

    Only checksums of uncompressed chunks count. Compressed chunks may have different bytes for
    equal elements, or equal bytes relative to different bases.
    """
    for one, other in zip_longest(a, b):
        if one is None or other is None or one.piece != other.piece:
            return None
        here, there = one.extent, other.extent
        if here.chunks is None or there.chunks is None:
            if (here.file, here.offset, here.nbytes) != (there.file, there.offset, there.nbytes):
                return None
            continue
        if here.nbytes != there.nbytes or here.chunks.chunk_bytes != there.chunks.chunk_bytes:
            return None
        for index in range(len(here.chunks)):
            first, second = here.chunks[index], there.chunks[index]
            if first.compressed or second.compressed or len(first.digest) < DIGEST_BYTES:
                return None
            if first.digest != second.digest:
                return False
    return True
