"""Loading: open, match, plan, agree, run, install.

Each rank opens the checkpoint, matches its names with the target's and plans its reads. The ranks
then compare fingerprints of what they found, and all raise the same differences. The target changes
only afterwards: tensors are read into their present memory, and optimizers and other objects get
their state last, by their own `load_state_dict`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args
from warnings import warn

from torch import nn
from xxhash import xxh3_64_intdigest

from ckpt.arguments import (
    CastingRule,
    ReplicaReads,
    UnchangedReads,
    check_order,
    check_word,
    memory_budget,
)
from ckpt.errors import (
    DCP_LOAD,
    ArgumentTypeError,
    Difference,
    StoreError,
    UnverifiedWarning,
    make_skipped_warning,
)
from ckpt.loading.fallback import Loaded, Url, load_or_older
from ckpt.mapping.changes import Changes, MappingName
from ckpt.mapping.other_names import OtherNames, other_names
from ckpt.match.match import match
from ckpt.match.match_builder import Casting, Fit, Match, casting_of
from ckpt.match.overlaps import check_fits, check_preflight_scalars, differences, fingerprints
from ckpt.opening.sources import Source, open_source
from ckpt.plan.load_plan import (
    NOTHING_SHARED,
    CheckShare,
    LoadPlan,
    LoadPolicy,
    check_share,
    plan_load,
)
from ckpt.plan.read_plan import BoxCopies, Limits, byte_ranges_of, requests_for
from ckpt.plan.save_plan import pause_collection
from ckpt.state.memory import memory_of, will_change
from ckpt.state.patterns import Rename, Selection
from ckpt.state.saved import Saved
from ckpt.stores.addresses import parse
from ckpt.stores.store import Options, Store, is_live, is_newest
from ckpt.transfer.live_deltas import apply_delta
from ckpt.transfer.read import ReadPolicy, Unchanged
from ckpt.transfer.record_sums import RecordSums, Verify, check_verify
from ckpt.transfer.run import FileSource, LoadRun, SharedTargets, half_loaded, name_touched
from formats.catalog import Catalog
from formats.joined import under
from formats.native.shard import Progress
from formats.storage import LOCAL_READ_BYTES, REMOTE_READ_BYTES, memory_name
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import HASH_BITS, Ranks, result_or_error
from sharding.errors import without_secrets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sharding.agreement.ranks import Agreement, Group

__all__ = ["load"]

_log = logging.getLogger("ckpt.load")

S = TypeVar("S")

Patterns = str | Sequence[str]
CALL = "ckpt.load"
"""The name of this call for the other ranks."""


def load(
    url: Url,
    state: S,
    *,
    strict: bool = True,
    mapping: MappingName | Sequence[MappingName] = (),
    parameters: Mapping[str, int] | None = None,
    rename: Rename | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    dtype: Literal["target"] | None = None,
    casting: CastingRule = "same_kind",
    verify: Verify = True,
    group: Group = None,
    progress: Progress | None = None,
    replicas: ReplicaReads = "auto",
    unchanged: UnchangedReads = "auto",
    fallback: bool | Url | Sequence[Url] = False,
    storage_options: Options = None,
    timeout: float = TIMEOUT_SECONDS,
) -> S:
    """Fills `state` from the checkpoint at `url` and returns it.

    The checkpoint may have any format and come from any number of ranks. All ranks of `group` call
    this (by default of the default process group; one process needs none); with `group="self"` one
    rank calls it alone. Communicates.

    Tensors, modules and optimizers are filled in place; an optimizer may be fresh. Each rank reads
    only the bytes of its shards. Dicts and lists are updated in place and get the saved plain
    values. None or an empty dict takes any saved value in its place, with whole tensors on the CPU.
    Any other object with `state_dict()` and `load_state_dict()` gets its nest, whose tensors are
    filled in place (docs/loading.md).

    Args:
        strict: False ignores names that only one side has and tensors of another shape, with a
            warning.
        mapping: changes of the checkpoint's names and shapes, as for `ckpt.convert`: the name of a
            mapping that ships, a mapping file, or the result of `ckpt.read_mapping`; several in
            turn.
        parameters: sizes that the mappings name, such as `{"heads": 32}`. By default they come from
            the `config.json` beside the checkpoint.
        rename: from the checkpoint's names to the target's: a function, or a mapping of names,
            dotted prefixes or patterns (docs/converting.md), after the mappings. `{"": "model"}`
            puts `model.` before every name.
        include: patterns of the target's names to load (docs/converting.md); the others stay.
        exclude: patterns of the target's names not to load. Each pattern must match a name of the
            checkpoint or of any rank's target, and each key of `rename` a name of the checkpoint.
        dtype: "target" casts to the target's dtypes; by default another dtype is a mismatch.
        casting: the casts that `dtype="target"` may make. "same_kind" allows floats (of 16 bits or
            more) to floats, complex numbers to complex numbers, and integers to wider integers; a
            number beyond the range of a narrower float is a PartialLoadError. "unsafe" allows all
            casts, even if they change values.
        verify: True compares checksums: in the native format of every byte that is read, in
            torch.save and DCP of every storage or chunk that this rank reads as a whole. If a rank
            reads a part of one, rank 0 gives an UnverifiedWarning; "all" reads and compares the
            rest too. False compares nothing. safetensors has no checksums.
        progress: called with numbers of bytes as this rank reads them.
        replicas: whether ranks with the same elements "read" them each, or read a part each and
            "exchange" it. "auto" reads from local disks, whose page cache all ranks of a machine
            share, and exchanges otherwise.
        unchanged: "skip" does not read a chunk whose bytes the target has already, by its checksum:
            a whole chunk that is uncompressed, contiguous in the target and of its dtype. "read"
            reads all. "auto" skips only in live states on other hosts, up to the first
            chunk that differs.
        fallback: the replacement for a damaged or missing checkpoint: True takes the newest sound
            one among older checkpoints beside it, a list of paths or URLs the first sound one of
            these. Rank 0 names the skipped ones with a FallbackWarning. A mismatch, a store that
            fails or a rank that dies is still an error.
        storage_options: options of the fsspec driver: addresses, credentials. The driver also reads
            its environment variables (docs/stores.md).
        timeout: a rank waits at most so many seconds for another. Then all raise a RankError that
            names the missing ranks.

    Raises:
        ArgumentError: an option has another value.
        ArgumentTypeError: an option has another type, or the state stands before the URL.
        MismatchError: names are missing or unexpected, shapes or dtypes differ, or a pattern or a
            key of `rename` matches no name; all differences are listed. The target is unchanged.
        CorruptError: bytes are missing or changed. If the target has changed already, it is a
            DamagedLoadError that names the touched tensors.
        PartialLoadError: a read, or an object's own `load_state_dict`, failed for another reason;
            it names the touched tensors.
        NotACheckpointError: no checkpoint is at `url`.
        HostileError, UnsupportedError: the checkpoint claims more than the limits allow, or this
            version cannot read it.
        StateError: an object's own `state_dict` failed, or two saved entries get one name.
        StoreError: the store failed, or the ranks opened different checkpoints, for example if one
            was replaced meanwhile.
        ReplacedError: the checkpoint was replaced or deleted each time that it was read; a
            ReplacedLoadError if the target has changed already.
        RankError: another rank failed; it has that rank's number and error.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(folder, {"w": torch.ones(2), "step": 1})
    ...     ckpt.load(folder, {"w": torch.zeros(2), "step": 0})
    {'w': tensor([1., 1.]), 'step': 1}
    """
    ranks = Ranks(group, timeout)
    own_group = None if isinstance(group, str) else group  # of one process: no tensor travels

    def check() -> LoadOptions:
        check_order(CALL, url, state)
        _check_fallback(fallback)
        check_word("replicas", replicas, get_args(ReplicaReads))
        check_word("unchanged", unchanged, get_args(UnchangedReads))
        return replace(
            load_options(strict, mapping, parameters, rename, include, exclude, dtype, casting),
            verify=check_verify(verify),
            group=own_group,
            progress=progress,
            replicas=replicas,
            unchanged=unchanged,
            storage=storage_options,
        )

    try:
        options = check()
    except Exception:
        with ranks.call(CALL):  # tells the other ranks, which wait in this call
            raise
    others = (fallback,) if isinstance(fallback, str | os.PathLike) else fallback
    once = partial(load_once, ranks, state=state, options=options)
    state, _ = load_or_older(ranks, url, others, once, storage_options)  # type: ignore[assignment]
    return state


def _check_fallback(fallback: object) -> None:
    """Raises ArgumentTypeError for another value of `fallback` than `load` takes."""
    places = (str, os.PathLike)
    several = isinstance(fallback, Sequence) and all(isinstance(one, places) for one in fallback)
    if not several and not isinstance(fallback, (bool, *places)):
        raise ArgumentTypeError(
            f"fallback is {fallback!r:.80}; give True, False, a path or URL, or a list of these"
        )


def load_options(
    strict: bool,
    mapping: MappingName | Sequence[MappingName],
    parameters: Mapping[str, int] | None,
    rename: Rename | None,
    include: Patterns | None,
    exclude: Patterns | None,
    dtype: Literal["target"] | None,
    casting: CastingRule,
) -> LoadOptions:
    """Returns options with these arguments of a load, checked. Raises ArgumentError."""
    fit = Fit(strict, rename, Selection.of(include, exclude), casting_of(dtype, casting))
    return LoadOptions(fit=fit, changes=Changes(mapping=mapping, parameters=parameters))


def load_partly(
    url: Url,
    state: object,
    *,
    allows_missing: bool,
    verify: Verify,
    group: Group,
    storage_options: Options,
) -> None:
    """Fills `state` from a checkpoint that may have more names.

    All ranks of `group` call this. As in DCP, tensors are cast to the target's dtypes, and with
    `allows_missing` the target may have more names as well. Raises as `load` does.
    """
    forgiven = frozenset(("unexpected", "missing") if allows_missing else ("unexpected",))
    options = LoadOptions(
        fit=Fit(casting=Casting.UNSAFE),
        verify=verify,
        group=None if isinstance(group, str) else group,
        storage=storage_options,
        forgiven=forgiven,
        call=DCP_LOAD,
    )
    ranks = Ranks(group)
    once = partial(load_once, ranks, state=state, options=options)
    load_or_older(ranks, url, (), once, storage_options)


def load_once(ranks: Ranks, url: Url, state: object, options: LoadOptions) -> Loaded:
    """Fills the target from one checkpoint. All ranks call this; communicates."""
    with ranks.call(CALL), pause_collection(), ExitStack() as stack:
        matched, agreed = agree_on_source(ranks, os.fspath(url), state, options, stack)
        plans, budget = agree_on_plans(ranks, matched, agreed, options)
        if ranks.rank == 0:
            matched.tell_names()
        share = matched.share if agreed.same["share"] else NOTHING_SHARED
        run = _Run(ranks, matched, plans, options, budget, share)
        with name_touched(run.names):
            read, answers = ranks.run_and_compare("loading", run.read, dict)
            if plans.exchanged:
                ranks.run_on_all("exchanging elements that were read", run.exchange)
            # All ranks know whether one has something to install, and unverified tensors.
            if read["installs"] or not answers.same["installs"]:
                loaded = ranks.run_on_all("installing the loaded state", run.install)
            else:
                loaded = run.install()
            if read["unverified"] or not answers.same["unverified"]:
                ranks.run_on_all("naming unverified tensors", run.warn_of_unverified)
        return Loaded(loaded, frozenset(run.names))


class _Run:
    """The part of a load that changes the target."""

    def __init__(
        self,
        ranks: Ranks,
        matched: Matched,
        plans: Plans,
        options: LoadOptions,
        budget: int,
        share: CheckShare,
    ) -> None:
        """`budget` is in bytes, for exchanges, and equal on all ranks."""
        self._ranks, self._match, self._plans = ranks, matched.match, plans
        self._url, self._budget, self._stage_bytes = matched.source.url, budget, matched.budget // 2
        self._sums = RecordSums(options.verify)
        store = matched.source.store
        policy = ReadPolicy.within(self._stage_bytes, store, ranks.world_size)
        unchanged = Unchanged.of(options.unchanged, _is_far_live(store))
        if matched.has_base and not any(read.stage for read in plans.tensors.reads):
            unchanged = Unchanged.DELTA
            scratch = min(policy.limits.scratch_bytes, REMOTE_READ_BYTES)
            policy = replace(policy, limits=replace(policy.limits, scratch_bytes=scratch))
        policy = replace(policy, unchanged=unchanged, share=share)
        self._source = FileSource(store, self._sums, policy, options.progress)
        self._run = LoadRun(matched.match.targets, options.group, options.fit.casting)
        self.names = plans.tensors.names
        """The tensors that this load fills on this rank."""

    def read(self) -> dict[str, int]:
        """Reads from files.

        Returns the number of tensors that were not fully verified, and whether to install anything.
        """
        preflight, tensors = self._plans.preflight, self._plans.tensors
        self._sums.expect([*preflight.requests, *tensors.requests])
        self._run.read(preflight, self._source, self._stage_bytes)
        check_preflight_scalars(self._url, self._match)
        self._run.touched.clear()
        for item in self._match.items:
            will_change(self._match.targets[item.target].given)
        self._run.read(tensors, self._source, self._stage_bytes)
        self._ranks.count(tensors.nbytes)
        return {"unverified": len(self._sums.unverified), "installs": self._match.installs}

    def exchange(self) -> None:
        """Exchanges elements between replicas. All ranks call this; communicates."""
        self._run.exchange(self._plans.tensors, self._source, self._budget)

    def install(self) -> object:
        """Sets values and calls `load_state_dict`s. Returns the target."""
        with half_loaded(self.names, reads=False):
            return self._match.install()

    def warn_of_unverified(self) -> None:
        """Warns on rank 0 of tensors that were not fully verified."""
        if self._ranks.rank == 0:
            warn(UnverifiedWarning(self._url, self._sums.unverified), stacklevel=TO_USER - 1)


TO_USER = 9
"""The stack level, in `check_fits`, of the program that called `ckpt.load`."""
OF_A_HEAD = "belongs to a head that the target lacks"
MATCHING = "matching the checkpoint with the target"
PLANNING = "planning to load"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The arguments of a load, checked."""

    fit: Fit = field(default_factory=Fit)
    changes: Changes = field(default_factory=Changes)
    """The mappings."""
    verify: Verify = True
    group: ProcessGroup | None = None
    progress: Progress | None = None
    replicas: str = "auto"
    unchanged: str = "auto"
    storage: Options = None
    by_host: bool = False
    """Whether hosts may open folders of their own, with the files of one save."""
    forgiven: frozenset[str] = frozenset()
    """The kinds of differences, of `Difference.problem`, that do not count."""
    call: str = "ckpt.load"
    """The call of the user, which an error names to be repeated with other arguments."""


