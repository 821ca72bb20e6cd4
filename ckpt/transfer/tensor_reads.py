"""What fills the tensors of a target: planned with nothing touched, then read.

A tensor whose memory bytes can be read into is one fill. One of another type, on another device or
with steps between its elements is *staged*: read into memory of its own and copied, some rows at a
time where it is large, so that all that is staged at once stays within a part of the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ckpt.errors import DamagedLoadError, PartialLoadError, ReplacedError, ReplacedLoadError
from ckpt.match.match_builder import Want
from ckpt.plan.read_plan import Fits, Request, requests_for
from ckpt.state.memory import is_plain, memory_of, torch_dtype
from ckpt.transfer.read import Reading, Transfer
from ckpt.transfer.record_sums import RecordSums
from ckpt.transfer.shares import Shares
from formats.errors import FormatError
from formats.native.shard import Progress
from formats.storage import Reader
from sharding.describe.describing import describe
from sharding.layout import Mesh, Piece


class Fill(NamedTuple):
    """One tensor to read, or some rows of one."""

    name: str
    requests: list[Request]
    target: torch.Tensor
    staged_as: torch.dtype | None
    """The type in which it is read into memory of its own and then copied; None: as it lies."""

    @property
    def staged_bytes(self) -> int:
        """Memory of its own that it needs."""
        return 0 if self.staged_as is None else self.target.numel() * self.staged_as.itemsize

    def stage(self) -> tuple[torch.Tensor, list[Request]]:
        """Memory of its own, and the requests that fill it."""
        into = torch.empty(self.target.shape, dtype=self.staged_as, device="cpu")
        memory = memory_of(into)
        return into, [request._replace(memory=memory) for request in self.requests]


@dataclass(frozen=True, slots=True)
class Planning:
    """What the fills of all tensors share."""

    world: Mesh
    here: int
    stage_bytes: int
    """How much is read into memory of its own at once."""
    fits: Fits
    shares: Shares | None = None
    """What replicas read for one another; None where each reads for itself."""

    def fills(self, want: Want) -> Iterator[Fill]:
        """What fills one tensor: all of it at once, unless it is staged and large."""
        record = want.record
        local, layout = describe(want.tensor, want.name, self.world)
        dtype = torch_dtype(record.dtype.torch_name)
        if record.name != want.name:
            record = replace(record, name=want.name)
        pieces: Sequence[Piece] = self.fits.pieces(layout, self.here)
        if dtype == local.dtype and is_plain(local):
            if self.shares is not None:
                if self.shares.takes(want.name, record, local, layout):
                    return
                pieces = self.shares.of(want.name, local, layout, pieces)
            requests = requests_for(record, pieces, memory_of(local), self.fits)
            yield Fill(want.name, requests, local, None)
        elif local.ndim == 0 or local.numel() * dtype.itemsize <= self.stage_bytes:
            requests = requests_for(record, pieces, _UNMADE, self.fits)
            yield Fill(want.name, requests, local, dtype)
        else:
            row = local.numel() // local.shape[0]
            step = max(1, self.stage_bytes // (row * dtype.itemsize))
            for first in range(0, local.shape[0], step):
                rows = local[first : first + step]
                lo, hi = first * row, first * row + rows.numel()
                some = [part for piece in pieces for part in piece.within(lo, hi)]
                moved = [Piece(part.box, part.at - lo, part.strides) for part in some]
                yield Fill(want.name, requests_for(record, moved, _UNMADE), rows, dtype)


_UNMADE = memoryview(b"")
"""Stands for the memory of what is staged, until it is its turn."""


def read_fills(
    reader: Reader,
    fills: list[Fill],
    sums: RecordSums,
    progress: Progress | None,
    how: Reading,
    stage_bytes: int,
) -> None:
    """All fills are done when this returns, and verified as `sums` says.

    Raises DamagedLoadError, ReplacedLoadError or PartialLoadError with the names that were touched.
    """
    touched: dict[str, None] = {}
    engine = Transfer(reader, sums, how.workers, how.limits)
    try:
        for batch in _batches(fills, stage_bytes):
            touched.update(dict.fromkeys(fill.name for fill in batch))
            requests: list[Request] = []
            staged: list[tuple[torch.Tensor, torch.Tensor]] = []
            for fill in batch:
                if fill.staged_as is None:
                    requests += fill.requests
                else:
                    into, filling = fill.stage()
                    staged.append((fill.target, into))
                    requests += filling
            engine.run(requests, progress)
            for target, into in staged:
                target.copy_(into)
        engine.finish(progress)
    except FormatError as error:
        raise DamagedLoadError(str(error), list(touched)) from error
    except ReplacedError as error:
        raise ReplacedLoadError(str(error), list(touched)) from error
    except Exception as error:
        raise PartialLoadError(f"{type(error).__name__}: {error}", list(touched)) from error


def _batches(fills: list[Fill], stage_bytes: int) -> Iterator[list[Fill]]:
    """Fills together as long as their memory of their own stays within `stage_bytes`."""
    batch: list[Fill] = []
    staged = 0
    for fill in fills:
        if batch and staged + fill.staged_bytes > stage_bytes:
            yield batch
            batch, staged = [], 0
        batch.append(fill)
        staged += fill.staged_bytes
    if batch:
        yield batch
