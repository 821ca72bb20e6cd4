"""Loading: match, plan, agree, read, install.

Nothing in the target changes before every rank has matched all names, opened the files it needs and
agreed with the others. Then tensors are read into the memory they have; optimizers and other
objects get their state last, by their own `load_state_dict`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from ckpt.bites import Fits, Request, requests_for
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
from ckpt.transfer import transfer, workers_for
from formats.errors import FormatError
from formats.native.shard import Progress
from sharding.describing import describe
from sharding.layout import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

S = TypeVar("S")

STAGE_BYTES = 256 << 20
"""Bytes read at a time into temporary memory, for targets that cannot be read into as they lie."""

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

        def matching() -> tuple[Source, Match]:
            source = stack.enter_context(open_source(url))
            saved = Saved(source.catalog, rename)
            return source, match(saved, state, selection, dtype == "target")

        (source, matched), agreed = ranks.compare(
            "matching the checkpoint with the target", matching, lambda found: (mark(found[1]),), 1
        )
        found = differences(ranks, matched, agreed.same[0])
        numbers, fills = ranks.attempt(
            "planning to load", lambda: _plan(source, matched, found, strict, ranks)
        )

        def reading() -> None:
            workers = workers_for(ranks.world_size)
            _read(source, numbers, verify, progress, workers)
            check_numbers(source.url, matched)
            _read(source, fills, verify, progress, workers)

        ranks.attempt("loading", reading)
        return ranks.attempt("installing the loaded state", matched.install)  # type: ignore[return-value]


class _Fill(NamedTuple):
    """One tensor to read: the requests that fill `into`, which is then copied to `target`."""

    name: str
    requests: list[Request]
    target: torch.Tensor
    into: torch.Tensor

    @property
    def staged_bytes(self) -> int:
        return 0 if self.into is self.target else self.into.nbytes


def _plan(
    source: Source,
    matched: Match,
    found: list[Difference],
    strict: bool,
    ranks: Ranks,
) -> tuple[list[_Fill], list[_Fill]]:
    """What to read where, numbers apart. Opens every file that is needed and touches nothing."""
    check_fits(source.url, found, strict, warns=ranks.rank == 0)
    world, here, fits = ranks.mesh, ranks.here, Fits()
    numbers = [_fill(want, world, here, fits) for want in matched.numbers]
    return numbers, [_fill(want, world, here, fits) for want in matched.wants]


def _fill(want: Want, world: Mesh, here: int, fits: Fits) -> _Fill:
    record = want.record
    local, layout = describe(want.tensor, want.name, world)
    into, dtype = local, torch_dtype(record.dtype.torch_name)
    if dtype != local.dtype or not is_plain(local):
        into = torch.empty(local.shape, dtype=dtype)
    if record.name != want.name:
        record = replace(record, name=want.name)
    requests = requests_for(record, fits.pieces(layout, here), memory_of(into), fits)
    return _Fill(want.name, requests, local, into)


def _read(
    source: Source,
    fills: list[_Fill],
    verify: bool,
    progress: Progress | None,
    workers: int,
) -> None:
    touched: list[str] = []
    try:
        for batch in _batches(fills):
            touched += [fill.name for fill in batch]
            requests = [request for fill in batch for request in fill.requests]
            transfer(source.store, requests, verify, progress, workers)
            for fill in batch:
                if fill.into is not fill.target:
                    fill.target.copy_(fill.into)
    except FormatError as error:
        raise DamagedLoadError(str(error), touched) from error
    except Exception as error:
        raise PartialLoadError(f"{type(error).__name__}: {error}", touched) from error


def _batches(fills: list[_Fill]) -> Iterator[list[_Fill]]:
    """Fills together as long as their temporary memory stays within STAGE_BYTES."""
    batch: list[_Fill] = []
    staged = 0
    for fill in fills:
        if batch and staged + fill.staged_bytes > STAGE_BYTES:
            yield batch
            batch, staged = [], 0
        batch.append(fill)
        staged += fill.staged_bytes
    if batch:
        yield batch