def agree_on_source(
    ranks: Ranks, url: str, state: object, options: LoadOptions, stack: ExitStack
) -> tuple[Matched, Agreement]:
    """Opens the checkpoint on all ranks until `stack` ends, and compares what they found.

    All ranks call this. Communicates. If a version of a live state is published meanwhile, the
    ranks open different ones, each the newest; all of them then open that of rank 0.
    """
    opening = partial(_open_and_match, ranks, url, state, options, stack)
    matched, agreed = ranks.run_and_compare(MATCHING, opening, Matched.fingerprints)
    if agreed.same["source"] or not is_newest(url):
        return _by_other_names(ranks, matched, agreed, state, options)
    version = parse(matched.source.url).version
    version = int(ranks.broadcast(str(version).encode()))
    opening = partial(_open_and_match, ranks, str(parse(url).at(version)), state, options, stack)
    return ranks.run_and_compare(MATCHING, opening, Matched.fingerprints)


def _by_other_names(
    ranks: Ranks, matched: Matched, agreed: Agreement, state: object, options: LoadOptions
) -> tuple[Matched, Agreement]:
    """Returns the match by other names, if the own ones do not fit and all ranks find them.

    All ranks call this. Communicates if any rank has found a difference.
    """
    is_free = not (options.changes.mappings or options.fit.rename or options.forgiven)
    alike = agreed.same["unexpected"] and agreed.same["differing"]
    if (
        not is_free
        or matched.source.catalog.format == "ckpt"
        or (alike and not any(matched.problems))
    ):
        return matched, agreed
    finding = partial(_find_names, ranks, matched, state, options)
    other, told = ranks.run_and_compare(MATCHING, finding, Matched.fingerprints)
    return (other, told) if told.same["names"] else (matched, agreed)


