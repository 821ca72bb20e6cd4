"""The part of a load before it changes the target: open, match, plan, agree.

Each rank opens the checkpoint, matches its names with the target's and plans its reads. The ranks
then compare fingerprints of what they found, and all raise the same differences.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt.budget import memory_budget
from ckpt.errors import StoreError
from ckpt.loading.fallback import Url
from ckpt.mapping.changes import Changes
from ckpt.match.match import match
from ckpt.match.match_builder import Fit, Match
from ckpt.match.match_stateful import wanted
from ckpt.match.overlaps import check_fits, differences, fingerprints
from ckpt.opening.sources import Source, open_source
from ckpt.plan.check_shares import NOTHING_SHARED, CheckShare, check_share
from ckpt.plan.load_plan import LoadPlan, LoadPolicy, plan_load
from ckpt.plan.read_plan import BoxCopies
from ckpt.state.saved import Saved
from ckpt.stores.addresses import is_newest, parse
from ckpt.stores.store import Options
from ckpt.transfer.record_sums import Verify
from ckpt.transfer.run import SharedTargets
from formats.native.shard import Progress
from formats.storage import LOCAL_READ_BYTES, REMOTE_READ_BYTES, memory_name
from sharding.agreement.ranks import HASH_BITS, Ranks, result_or_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sharding.agreement.ranks import Agreement

TO_USER = 9
"""The stack level, in `check_fits`, of the program that called `ckpt.load`."""
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


def agreed_source(
    ranks: Ranks, url: str, state: object, options: LoadOptions, stack: ExitStack
) -> tuple[Matched, Agreement]:
    """Opens the checkpoint on all ranks until `stack` ends, and compares what they found.

    All ranks call this. Communicates. If a version of a live state is published meanwhile, the
    ranks open different ones, each the newest; all of them then open that of rank 0.
    """
    opening = partial(_matched, ranks, url, state, options, stack)
    matched, agreed = ranks.run_and_compare(MATCHING, opening, Matched.fingerprints, 6)
    if agreed.same[-1] or not is_newest(url):
        return matched, agreed
    version = parse(matched.source.url).version
    version = int(ranks.broadcast(str(version).encode()))
    opening = partial(_matched, ranks, str(parse(url).at(version)), state, options, stack)
    return ranks.run_and_compare(MATCHING, opening, Matched.fingerprints, 6)


class Plans(NamedTuple):
    """The plans of one load on this rank."""

    preflight: LoadPlan
    """Reads and checks scalars before the load changes the target."""
    tensors: LoadPlan
    exchanged: bool
    """Whether replicas exchange the elements that they read; equal on all ranks."""

    def fingerprints(self) -> tuple[int]:
        """Returns the fingerprint of the exchanges, for `Ranks.run_and_compare`."""
        return (self.tensors.fingerprint >> (64 - HASH_BITS),)


@dataclass(frozen=True, slots=True)
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
    share: CheckShare
    """The checksums to compare if all ranks divide them alike."""
    by_host: bool

    def fingerprints(self) -> tuple[int, int, int, int, int, int]:
        """Returns those of the match, the plans' presence, the share and the source.

        The source is the checkpoint, or the save that made it.
        """
        source = self.source.attempt if self.by_host else self.source.fingerprint
        share = self.share.fingerprint >> (64 - HASH_BITS)
        return (*fingerprints(self.match), int(self.plans is not None), share, source)

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


def _matched(
    ranks: Ranks, url: Url, state: object, options: LoadOptions, stack: ExitStack
) -> Matched:
    """Opens the checkpoint until `stack` ends and matches it with the target. Changes nothing."""
    budget = memory_budget()
    source = stack.enter_context(open_source(url, options.storage))
    if is_newest(source.url):
        version = parse(source.store.url).version
        source = replace(source, url=str(parse(source.url).at(version)))
    source = replace(source, catalog=wanted(source.catalog, state))
    if options.changes.mappings:
        source = replace(source, catalog=options.changes.applied(source).catalog)
    saved = Saved(source.catalog, options.fit.rename)
    fit = replace(options.fit, strict=options.fit.strict and not options.forgiven)
    found = match(saved, state, fit, ranks.mesh)
    if options.forgiven:
        counted = [each for each in found.differences if each.problem not in options.forgiven]
        unexpected = [] if "unexpected" in options.forgiven else found.unexpected
        found = replace(found, differences=counted, unexpected=unexpected)
    shared = SharedTargets(
        source.store, source.catalog, found.targets, ranks.global_rank, budget // 2, options.verify
    )
    found.differences.extend(shared.differences(found.shared))
    exchanges = _are_exchanged(options.replicas, source) and not ranks.is_single_process
    matched = Matched(source, found, budget, exchanges, None, NOTHING_SHARED, options.by_host)
    if exchanges or found.differences or found.unexpected or found.idle:
        return matched
    # An error recurs when all ranks plan, and then reaches all ranks.
    plans, _ = result_or_error(partial(matched.plan, ranks, False))
    if not plans:
        return matched
    return replace(matched, plans=plans[0], share=_check_share(ranks, source, found, options))


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


def agreed_plans(
    ranks: Ranks, matched: Matched, agreed: Agreement, options: LoadOptions
) -> tuple[Plans, int]:
    """Returns this rank's plans once all ranks have theirs, and the bytes for exchanges.

    All ranks call this. Communicates unless all ranks have planned already.
    """
    same_unexpected, same_idle, same_others, all_planned, _, same_source = agreed.same
    url = matched.source.url
    if not same_source:
        raise StoreError(
            f"{url}: the ranks opened different checkpoints: one was replaced meanwhile, or the "
            "ranks have different URLs; the target is unchanged: load again"
        )
    if matched.plans is not None and all_planned:  # so no rank has found a difference
        return matched.plans, matched.budget
    found = differences(ranks, matched.match, same_unexpected, same_idle)
    warns = ranks.rank == 0 or not same_others
    check = partial(check_fits, url, found, options.fit.strict, warns, TO_USER, options.call)
    checking = partial(_checked_plans, matched, ranks, check)
    plans, told = ranks.run_and_compare(
        PLANNING, partial(checking, matched.exchanges), Plans.fingerprints, 1, matched.budget
    )
    if not told.same[0]:
        plans = ranks.run_on_all(PLANNING, partial(checking, False))
    return plans, told.number


def _checked_plans(
    matched: Matched, ranks: Ranks, check: Callable[[], None], exchanges: bool
) -> Plans:
    """Returns the plans, unless `check` raises an error."""
    check()
    return matched.plan(ranks, exchanges)
