"""Loading: match, plan, agree, read, install.

Nothing in the target changes before every rank has matched all names, opened the files it needs and
agreed with the others. Then tensors are read into the memory they have; optimizers and other
objects get their state last, by their own `load_state_dict`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from ckpt.bites import Fits, Request, requests_for
from ckpt.budget import memory_budget
from ckpt.errors import DamagedLoadError, Difference, PartialLoadError
from ckpt.fitting import check_fits, check_numbers, differences, mark
from ckpt.garbage import collected_later
from ckpt.ledger import Match, Want
from ckpt.match import match
from ckpt.memory import is_plain, memory_of, torch_dtype
from ckpt.ranks import Ranks
from ckpt.saved import Rename, Saved
from ckpt.selection import Selection
from ckpt.sources import Source, open_source
from ckpt.transfer import Reading, Transfer
from formats.errors import FormatError
from formats.native.shard import Progress
from sharding.describing import describe
from sharding.layout import Mesh, Piece

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

S = TypeVar("S")

Patterns = str | Sequence[str]


def load(
    url: str | os.PathLike[str],
    state: S,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    dtype: str | None = None,
    verify: bool = True,
    group: ProcessGroup | None = None,
    progress: Progress | None = None,
) -> S:
    """`state`, filled from the checkpoint at `url`: any format, saved by any number of ranks.

    To be called by all ranks of `group` (by default of the default process group; one process
    needs none). Tensors, modules and optimizers are filled in place, each rank reading what its
    shards need and nothing else; an optimizer may be fresh. Dicts and lists are updated in place
    and hold the loaded plain values. None or an empty dict takes whatever was saved in its place,
    tensors whole and on the CPU.

    Args:
        strict: False ignores names that only one side has and tensors of another shape, with a
            warning.
        rename: from the checkpoint's names to the target's: a function, or a mapping of names or
            dotted prefixes. `{"": "model"}` puts `model.` before every name.
        include: patterns (`*`, `?`) of the target's names to load; the others stay as they are.
        exclude: patterns of the target's names not to load.
        dtype: "target" casts to the target's dtypes; by default another dtype is a mismatch.
        verify: check every chunk that is read against its checksum.
        progress: called with numbers of bytes as this rank has read them.

    Raises:
        MismatchError: names are missing or unexpected, shapes or dtypes differ; all are listed.
            The target was not touched.
        CorruptError: bytes are missing or changed. Found before anything was touched, or a
            DamagedLoadError that names the tensors touched so far.
        PartialLoadError: reading failed half-way for another reason; it names the tensors too.
        NotACheckpointError: there is none at `url`.
        RankError: another rank failed; its number and error are named.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(folder, {"w": torch.ones(2), "step": 1})
    ...     ckpt.load(folder, {"w": torch.zeros(2), "step": 0})
    {'w': tensor([1., 1.]), 'step': 1}
    """
    if dtype not in (None, "target"):
        raise ValueError(f"dtype is 'target' or None, not {dtype!r}")
    ranks = Ranks(group)
    selection = Selection.of(include, exclude)
    with collected_later(), ExitStack() as stack:

        def matching() -> tuple[Source, Match, int]:
            budget = memory_budget()
            source = stack.enter_context(open_source(url))
            saved = Saved(source.catalog, rename)
            return source, match(saved, state, selection, dtype == "target"), budget

        (source, matched, budget), agreed = ranks.compare(
            "matching the checkpoint with the target", matching, lambda found: (mark(found[1]),), 1
        )
        found = differences(ranks, matched, agreed.same[0])
        numbers, fills = ranks.attempt(
            "planning to load", lambda: _plan(source, matched, found, strict, ranks, budget)
        )

        def reading() -> None:
            how = Reading.within(budget // 2, source.store, ranks.world_size)
            _read(source, numbers, verify, progress, how, budget // 2)
            check_numbers(source.url, matched)
            _read(source, fills, verify, progress, how, budget // 2)

        ranks.attempt("loading", reading)
        return ranks.attempt("installing the loaded state", matched.install)  # type: ignore[return-value]


class _Fill(NamedTuple):
    """One tensor to read, or some rows of one."""

    name: str
    requests: list[Request]
    target: torch.Tensor
    staged_as: torch.dtype | None
    """The type in which it is read into memory of its own and then copied; None: as it lies."""

    @property
    def staged_bytes(self) -> int:
        return 0 if self.staged_as is None else self.target.numel() * self.staged_as.itemsize

    def stage(self) -> tuple[torch.Tensor, list[Request]]:
        """Memory of its own, and the requests that fill it."""
        into = torch.empty(self.target.shape, dtype=self.staged_as)
        memory = memory_of(into)
        return into, [request._replace(memory=memory) for request in self.requests]


def _plan(
    source: Source,
    matched: Match,
    found: list[Difference],
    strict: bool,
    ranks: Ranks,
    budget: int,
) -> tuple[list[_Fill], list[_Fill]]:
    """What to read where, numbers apart. Opens every file that is needed and touches nothing."""
    check_fits(source.url, found, strict, warns=ranks.rank == 0)
    plan = _Plan(ranks.mesh, ranks.here, budget // 2, Fits())
    numbers = [fill for want in matched.numbers for fill in plan.fills(want)]
    return numbers, [fill for want in matched.wants for fill in plan.fills(want)]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the fills of all tensors share."""

    world: Mesh
    here: int
    stage_bytes: int
    """How much is read into memory of its own at once."""
    fits: Fits

    def fills(self, want: Want) -> Iterator[_Fill]:
        """What fills one tensor: all of it at once, unless it is staged and large."""
        record = want.record
        local, layout = describe(want.tensor, want.name, self.world)
        dtype = torch_dtype(record.dtype.torch_name)
        if record.name != want.name:
            record = replace(record, name=want.name)
        pieces = self.fits.pieces(layout, self.here)
        if dtype == local.dtype and is_plain(local):
            requests = requests_for(record, pieces, memory_of(local), self.fits)
            yield _Fill(want.name, requests, local, None)
        elif local.ndim == 0 or local.numel() * dtype.itemsize <= self.stage_bytes:
            requests = requests_for(record, pieces, _UNMADE, self.fits)
            yield _Fill(want.name, requests, local, dtype)
        else:
            row = local.numel() // local.shape[0]
            step = max(1, self.stage_bytes // (row * dtype.itemsize))
            for first in range(0, local.shape[0], step):
                rows = local[first : first + step]
                lo, hi = first * row, first * row + rows.numel()
                some = [part for piece in pieces for part in piece.within(lo, hi)]
                moved = [Piece(part.box, part.at - lo, part.strides) for part in some]
                yield _Fill(want.name, requests_for(record, moved, _UNMADE), rows, dtype)


_UNMADE = memoryview(b"")
"""Stands for the memory of what is staged, until it is its turn."""


def _read(
    source: Source,
    fills: list[_Fill],
    verify: bool,
    progress: Progress | None,
    how: Reading,
    stage_bytes: int,
) -> None:
    touched: dict[str, None] = {}
    engine = Transfer(source.store, verify, how.workers, how.limits)
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
    except FormatError as error:
        raise DamagedLoadError(str(error), list(touched)) from error
    except Exception as error:
        raise PartialLoadError(f"{type(error).__name__}: {error}", list(touched)) from error


def _batches(fills: list[_Fill], stage_bytes: int) -> Iterator[list[_Fill]]:
    """Fills together as long as their memory of their own stays within `stage_bytes`."""
    batch: list[_Fill] = []
    staged = 0
    for fill in fills:
        if batch and staged + fill.staged_bytes > stage_bytes:
            yield batch
            batch, staged = [], 0
        batch.append(fill)
        staged += fill.staged_bytes
    if batch:
        yield batch
