"""Loading: open, match, plan, agree, run, install.

Nothing in the target changes before every rank has matched all names, has opened the files that it
needs, and has agreed with the others. Then tensors are read into the memory they have. Optimizers
and other objects get their state last, by their own `load_state_dict`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args
from warnings import warn

from ckpt.arguments import CastingRule, ReplicaReads, check_order, check_word
from ckpt.budget import memory_budget
from ckpt.errors import StoreError, UnverifiedWarning
from ckpt.fallback import Loaded, Url, load_or_older
from ckpt.garbage import collected_later
from ckpt.match.casting import Casting, casting_of
from ckpt.match.fitting import check_fits, check_preflight_scalars, differences, marks
from ckpt.match.match import match
from ckpt.match.match_builder import Match
from ckpt.match.selection import Selection
from ckpt.plan.load_plan import LoadPlan, LoadPolicy, plan_load
from ckpt.plan.read_plan import BoxCopies
from ckpt.sources import Source, open_source
from ckpt.state.memory import will_change
from ckpt.state.saved import Rename, Saved
from ckpt.stores.store import Options
from ckpt.transfer.read import ReadPolicy
from ckpt.transfer.record_sums import RecordSums, Verify, checked_verify
from ckpt.transfer.run import FileSource, LoadRun, failed_elsewhere, half_loaded
from ckpt.transfer.shared_targets import SharedTargets
from formats.native.shard import Progress
from formats.storage import LOCAL_READ_BYTES, REMOTE_READ_BYTES
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import HASH_BITS, Ranks, result_or_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sharding.agreement.ranks import Agreement, Group

__all__ = ["load"]

S = TypeVar("S")

Patterns = str | Sequence[str]
TO_USER = 9
"""The stack level, in `check_fits`, of the program that called `ckpt.load`."""
CALL = "ckpt.load"
"""The name of this call for the other ranks."""
MATCHING = "matching the checkpoint with the target"
PLANNING = "planning to load"


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
    own_group = None if isinstance(group, str) else group  # of one process: no tensor travels
    asked = partial(
        _LoadOptions.checked,
        url,
        state,
        strict,
        rename,
        include,
        exclude,
        dtype,
        casting,
        verify,
        own_group,
    )
    options, wrong = result_or_error(partial(asked, progress, replicas, storage_options))
    if wrong is not None:
        with ranks.call(CALL):  # the other ranks wait for this rank there
            raise wrong
    others = (fallback,) if isinstance(fallback, str | os.PathLike) else fallback
    once = partial(_load, ranks, state=state, options=options[0])
    state, _ = load_or_older(ranks, url, others, once, storage_options)  # type: ignore[assignment]
    return state


def load_first(
    urls: Sequence[str], state: object, *, group: Group, storage_options: Options, timeout: float
) -> str:
    """The first of these checkpoints that is sound, which `state` now holds, as by `load`.

    To be called by all ranks of `group`. A place may be another folder on each host. Raises as
    `load` does.
    """
    ranks = Ranks(group, timeout)
    held = None if isinstance(group, str) else group
    options = _LoadOptions(
        True, None, Selection.of(None, None), None, True, held, None, "auto", storage_options, True
    )
    once = partial(_load, ranks, state=state, options=options)
    return load_or_older(ranks, urls[0], urls[1:], once, storage_options)[1]


def load_partly(
    url: Url,
    state: object,
    *,
    allows_missing: bool,
    verify: Verify,
    group: Group,
    storage_options: Options,
) -> None:
    """`state` is filled with what a checkpoint has of it, which may have more names.

    To be called by all ranks of `group`. As DCP does: tensors are cast to the target's dtypes, and
    with `allows_missing` the target may have more names as well. Raises as `load` does.
    """
    forgiven = frozenset(("unexpected", "missing") if allows_missing else ("unexpected",))
    options = _LoadOptions(
        strict=True,
        rename=None,
        selection=Selection.of(None, None),
        casting=Casting.UNSAFE,
        verify=verify,
        group=None if isinstance(group, str) else group,
        progress=None,
        replicas="auto",
        storage=storage_options,
        forgiven=forgiven,
    )
    ranks = Ranks(group)
    once = partial(_load, ranks, state=state, options=options)
    load_or_older(ranks, url, False, once, storage_options)


@dataclass(frozen=True, slots=True)
class _LoadOptions:
    """The arguments of a load, checked."""

    strict: bool
    rename: Rename | None
    selection: Selection
    casting: Casting | None
    verify: Verify
    group: ProcessGroup | None
    progress: Progress | None
    replicas: str
    storage: Options
    by_host: bool = False
    """Whether hosts may open folders of their own, with the files of one save."""
    forgiven: frozenset[str] = frozenset()
    """The kinds of differences, of `Difference.problem`, that do not count."""

    @classmethod
    def checked(
        cls,
        url: Url,
        state: object,
        strict: bool,
        rename: Rename | None,
        include: Patterns | None,
        exclude: Patterns | None,
        dtype: str | None,
        casting: str,
        verify: Verify,
        group: ProcessGroup | None,
        progress: Progress | None,
        replicas: str,
        storage: Options,
    ) -> _LoadOptions:
        """The options. Raises ValueError for an argument that makes no sense."""
        check_order(CALL, url, state)
        allowed = casting_of(dtype, casting)
        check_word("replicas", replicas, get_args(ReplicaReads))
        selection, checked = Selection.of(include, exclude), checked_verify(verify)
        return cls(strict, rename, selection, allowed, checked, group, progress, replicas, storage)


def _load(ranks: Ranks, url: Url, state: object, options: _LoadOptions) -> Loaded:
    """The target, filled from one checkpoint. Called by all ranks; communicates."""
    with ranks.call(CALL), collected_later(), ExitStack() as stack:
        opening = partial(_matched, ranks, url, state, options, stack)
        matched, agreed = ranks.run_and_compare(MATCHING, opening, _Matched.fingerprints, 4)
        plans, budget = _agreed_plans(ranks, matched, agreed, options)
        run = _Run(ranks, matched, plans, options, budget)
        with failed_elsewhere(run.names):
            unverified, told = ranks.run_and_compare("loading", run.read, lambda count: (count,), 1)
            if plans.exchanged:
                ranks.run_on_all("exchanging what was read", run.exchange)
            loaded = ranks.run_on_all("installing the loaded state", run.install)
            if unverified or not told.same[0]:  # all ranks know that one rank has some
                ranks.run_on_all("telling what was not verified", run.warn_of_unverified)
        return Loaded(loaded, frozenset(run.names))


class _Plans(NamedTuple):
    """The plans of one load on this rank."""

    preflight: LoadPlan
    """Of scalars that are read, and checked, before the target is touched."""
    tensors: LoadPlan
    exchanged: bool
    """Whether the ranks exchange what they read; the same on all ranks."""

    def fingerprints(self) -> tuple[int]:
        """Of what is exchanged, for `Ranks.compare`."""
        return (self.tensors.fingerprint >> (64 - HASH_BITS),)


@dataclass(frozen=True, slots=True)
class _Matched:
    """An opened checkpoint and its match with the target, on one rank."""

    source: Source
    match: Match
    budget: int
    """Bytes of memory that this rank's load may take beside the target."""
    exchanges: bool
    """Whether replicas exchange what they read."""
    plans: _Plans | None
    """Made at once where nothing differs here and nothing is exchanged."""
    by_host: bool

    def fingerprints(self) -> tuple[int, int, int, int]:
        """Of names, of the selection, of whether there is a plan, and of the checkpoint."""
        source = self.source.attempt if self.by_host else self.source.fingerprint
        return (*marks(self.match), int(self.plans is not None), source)

    def plan(self, ranks: Ranks, exchanges: bool) -> _Plans:
        """This rank's plans. Raises HoleError, and CorruptError for files that it opens."""
        catalog, copies, store = self.source.catalog, BoxCopies(), self.source.store
        alone = LoadPolicy(self.budget // 2)
        is_far = store.read_bytes > LOCAL_READ_BYTES
        most = min(REMOTE_READ_BYTES, self.budget // 3)  # held three times
        policy = LoadPolicy(self.budget // 2, True, most if is_far else 0) if exchanges else alone
        planned = partial(plan_load, catalog=catalog, world=ranks.mesh, rank=ranks.global_rank)
        return _Plans(
            planned(self.match.preflight_scalars, policy=alone, copies=copies),
            planned(self.match.items, policy=policy, copies=copies),
            exchanges,
        )


def _matched(
    ranks: Ranks, url: Url, state: object, options: _LoadOptions, stack: ExitStack
) -> _Matched:
    """Opens the checkpoint until `stack` ends and matches it with the target; touches nothing."""
    budget = memory_budget()
    source = stack.enter_context(open_source(url, options.storage))
    saved = Saved(source.catalog, options.rename)
    found = match(saved, state, options.selection, ranks.mesh, options.casting)
    if options.forgiven:
        counted = [each for each in found.differences if each.problem not in options.forgiven]
        unexpected = [] if "unexpected" in options.forgiven else found.unexpected
        found = replace(found, differences=counted, unexpected=unexpected)
    shared = SharedTargets(
        source.store, source.catalog, found.targets, ranks.global_rank, budget // 2, options.verify
    )
    found.differences.extend(shared.differences(found.shared))
    exchanges = _are_exchanged(options.replicas, source) and not ranks.is_single_process
    matched = _Matched(source, found, budget, exchanges, None, options.by_host)
    if exchanges or found.differences or found.unexpected or found.idle:
        return matched
    # An error shows again when all ranks plan, and is told to all ranks then.
    plans, _ = result_or_error(partial(matched.plan, ranks, False))
    return replace(matched, plans=plans[0]) if plans else matched


def _are_exchanged(replicas: str, source: Source) -> bool:
    """Whether replicas exchange what they read.

    "auto" reads from local disks: the page cache has a file once for all ranks of a machine, and
    copying from it is several times as fast as a message. A server sends, and often charges for,
    every byte again.
    """
    if replicas == "auto":
        return source.store.read_bytes > LOCAL_READ_BYTES
    return replicas == "exchange"


def _agreed_plans(
    ranks: Ranks, matched: _Matched, agreed: Agreement, options: _LoadOptions
) -> tuple[_Plans, int]:
    """This rank's plans, once all ranks have one, and the bytes that an exchange may take.

    Called by all ranks; communicates unless all have planned already.
    """
    same_unexpected, same_idle, all_planned, same_source = agreed.same
    url = matched.source.url
    if not same_source:
        raise StoreError(
            f"{url}: the ranks opened different checkpoints: it was replaced meanwhile, "
            "or they were given different ones; nothing was touched: load again"
        )
    if matched.plans is not None and all_planned:  # and nothing differs on any rank
        return matched.plans, matched.budget
    found = differences(ranks, matched.match, same_unexpected, same_idle)
    check = partial(check_fits, url, found, options.strict, ranks.rank == 0, stacklevel=TO_USER)
    checking = partial(_checked_plans, matched, ranks, check)
    plans, told = ranks.run_and_compare(
        PLANNING, partial(checking, matched.exchanges), _Plans.fingerprints, 1, matched.budget
    )
    if not told.same[0]:
        plans = ranks.run_on_all(PLANNING, partial(checking, False))
    return plans, told.number


def _checked_plans(
    matched: _Matched, ranks: Ranks, check: Callable[[], None], exchanges: bool
) -> _Plans:
    """The plans, if `check` finds that the target fits."""
    check()
    return matched.plan(ranks, exchanges)


class _Run:
    """The part of a load that touches the target."""

    def __init__(
        self, ranks: Ranks, matched: _Matched, plans: _Plans, options: _LoadOptions, budget: int
    ) -> None:
        """`budget` is in bytes, for exchanges, and the same on all ranks."""
        self._ranks, self._match, self._plans = ranks, matched.match, plans
        self._url, self._budget, self._stage_bytes = matched.source.url, budget, matched.budget // 2
        self._sums = RecordSums(options.verify)
        policy = ReadPolicy.within(self._stage_bytes, matched.source.store, ranks.world_size)
        store = matched.source.store
        self._source = FileSource(store, self._sums, policy, options.progress)
        self._run = LoadRun(matched.match.targets, options.group)
        self.names = plans.tensors.names
        """The tensors that this load fills on this rank."""

    def read(self) -> int:
        """Reads from files; the number of tensors that could not be verified fully."""
        preflight, tensors = self._plans.preflight, self._plans.tensors
        self._sums.expect([*preflight.requests, *tensors.requests])
        self._run.read(preflight, self._source, self._stage_bytes)
        check_preflight_scalars(self._url, self._match)
        self._run.touched.clear()
        for item in self._match.items:
            will_change(self._match.targets[item.target].given)
        self._run.read(tensors, self._source, self._stage_bytes)
        return len(self._sums.unverified)

    def exchange(self) -> None:
        """Exchanges what was read. Called by all ranks; communicates."""
        self._run.exchange(self._plans.tensors, self._source, self._budget)

    def install(self) -> object:
        """The target, with values set and `load_state_dict`s called."""
        with half_loaded(self.names, reads=False):
            return self._match.install()

    def warn_of_unverified(self) -> None:
        """Rank 0 warns of tensors that could not be verified fully."""
        if self._ranks.rank == 0:
            warn(UnverifiedWarning(self._url, self._sums.unverified), stacklevel=TO_USER - 1)
