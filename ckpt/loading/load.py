"""Loading: open, match, plan, agree, run, install.

Each rank opens the checkpoint, matches its names with the target's and plans its reads. The ranks
then compare fingerprints of what they found, and all raise the same differences. The target changes
only afterwards: tensors are read into their present memory, and optimizers and other objects get
their state last, by their own `load_state_dict`.

[Note: fallback]
`ckpt.load(..., fallback=)` loads an older checkpoint if one is damaged or missing. Rules:

1. Only damage makes a load go back: missing or changed bytes, or no checkpoint at all, or a place
   that this process may not read (permission, archive class), or the end of a live state's server.
   An older checkpoint does not help if the target does not match, a store fails or a rank dies.
2. All ranks decide alike, by the failure that they agreed on.
3. A checkpoint that is replaced during a read is not damaged: all ranks load the same place again.
4. A failed try may have filled a part of the target. The try that succeeds must fill at least this
   part: no call returns a mix of two checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args
from warnings import warn

from ckpt.arguments import CastingRule, ReplicaReads, UnchangedReads, check_order, check_word
from ckpt.errors import (
    DCP_LOAD,
    AccessDeniedError,
    ArgumentTypeError,
    CkptError,
    DamagedLoadError,
    FallbackWarning,
    NotACheckpointError,
    PartialLoadError,
    RankError,
    ReplacedError,
    ReplacedLoadError,
    Skipped,
    StoreTimeoutError,
    UnreachableError,
    UnverifiedWarning,
    VersionGoneError,
)
from ckpt.loading.agreement import (
    TO_USER,
    LoadOptions,
    Matched,
    Plans,
    agree_on_plans,
    agree_on_source,
    is_far_live,
)
from ckpt.loading.newest import UNREADABLE, list_committed
from ckpt.mapping.changes import MappingName, changes_of
from ckpt.match.match_builder import Casting, Fit, casting_of
from ckpt.match.overlaps import check_preflight_scalars
from ckpt.opening.sources import TRIES
from ckpt.plan.load_plan import NOTHING_SHARED, CheckShare
from ckpt.state.memory import will_change
from ckpt.state.patterns import Rename, Selection
from ckpt.stores.store import (
    WEB,
    Options,
    absolute,
    is_file,
    is_live,
    is_one_version,
    join_url,
    natural,
    split_url,
)
from ckpt.transfer.read import ReadPolicy, Unchanged
from ckpt.transfer.record_sums import ChangedOnTheWayError, RecordSums, Verify, check_verify
from ckpt.transfer.run import FileSource, LoadRun, half_loaded, name_touched
from formats.errors import (
    CorruptError,
    FormatError,
    GoneError,
    HostileError,
    SizeError,
    TooLargeError,
)
from formats.native.shard import Progress
from formats.storage import REMOTE_READ_BYTES
from sharding.agreement.call_events import pause_collection
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import Ranks
from sharding.errors import describe_error

if TYPE_CHECKING:
    from sharding.agreement.ranks import Group


__all__ = ["load"]

S = TypeVar("S")

Patterns = str | Sequence[str]
Url = str | os.PathLike[str]
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
    several = isinstance(fallback, Sequence) and all(
        isinstance(place, places) for place in fallback
    )
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
    return LoadOptions(fit=fit, changes=changes_of(mapping, parameters))


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
    with ranks.call(CALL), ExitStack() as stack:
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
            loaded = state
            if read["installs"] or not answers.same["installs"]:
                loaded = ranks.run_on_all("installing the loaded state", run.install)
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
        unchanged = Unchanged.of(options.unchanged, is_far_live(store))
        if matched.has_base or getattr(store, "keeps", False):  # equal parts in each load
            unchanged = Unchanged.DELTA if matched.has_base else unchanged
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


DAMAGE = {
    kind.__name__: kind.kind
    for kind in (
        *(CorruptError, ChangedOnTheWayError, DamagedLoadError, GoneError, SizeError),
        *(FormatError, HostileError, TooLargeError, NotACheckpointError),
    )
}
"""The `kind` of the errors after which a load tries an older checkpoint, by class name."""
DENIED = {kind.__name__: UNREADABLE for kind in (AccessDeniedError, PermissionError)}
"""As `DAMAGE`, for places on disks and in buckets: another one there may be readable."""
REPLACED = tuple(kind.__name__ for kind in (ReplacedError, ReplacedLoadError, VersionGoneError))
"""The class names of the errors after which a load tries the same place again."""
LOST = {kind.__name__: kind.kind for kind in (UnreachableError, StoreTimeoutError)}
"""As `DAMAGE`, for live states alone: their memory has gone with their servers."""


class Loaded(NamedTuple):
    """The result of one try."""

    state: object
    names: frozenset[str]
    """The tensors of this rank's target that the try filled."""