def _find_names(ranks: Ranks, own: Matched, state: object, options: LoadOptions) -> Matched:
    """Returns the match by the first other names that fit wholly.

    Otherwise the one by the names of transformers, if they leave fewer differences: an error, or
    `strict=False`, then has these. Names that an argument gives are for the caller to choose.
    """
    best, hint = own, ""
    for names in other_names(own.source, state):
        source = replace(own.source, catalog=names.catalog)
        other = _match(ranks, source, state, options, names)
        if not any(other.problems):
            return other
        if other.problems < best.problems and not names.argument:
            best = other
        elif other.problems < best.problems:
            hint = hint or names.argument
    return best if best is not own else replace(own, hint=hint)


class Plans(NamedTuple):
    """The plans of one load on this rank."""

    preflight: LoadPlan
    """Reads and checks scalars before the load changes the target."""
    tensors: LoadPlan
    exchanged: bool
    """Whether replicas exchange the elements that they read; equal on all ranks."""

    def fingerprints(self) -> dict[str, int]:
        """Returns the fingerprint of the exchanges, for `Ranks.run_and_compare`."""
        return {"exchanges": self.tensors.fingerprint >> (64 - HASH_BITS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """An opened checkpoint and its match with the target, on one rank."""

    source: Source
    match: Match
    budget: int
    """Bytes of memory that this rank's load may take beside the target."""
    exchanges: bool
    """Whether replicas exchange the elements that they read."""
    plans: Plans | None
    """Made at once if this rank finds no difference and nothing is exchanged."""
    failure: Exception | None
    """The error of these plans, which the ranks hear of when all of them plan: a second try would
    wait for a server that is away for another deadline."""
    share: CheckShare
    """The checksums to compare if all ranks divide them alike."""
    by_host: bool
    names: OtherNames | None = None
    """The names of the checkpoint if they are not its own."""
    kept: tuple[str, ...] = ()
    """Names of the target that no file of its class has."""
    hint: str = ""
    """The argument that leaves fewer differences, for an error."""
    has_base: bool = False
    """Whether the target has the version before: each rank then reads deltas of its own part."""

    @property
    def problems(self) -> tuple[int, int]:
        """The numbers of differences, and of names that the target lacks, on this rank."""
        return len(self.match.differences), len(self.match.unexpected)

    def fingerprints(self) -> dict[str, int]:
        """Returns those of the match, the plans' presence, the share, the names and the source.

        The source is the checkpoint, or the save that made it.
        """
        source = self.source.attempt if self.by_host else self.source.fingerprint
        share = self.share.fingerprint >> (64 - HASH_BITS)
        planned = int(self.plans is not None)
        found = fingerprints(self.match)._asdict()
        title = "" if self.names is None else self.names.title
        names = xxh3_64_intdigest(title.encode()) >> (64 - HASH_BITS)
        return {**found, "planned": planned, "share": share, "source": source, "names": names}

    def tell_names(self) -> None:
        """Logs the names that the load uses, and warns of names that only one side has."""
        if self.names is None:
            return
        url = without_secrets(self.source.url)
        _log.info("%s is loaded by %s", url, self.names.title)
        only = [Difference(one, "unexpected", OF_A_HEAD) for one in self.names.left]
        only += [Difference(one, "missing", "is in no file of this class") for one in self.kept]
        if only:
            warn(
                make_skipped_warning(url, only, f"a load by {self.names.title}"),
                stacklevel=TO_USER - 4,
            )

    def plan(self, ranks: Ranks, exchanges: bool) -> Plans:
        """Returns this rank's plans. Raises HoleError, and CorruptError for files that it opens."""
        catalog, copies, store = self.source.catalog, BoxCopies(), self.source.store
        alone = LoadPolicy(self.budget // 2)
        is_far = store.read_bytes > LOCAL_READ_BYTES
        most = min(REMOTE_READ_BYTES, self.budget // 3)  # three such buffers exist
        policy = LoadPolicy(self.budget // 2, True, most if is_far else 0) if exchanges else alone
        planned = partial(plan_load, catalog=catalog, world=ranks.mesh, rank=ranks.global_rank)
        return Plans(
            planned(self.match.preflight_scalars, policy=alone, copies=copies),
            planned(self.match.items, policy=policy, copies=copies),
            exchanges,
        )


def _open_and_match(
    ranks: Ranks, url: Url, state: object, options: LoadOptions, stack: ExitStack
) -> Matched:
    """Opens the checkpoint until `stack` ends and matches it with the target. Changes nothing."""
    source = stack.enter_context(open_source(url, options.storage))
    if is_newest(source.url):
        version = parse(source.store.url).version
        source = replace(source, url=str(parse(source.url).at(version)))
    source = replace(source, catalog=select_weights(source.catalog, state))
    if options.changes.mappings:
        source = replace(source, catalog=options.changes.apply(source).catalog)
    return _match(ranks, source, state, options)


def _match(
    ranks: Ranks,
    source: Source,
    state: object,
    options: LoadOptions,
    names: OtherNames | None = None,
) -> Matched:
    """Matches an opened checkpoint, perhaps under other `names`, with the target."""
    budget = memory_budget()
    saved = Saved(source.catalog, options.fit.rename)
    fit = replace(options.fit, strict=options.fit.strict and not options.forgiven)
    fitted = match(saved, state, fit, ranks.mesh)
    own_names = frozenset[str]() if names is None else names.own
    kept_names = tuple(
        d.name for d in fitted.differences if d.problem == "missing" and d.name in own_names
    )
    if kept_names:
        counted = [each for each in fitted.differences if each.name not in kept_names]
        fitted = replace(fitted, differences=counted)
    if options.forgiven:
        counted = [each for each in fitted.differences if each.problem not in options.forgiven]
        unexpected = [] if "unexpected" in options.forgiven else fitted.unexpected
        fitted = replace(fitted, differences=counted, unexpected=unexpected)
    shared = SharedTargets(
        source.store, source.catalog, fitted.targets, ranks.global_rank, budget // 2, options.verify
    )
    fitted.differences.extend(shared.differences(fitted.shared))
    has_base = _has_base(source, fitted, ranks.global_rank, options)
    exchanges = _are_exchanged(options.replicas, source) and not ranks.is_single_process
    exchanges = exchanges and not has_base
    matched = Matched(
        source=source,
        match=fitted,
        budget=budget,
        exchanges=exchanges,
        plans=None,
        failure=None,
        share=NOTHING_SHARED,
        by_host=options.by_host,
        names=names,
        kept=kept_names,
        has_base=has_base,
    )
    if exchanges or fitted.differences or fitted.unexpected or fitted.idle:
        return matched
    plans, failure = result_or_error(partial(matched.plan, ranks, False))
    if plans is None:
        return replace(matched, failure=failure)
    return replace(matched, plans=plans, share=_check_share(ranks, source, fitted, options))


PROBE_BYTES = 64 << 10
PROBE_ELEMENTS = 4096
"""The elements of a tensor that is likely to differ in models that differ."""


def _has_base(source: Source, found: Match, rank: int, options: LoadOptions) -> bool:
    """Whether this rank's target has the version before that of a live state of another host.

    A copy of one small tensor of the target tells, a matrix if there is one: the delta makes it
    that of the version.
    """
    store = source.store
    if options.unchanged == "read" or not _is_far_live(store):
        return False
    direct = [(item, found.targets[item.target].local) for item in found.items if item.is_direct]
    likely = [(item, local) for item, local in direct if local.numel() >= PROBE_ELEMENTS]
    if not likely:
        return False
    item, local = min(likely, key=lambda one: (one[1].ndim < 2, one[1].numel()))
    requests = requests_for(source.catalog.tensors[item.source], item.layout.pieces(rank))
    limits = Limits(PROBE_BYTES, PROBE_BYTES, PROBE_BYTES)
    first = byte_ranges_of(requests, verify=True, limits=limits)[:1]
    return apply_delta(store, first, [memory_of(local.clone())]) == []


def _is_far_live(store: Store) -> bool:
    """Whether this is a live state of another host."""
    return is_live(store.url) and store.read_bytes > LOCAL_READ_BYTES


def _check_share(ranks: Ranks, source: Source, found: Match, options: LoadOptions) -> CheckShare:
    """Returns the checksums that this rank compares if all ranks divide them alike.

    A rank that leaves out unchanged chunks does not see all that it would have to compare.
    """
    memory = "" if ranks.is_single_process else memory_name(source.store)
    if not memory or not options.verify or options.unchanged not in ("auto", "read"):
        return NOTHING_SHARED
    return check_share(memory, found.items, source.catalog, ranks.mesh, ranks.global_rank)


def _are_exchanged(replicas: str, source: Source) -> bool:
    """Whether replicas exchange the elements that they read.

    "auto" does not exchange on local disks: all ranks of a machine share the page cache, and a copy
    from it is several times as fast as a message. A server sends, and often charges for, each byte
    again.
    """
    if replicas == "auto":
        return source.store.read_bytes > LOCAL_READ_BYTES
    return replicas == "exchange"


def agree_on_plans(
    ranks: Ranks, matched: Matched, agreed: Agreement, options: LoadOptions
) -> tuple[Plans, int]:
    """Returns this rank's plans once all ranks have theirs, and the bytes for exchanges.

    All ranks call this. Communicates unless all ranks have planned already.
    """
    same, url = agreed.same, matched.source.url
    if not same["source"]:
        raise StoreError(
            f"{url}: the ranks opened different checkpoints: one was replaced meanwhile, or the "
            "ranks have different URLs; the target is unchanged: load again"
        )
    if matched.plans is not None and same["planned"]:  # so no rank has found a difference
        return matched.plans, matched.budget
    all_differences = differences(ranks, matched.match, same["unexpected"], same["idle"])
    warns = ranks.rank == 0 or not same["differing"]
    names = matched.match.saved_names
    other = None if matched.names is None else matched.names.title
    check = partial(
        check_fits,
        *(url, all_differences, options.fit.strict, warns, TO_USER, options.call, names),
        other_names=other,
        hint=matched.hint,
    )
    checking = partial(_check_plans, matched, ranks, check)
    plans, told = ranks.run_and_compare(
        PLANNING,
        partial(checking, matched.exchanges),
        Plans.fingerprints,
        number=matched.budget,
    )
    if not told.same["exchanges"]:
        plans = ranks.run_on_all(PLANNING, partial(checking, False))
    return plans, told.number


def _check_plans(
    matched: Matched, ranks: Ranks, check: Callable[[], None], exchanges: bool
) -> Plans:
    """Returns the plans, unless `check` raises an error."""
    check()
    if matched.failure is not None:
        raise matched.failure
    return matched.plan(ranks, exchanges)


def select_weights(catalog: Catalog, state: object) -> Catalog:
    """Returns the weights of a training's folder for a module or a dict with other keys.

    A dict with one of the folder's own keys wants the whole folder; so do an empty dict and any
    other object. Another checkpoint is returned unchanged.
    """
    if not catalog.weights:
        return catalog
    own = catalog.tree if isinstance(catalog.tree, dict) else {}
    has_other_keys = isinstance(state, Mapping) and bool(state) and not any(k in own for k in state)
    if isinstance(state, nn.Module) or has_other_keys:
        return under(catalog, catalog.weights)
    return catalog
