"""The steps before a load changes anything: open, match, plan, agree.

Each rank opens the checkpoint, matches its names with the target's, perhaps under other names, and
plans its reads. The ranks then compare fingerprints of what they found, and all raise the same
differences.

[Note: kept matches]
A job that follows a live state or a folder loads equal names into the same tensors again and
again. While `ckpt.follow` runs, the match of one load is kept for the next one of the same address:

1. Of targets of modules and tensors alone, without a difference, in torch's ways of state dicts.
2. It is used if the catalog has the same names, shapes and dtypes, and the target consists of the
   same modules and tensors in the same memory: `_target_key` lists all that the match depends on.
3. It holds no tensor of the target: a model that the program drops is freed.
4. The plan is made anew, as each version has files and checksums of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from warnings import warn
from weakref import ref

import torch
from torch import nn
from xxhash import xxh3_64_intdigest

from ckpt.arguments import memory_budget
from ckpt.errors import Difference, StoreError, make_skipped_warning
from ckpt.mapping.changes import Changes
from ckpt.mapping.other_names import OtherNames, other_names
from ckpt.match.match import is_of_torch, match
from ckpt.match.match_builder import Fit, Match, Target
from ckpt.match.overlaps import check_fits, differences, fingerprints
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
from ckpt.state.memory import ORDINARY, check_mode, memory_of, torch_dtype
from ckpt.state.saved import Saved
from ckpt.stores.addresses import parse
from ckpt.stores.store import Kept, Options, Store, is_live, is_newest, kept_for
from ckpt.transfer.record_sums import Verify
from ckpt.transfer.run import SharedTargets
from formats.catalog import Catalog
from formats.joined import under
from formats.native.shard import Progress
from formats.storage import LOCAL_READ_BYTES, REMOTE_READ_BYTES, memory_name
from sharding.agreement.ranks import HASH_BITS, Ranks, result_or_error
from sharding.describe.describing import describe
from sharding.errors import without_secrets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sharding.agreement.ranks import Agreement

_log = logging.getLogger("ckpt.load")

TO_USER = 9
"""The stack level, in `check_fits`, of the program that called `ckpt.load`."""
OF_A_HEAD = "belongs to a head that the target lacks"
MATCHING = "matching the checkpoint with the target"
PLANNING = "planning to load"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The arguments of a load, checked."""

    fit: Fit = field(default_factory=Fit)
    changes: Changes | None = None
    """The mappings, if there are any."""
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
    is_free = not (options.changes or options.fit.rename or options.forgiven)
    alike = agreed.same["unexpected"] and agreed.same["differing"]
    if (
        not is_free
        or matched.source.catalog.format == "ckpt"
        or (alike and not any(matched.problems))
    ):
        return matched, agreed
    finding = partial(_find_names, ranks, matched, state, options)
    other, fingerprints = ranks.run_and_compare(MATCHING, finding, Matched.fingerprints)
    return (other, fingerprints) if fingerprints.same["names"] else (matched, agreed)


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
        if other.problems < best.problems and names.argument is None:
            best = other
        elif other.problems < best.problems:
            hint = hint or names.argument or ""
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
        only = [Difference(name, "unexpected", OF_A_HEAD) for name in self.names.left]
        only += [Difference(name, "missing", "is in no file of this class") for name in self.kept]
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
    ranks: Ranks, url: str, state: object, options: LoadOptions, stack: ExitStack
) -> Matched:
    """Opens the checkpoint until `stack` ends and matches it with the target. Changes nothing."""
    source = stack.enter_context(open_source(url, options.storage))
    if is_newest(source.url):
        version = parse(source.store.url).version
        source = replace(source, url=str(parse(source.url).at(version)))
    source = replace(source, catalog=select_weights(source.catalog, state))
    if options.changes is not None:
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
    is_kept = names is None and source.catalog.format == "ckpt"
    kept = kept_for(source.store.url) if is_kept else None
    key = None if kept is None else _match_key(source.catalog, state, options, ranks)
    fitted = None if kept is None else _take(kept, key, state, ranks)
    if fitted is None:
        saved = Saved(source.catalog, options.fit.rename)
        fit = replace(options.fit, strict=options.fit.strict and not options.forgiven)
        fitted = match(saved, state, fit, ranks.mesh)
        if kept is not None:
            kept.match = _without_targets(key, fitted)
    own_names = frozenset[str]() if names is None else names.own
    kept_names = tuple(
        d.name for d in fitted.differences if d.problem == "missing" and d.name in own_names
    )
    if kept_names:
        counted = [
            difference for difference in fitted.differences if difference.name not in kept_names
        ]
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


def _take(kept: Kept, key: object, state: object, ranks: Ranks) -> Match | None:
    """Returns the match that the last load has kept, if it is that of this key."""
    last: tuple[object, Match, list[ref[torch.Tensor]]] | None = kept.match
    if last is None or key is None:
        return None
    own_key, found, known = last
    tensors = [tensor for item in known if (tensor := item()) is not None]
    if key != own_key or len(tensors) < len(known):
        return None
    check_mode()
    targets = [Target(item, describe(item, "", ranks.mesh)[0]) for item in tensors]
    return replace(found, targets=targets, differences=[], install=lambda: state)


