"""Loading: match, plan, agree, read, install.

Nothing in the target changes before every rank has matched all names, opened the files it needs and
agreed with the others. Then tensors are read into the memory they have; optimizers and other
objects get their state last, by their own `load_state_dict`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args
from warnings import warn

from ckpt.arguments import CastingRule, ReplicaReads, check_order, check_word
from ckpt.budget import memory_budget
from ckpt.errors import (
    DamagedLoadError,
    PartialLoadError,
    RankError,
    ReplacedLoadError,
    StoreError,
    UnverifiedWarning,
)
from ckpt.fallback import Loaded, Url, load_or_older
from ckpt.garbage import collected_later
from ckpt.match.casting import Casting, casting_of
from ckpt.match.fitting import check_fits, check_numbers, differences, marks
from ckpt.match.match import match
from ckpt.match.match_builder import Match
from ckpt.match.selection import Selection
from ckpt.plan.read_plan import Fits
from ckpt.sources import Source, open_source
from ckpt.state.memory import will_change
from ckpt.state.saved import Rename, Saved
from ckpt.stores.store import Options
from ckpt.transfer.read import Reading
from ckpt.transfer.record_sums import RecordSums, Verify, checked_verify
from ckpt.transfer.scatter_reads import Read, Wanted
from ckpt.transfer.shared_targets import Comparing
from ckpt.transfer.shares import Shares, bytes_of_lots, exchanged
from ckpt.transfer.tensor_reads import Fill, Planning, read_fills
from formats.native.shard import Progress
from formats.storage import LOCAL_READ_BYTES
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import Ranks, result_or_error
from sharding.errors import said

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sharding.agreement.ranks import Group

__all__ = ["load"]

S = TypeVar("S")

Patterns = str | Sequence[str]
TO_USER = 9
"""Calls from where a target is found not to fit all to the program that called `ckpt.load`."""
CALL = "ckpt.load"
"""What other ranks are told that this one is in."""


def load(
    url: Url,
    state: S,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    dtype: Literal["target"] | None = None,
    casting: CastingRule = "same_kind",
    verify: Verify = True,
    group: Group = None,
    progress: Progress | None = None,
    replicas: ReplicaReads = "auto",
    fallback: bool | Url | Sequence[Url] = False,
    storage_options: Options = None,
    timeout: float = TIMEOUT_SECONDS,
) -> S:
    """`state`, filled from the checkpoint at `url`: any format, saved by any number of ranks.

    To be called by all ranks of `group` (by default of the default process group; one process
    needs none); with `group="self"` by any rank by itself. Tensors, modules and optimizers are
    filled in place, each rank reading what its shards need and nothing else; an optimizer may be
    fresh. Dicts and lists are updated in place and hold the loaded plain values. None or an empty
    dict takes whatever was saved in its place, tensors whole and on the CPU. Any other object
    with `state_dict()` and `load_state_dict()` is given its nest, with the tensors in it filled in
    place (docs/saving.md).

    Args:
        strict: False ignores names that only one side has and tensors of another shape, with a
            warning.
        rename: from the checkpoint's names to the target's: a function, or a mapping of names or
            dotted prefixes. `{"": "model"}` puts `model.` before every name.
        include: patterns (`*`, `?`) of the target's names to load; the others stay as they are.
        exclude: patterns of the target's names not to load. Each pattern, and each key of `rename`,
            has to match a name: a pattern one of the checkpoint or of any rank's target.
        dtype: "target" casts to the target's dtypes; by default another dtype is a mismatch.
        casting: which casts `dtype="target"` may make: "same_kind" floats (of 16 bits or more) to
            floats, complex numbers to complex numbers, integers to wider integers; "unsafe" all,
            whatever becomes of the values.
        verify: True compares what is read with its checksums: of the native format every byte, of
            torch.save and DCP every storage and chunk of a tensor that this rank reads all of.
            Where a rank reads a part of one, rank 0 tells with an UnverifiedWarning; "all" reads
            the rest too, and compares. False compares nothing. safetensors has no checksums.
        progress: called with numbers of bytes as this rank has read them.
        replicas: what ranks do that want the same: "read" it each, or read a part each and
            "exchange" it. "auto" reads from local disks, whose pages all ranks of a machine share,
            and exchanges what comes from elsewhere.
        fallback: what to load where the checkpoint is damaged or missing: True for the newest sound
            one of those beside it that are older, or paths or URLs to try in this order. Rank 0
            tells with a FallbackWarning what was skipped and why. A target that does not fit, a
            store that fails or a rank that dies is an error as ever.
        storage_options: what the fsspec driver of `url` is told: addresses, credentials. What its
            environment variables say needs no options (docs/stores.md).
        timeout: seconds that a rank waits for another at most. Then all raise a RankError that
            names who has not come.

    Raises:
        ArgumentError: an option has no such value, or the state stands before the URL.
        MismatchError: names are missing or unexpected, shapes or dtypes differ, a pattern or a key
            of `rename` matches no name; all are listed. The target was not touched.
        CorruptError: bytes are missing or changed. Found before anything was touched, or a
            DamagedLoadError that names the tensors touched so far.
        PartialLoadError: reading, or an object's own `load_state_dict`, failed for another reason;
            it names the tensors too.
        NotACheckpointError: there is none at `url`.
        StoreError: the ranks opened different checkpoints, as when it was replaced meanwhile.
        ReplacedError: it was replaced or deleted while it was read, each time that it was begun
            again; a PartialLoadError too where it names tensors.
        RankError: another rank failed; its number and error are named.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(folder, {"w": torch.ones(2), "step": 1})
    ...     ckpt.load(folder, {"w": torch.zeros(2), "step": 0})
    {'w': tensor([1., 1.]), 'step': 1}
    """
    ranks = Ranks(group, timeout)

    def asking() -> _Asked:
        check_order(CALL, url, state)
        allowed = casting_of(dtype, casting)
        check_word("replicas", replicas, get_args(ReplicaReads))
        return _Asked(
            strict,
            rename,
            Selection.of(include, exclude),
            allowed,
            checked_verify(verify),
            None if isinstance(group, str) else group,  # alone, no tensor travels
            progress,
            replicas,
            storage_options,
        )

    found, wrong = result_or_error(asking)
    if wrong is not None:
        with ranks.call(CALL):  # the others wait for this rank there
            raise wrong
    (asked,) = found
    others = (fallback,) if isinstance(fallback, str | os.PathLike) else fallback
    once = partial(_load, ranks, state=state, asked=asked)
    return load_or_older(ranks, url, others, once, storage_options)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a user asked of a load."""

    strict: bool
    rename: Rename | None
    selection: Selection
    casting: Casting | None
    verify: Verify
    group: ProcessGroup | None
    progress: Progress | None
    replicas: str
    options: Options