def load_or_older(
    ranks: Ranks,
    url: Url,
    fallback: bool | Sequence[Url],
    load: Callable[[str], Loaded],
    options: Options,
    again: Callable[[], Sequence[str]] = tuple,
) -> tuple[object, str]:
    """Returns the state from `url`, or from the first fallback that is sound, and its URL.

    All ranks call this. `load` loads one URL on all ranks. If none is sound, `again` returns the
    places that there are now, equal on all ranks: those that are new are tried as well. A caller
    whose user has no `fallback=` gives a sequence, and then no message speaks of it.

    Raises:
        PartialLoadError: the last try failed, and an earlier one has touched further tensors; a
            ReplacedLoadError if the checkpoint was replaced during the last try.
        Exception: the error of the last try, if it names all touched tensors.
    """
    skipped: list[Skipped] = []
    touched: dict[str, None] = {}
    older: list[str] | None = None
    current, tries = os.fspath(url), 1
    tried = {current}
    while True:
        ranks.told = None
        try:
            with pause_collection():
                loaded = load(current)
        except Exception as error:
            # Another rank has the same error, and shows its traceback.
            is_shown = isinstance(error, CkptError) and error.shown_on is not None
            named = error.touched if isinstance(error, PartialLoadError | RankError) else ()
            touched.update(dict.fromkeys(named))
            if tries < TRIES and _failure(ranks) in REPLACED and not is_one_version(current):
                tries += 1
                continue
            is_said = touched.keys() <= set(named)
            more = LOST if is_live(current) else {} if current.startswith(WEB) else DENIED
            kind = (DAMAGE | more).get(_failure(ranks))
            if kind is None:
                if not touched or (is_said and not skipped):
                    if is_shown:
                        raise error.with_traceback(None) from error.__cause__
                    raise
                is_replaced = _failure(ranks) in REPLACED
                failure = ReplacedLoadError if is_replaced else PartialLoadError
                raise failure(
                    f"{_partly_read(url, skipped)}; then {current} failed with "
                    f"{type(error).__name__}: {describe_error(error)}",
                    list(touched),
                ) from error
            skipped.append(Skipped(current, kind, describe_error(error)))
            older = _older(ranks, url, fallback, options) if older is None else older
            if not older:  # places may have been removed since they were listed
                now = again()
                older = [place for place in now if place not in tried]
                skipped = [skip for skip in skipped if not older or skip.url in now]
            if older:
                current, tries = older.pop(0), 1
                tried.add(current)
                continue
            is_denied = all(skip.kind == UNREADABLE for skip in skipped)
            if (len(skipped) == 1 or is_denied) and is_said:
                _advise(error, kind, fallback)
                if is_shown:
                    raise error.with_traceback(None) from error.__cause__
                raise
            raise _none_is_sound(skipped, list(touched)) from error
        if unfilled := touched.keys() - loaded.names:
            raise PartialLoadError(
                f"{_partly_read(url, skipped)}; {current}, loaded in its place, does not have all "
                "tensors that were filled before",
                sorted(unfilled),
            )
        if skipped:
            ranks.run_on_all("telling of the fallback", partial(_tell, ranks, current, skipped))
        return loaded.state, current


def _advise(error: Exception, kind: str, fallback: bool | Sequence[Url]) -> None:
    """Adds the way to an older checkpoint to the message of damage, or that there is none."""
    if fallback is True:
        advice = "fallback=True found no older checkpoint beside it"
    elif fallback is False and kind not in (NotACheckpointError.kind, UNREADABLE):
        advice = "fallback=True would load the newest sound checkpoint beside it"
        if isinstance(error, DamagedLoadError):
            advice += (
                ", and exclude= with the names of damaged tensors, which ckpt verify lists, "
                "would load the others"
            )
    else:
        return
    if isinstance(error, CkptError):
        error.args = (f"{error.reason}; {advice}",)


def _partly_read(url: Url, skipped: Sequence[Skipped]) -> str:
    """Returns why a target holds bytes of a checkpoint that was not loaded."""
    if skipped:
        return f"{skipped[0].url} is damaged and was read in part"
    return f"{os.fspath(url)} was replaced while it was read"


def _tell(ranks: Ranks, taken: str, skipped: Sequence[Skipped]) -> None:
    if ranks.rank == 0:
        warn(FallbackWarning(taken, skipped), stacklevel=TO_USER - 2)


def _failure(ranks: Ranks) -> str:
    """Returns the class name of the failure that all ranks know; empty without one."""
    return "" if ranks.told is None else ranks.told[1]


def older_beside(url: Url, options: Options) -> list[str]:
    """Returns the names of the folders with older checkpoints beside this one, newest first.

    If this checkpoint is not committed, the order of names decides which ones are older.
    """
    if is_file(url, options):
        return []
    folder, name = _folder_and_name(url)
    beside = list_committed(folder, options)
    for at, checkpoint in enumerate(beside):
        if checkpoint.name == name:
            return [older.name for older in beside[at + 1 :]]
    return [checkpoint.name for checkpoint in beside if natural(checkpoint.name) < natural(name)]


def _older(ranks: Ranks, url: Url, fallback: bool | Sequence[Url], options: Options) -> list[str]:
    """Returns the URLs to try next, newest first, equal on all ranks."""
    if fallback is False:
        return []
    if not isinstance(fallback, bool):
        return [os.fspath(other) for other in fallback]
    places = ranks.run_on_all(
        "looking for an older checkpoint",
        lambda: older_beside(url, options) if ranks.rank == 0 else [],
    )
    names: list[str] = json.loads(ranks.broadcast(json.dumps(places).encode()))
    return [join_url(_folder_and_name(url)[0], name) for name in names]


def _folder_and_name(url: Url) -> tuple[str, str]:
    folder, name = split_url(url)
    return split_url(absolute(url)) if name in (".", "..") else (folder, name)


def _none_is_sound(skipped: Sequence[Skipped], touched: Sequence[str]) -> Exception:
    """Returns the error for a checkpoint whose fallbacks are all damaged too."""
    reasons = "; ".join(skip.message for skip in skipped)
    message = f"{skipped[0].url}: neither it nor one of its fallbacks can be loaded: {reasons}"
    is_gone = all(skip.kind == NotACheckpointError.kind for skip in skipped)
    if touched and is_gone:  # a checkpoint that was replaced meanwhile, and none is damaged
        return ReplacedLoadError(message, touched)
    if touched:
        return DamagedLoadError(message, touched)
    if is_gone:
        return NotACheckpointError(message)
    return CorruptError(message)