def _without_targets(key: object, found: Match) -> tuple[object, Match, list[ref[Any]]] | None:
    """Returns what is kept of a match: None if a later load has more to do than to read tensors."""
    others = (found.installs, found.checks, found.differences, found.unexpected, found.shared)
    tensors = [target.given for target in found.targets]
    known = [ref(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if key is None or any(others) or len(known) < len(tensors):
        return None
    return key, replace(found, targets=[], install=type(None)), known


def _match_key(catalog: Catalog, state: object, options: LoadOptions, ranks: Ranks) -> object:
    """Returns a value that is equal for equal matches; None if there may be no such value."""
    fit, key = options.fit, list[object]()
    rename = dict(fit.rename) if isinstance(fit.rename, Mapping) else fit.rename
    is_plain = not options.forgiven and fit.selection.is_all and not callable(rename)
    if not is_plain or not _target_key(state, key):
        return None
    records = [(tensor.name, tensor.shape, tensor.dtype) for tensor in catalog.tensors.values()]
    saved = (records, catalog.tree, catalog.aliases, catalog.versions, catalog.optimizers)
    return key, saved, rename, fit.strict, fit.casting, ranks.mesh, ranks.global_rank


def _target_key(node: object, key: list[object]) -> bool:
    """Adds all of a target that its match depends on; False if there may be more."""
    if type(node) is dict:
        key.append(tuple(node))
        return all(_target_key(item, key) for item in node.values())
    if isinstance(node, torch.Tensor):
        local: Any = node if type(node) in ORDINARY else getattr(node, "_local_tensor", None)
        if type(local) not in ORDINARY or local.layout is not torch.strided or local.is_meta:
            return False
        spec = getattr(node, "_spec", None)
        place = local.data_ptr(), local.shape, local.stride(), local.dtype, local.device
        key.append((id(node), type(node), spec, place))
        return True
    return isinstance(node, nn.Module) and _module_key(node, key)


_OWN_WAYS = frozenset({"state_dict", "_save_to_state_dict", "load_state_dict"})
_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _module_key(module: nn.Module, key: list[object]) -> bool:
    own, kind = vars(module), type(module)
    if (
        kind.state_dict is not nn.Module.state_dict
        or not is_of_torch(kind._save_to_state_dict)
        or not own.keys().isdisjoint(_OWN_WAYS)
        or any(own.get(hooks) for hooks in _HOOKS)
    ):
        return False
    parts: list[Any] = [own.get(name) for name in ("_parameters", "_buffers", "_modules")]
    if not all(isinstance(part, dict) for part in parts):  # of a compiled script
        return False
    tensors, hidden = {**parts[0], **parts[1]}, own.get("_non_persistent_buffers_set", ())
    key.append((id(module), kind, *map(len, parts), *tensors, *own["_modules"], *hidden))
    return all(tensor is None or _target_key(tensor, key) for tensor in tensors.values()) and all(
        child is None or _module_key(child, key) for child in own["_modules"].values()
    )


PROBE_BYTES = 64 << 10
PAYS = 0.5
"""The part of the bytes up to which a delta of the probe tells that deltas pay."""
PROBE_ELEMENTS = 4096
"""The elements of a tensor that is likely to differ in models that differ."""


def _has_base(source: Source, found: Match, rank: int, options: LoadOptions) -> bool:
    """Whether this rank's target has an earlier version of a live state, and deltas pay.

    A copy of one small tensor of the target tells, a matrix if there is one: the delta makes it
    that of the version. Versions on this host need no deltas.
    """
    store = source.store
    is_here = is_live(store.url) and not is_far_live(store)
    if options.unchanged == "read" or is_here or not hasattr(store, "delta"):
        return False
    if getattr(store, "is_next", False):
        return True
    records = source.catalog.tensors
    pairs = [(item, found.targets[item.target].local) for item in found.items]
    likely = [
        (item, local)
        for item, local in pairs
        if local.numel() >= PROBE_ELEMENTS
        and local.dtype == torch_dtype(records[item.source].dtype.torch_name)
    ]
    if not likely:
        return False
    from ckpt.transfer.live_deltas import apply_delta  # zstandard is for those who need it

    item, local = min(likely, key=lambda pair: (pair[1].ndim < 2, pair[1].numel()))
    requests = requests_for(records[item.source], item.layout.pieces(rank))
    limits = Limits(PROBE_BYTES, PROBE_BYTES, PROBE_BYTES)
    ranges = byte_ranges_of(requests, verify=True, limits=limits)
    largest = [max(ranges, key=lambda pair: pair.wanted_bytes)]
    copy = torch.empty(local.shape, dtype=local.dtype).copy_(local)
    applied = apply_delta(store, largest, [memory_of(copy)], PAYS)
    return applied is not None and not applied.left


def is_far_live(store: Store) -> bool:
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
        hint=matched.hint or _fused_hint(matched.match),
    )
    checking = partial(_check_plans, matched, ranks, check)
    plans, records = ranks.run_and_compare(
        PLANNING,
        partial(checking, matched.exchanges),
        Plans.fingerprints,
        number=matched.budget,
    )
    if not records.same["exchanges"]:
        plans = ranks.run_on_all(PLANNING, partial(checking, False))
    return plans, records.number


FUSED = (("qkv_proj", "q_proj"), ("gate_up_proj", "gate_proj"))
"""Names of an engine's tensors, and of the first of the tensors that each consists of."""


def _fused_hint(found: Match) -> str:
    """Returns the argument that fuses tensors as an engine has them, if that is a difference."""
    lacking = {*found.unexpected}
    missing = [
        difference.name for difference in found.differences if difference.problem == "missing"
    ]
    is_fused = any(name.replace(*names) in lacking for name in missing for names in FUSED)
    return "mapping='any-hf-fused'" if is_fused else ""


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