def _load(ranks: Ranks, url: Url, state: object, asked: _Asked) -> Loaded:
    """What a target becomes by one checkpoint. Called by all ranks."""
    with ranks.call(CALL), collected_later(), ExitStack() as stack:

        def matching() -> _Matched:
            budget = memory_budget()
            source = stack.enter_context(open_source(url, asked.options))
            saved = Saved(source.catalog, asked.rename)
            found = match(saved, state, asked.selection, asked.casting)
            comparing = Comparing(
                source.store, ranks.mesh, ranks.global_rank, budget // 2, asked.verify
            )
            found.differences.extend(comparing.differences(found.shared))
            exchanges = exchanged(asked.replicas, source.store) and not ranks.is_single_process
            planned: list[_Planned] = []
            if not (exchanges or found.differences or found.unexpected or found.idle):
                # An error shows again when all ranks plan, and is told then.
                planned, _ = result_or_error(lambda: planning(found, budget, None))
            return _Matched(source, found, budget, exchanges, planned)

        def planning(matched: Match, budget: int, shares: Shares | None) -> _Planned:
            alone = Planning(ranks.mesh, ranks.global_rank, budget // 2, Fits())
            together = replace(alone, shares=shares)
            numbers = [fill for want in matched.numbers for fill in alone.fills(want)]
            fills = [fill for want in matched.wants for fill in together.fills(want)]
            if shares is not None:
                shares.lots.plan(alone.fits)
            return _Planned(numbers, fills, shares)

        here, agreed = ranks.run_and_compare(
            "matching the checkpoint with the target",
            matching,
            lambda found: (*marks(found.match), len(found.planned), found.source.mark),
            4,
        )
        source, matched, budget, exchanges, plans = here
        same_unexpected, same_idle, all_planned, same_source = agreed.same
        if not same_source:
            raise StoreError(
                f"{source.url}: the ranks opened different checkpoints: it was replaced meanwhile, "
                "or they were given different ones; nothing was touched: load again"
            )
        if plans and all_planned:  # every rank has planned, and nothing differs anywhere
            planned = plans[0]
        else:
            found = differences(ranks, matched, same_unexpected, same_idle)
            warns = ranks.rank == 0
            check = partial(check_fits, source.url, found, asked.strict, warns, stacklevel=TO_USER)

            def checked(shares: Shares | None) -> _Planned:
                check()
                return planning(matched, budget, shares)

            def shared_reading() -> Shares:
                is_far = source.store.read_bytes > LOCAL_READ_BYTES
                return Shares(ranks.mesh, ranks.global_rank, bytes_of_lots(budget) if is_far else 0)

            planned, agreed = ranks.run_and_compare(
                "planning to load",
                lambda: checked(shared_reading() if exchanges else None),
                lambda planned: (planned.mark,),
                1,
                budget,
            )
            if not agreed.same[0]:
                planned = ranks.run_on_all("planning to load", lambda: checked(None))

        sums = RecordSums(asked.verify)

        def reading() -> int:
            how = Reading.within(budget // 2, source.store, ranks.world_size)
            read = partial(read_fills, source.store, sums=sums, progress=asked.progress, how=how)
            every = (*planned.numbers, *planned.fills)
            sums.expect(request for fill in every for request in fill.requests)
            read(planned.numbers, stage_bytes=budget // 2)
            check_numbers(source.url, matched)
            for want in matched.wants:
                will_change(want.tensor)
            read(planned.fills, stage_bytes=budget // 2)
            return len(sums.unverified)

        filled = list(dict.fromkeys(fill.name for fill in planned.fills))
        if planned.shares is not None:
            filled += planned.shares.lots.names

        def reading_lot(wanted: Sequence[Wanted]) -> None:
            """Read what a lot has for this rank to read."""
            fills = [Fill(*one, staged_as=None) for one in wanted]
            how = Reading.within(budget // 2, source.store, ranks.world_size)
            read_fills(source.store, fills, sums, asked.progress, how, budget // 2)

        def telling() -> None:
            if ranks.rank == 0:
                warn(UnverifiedWarning(source.url, sums.unverified), stacklevel=TO_USER - 1)

        def installing() -> object:
            try:
                return matched.install()
            except Exception as error:
                raise PartialLoadError(f"{type(error).__name__}: {said(error)}", filled) from error

        try:
            unverified, read = ranks.run_and_compare("loading", reading, lambda count: (count,), 1)
            if planned.shares is not None:
                shares = planned.shares
                exchange = partial(
                    _exchange, shares, asked.group, agreed.number, reading_lot, filled
                )
                ranks.run_on_all("exchanging what was read", exchange)
            loaded = ranks.run_on_all("installing the loaded state", installing)
            if unverified or not read.same[0]:  # all ranks know that one has some
                ranks.run_on_all("telling what was not verified", telling)
        except RankError as error:  # this one has read all
            error.touched = tuple(filled)
            raise
        return Loaded(loaded, frozenset(filled))


def _exchange(
    shares: Shares, group: ProcessGroup | None, budget: int, read: Read, filled: list[str]
) -> None:
    """All targets are whole, or the error names all of them: others' parts were dealt out too."""
    try:
        shares.exchange(group, budget, read)
    except PartialLoadError as error:
        cause = error.__cause__
        what = (
            str(cause)
            if isinstance(error, DamagedLoadError | ReplacedLoadError)
            else f"{type(cause).__name__}: {cause}"
        )
        raise type(error)(what, filled) from cause


class _Matched(NamedTuple):
    """What a rank found, and what it would do if all found the same."""

    source: Source
    match: Match
    budget: int
    exchanges: bool
    planned: list[_Planned]
    """Alone in a list where nothing differs here and nothing is exchanged; else none."""


class _Planned(NamedTuple):
    """What a rank is going to do."""

    numbers: list[Fill]
    """To be read before anything of the target is touched."""
    fills: list[Fill]
    shares: Shares | None

    @property
    def mark(self) -> int:
        """The same on ranks that exchange the same."""
        return 0 if self.shares is None else self.shares.mark()
