"""Loads an older checkpoint if one is damaged or missing: `ckpt.load(..., fallback=)`.

Rules:

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
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from warnings import warn

from ckpt.display import natural
from ckpt.errors import (
    AccessDeniedError,
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
    VersionGoneError,
)
from ckpt.loading.newest import UNREADABLE, list_committed
from ckpt.opening.sources import TRIES
from ckpt.stores.store import (
    WEB,
    Options,
    absolute,
    is_file,
    is_live,
    is_one_version,
    join_url,
    split_url,
)
from ckpt.transfer.record_sums import ChangedOnTheWayError
from formats.errors import (
    CorruptError,
    FormatError,
    GoneError,
    HostileError,
    SizeError,
    TooLargeError,
)
from sharding.agreement.ranks import Ranks
from sharding.errors import describe_error

TO_USER = 7
"""The stack level, in `_tell`, of the program that called `ckpt.load`."""
Url = str | os.PathLike[str]

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
                skipped = [one for one in skipped if not older or one.url in now]
            if older:
                current, tries = older.pop(0), 1
                tried.add(current)
                continue
            is_denied = all(one.kind == UNREADABLE for one in skipped)
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
        warn(FallbackWarning(taken, skipped), stacklevel=TO_USER)


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
    for at, one in enumerate(beside):
        if one.name == name:
            return [older.name for older in beside[at + 1 :]]
    return [one.name for one in beside if natural(one.name) < natural(name)]


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
    reasons = "; ".join(one.message for one in skipped)
    message = f"{skipped[0].url}: neither it nor one of its fallbacks can be loaded: {reasons}"
    is_gone = all(one.kind == NotACheckpointError.kind for one in skipped)
    if touched and is_gone:  # a checkpoint that was replaced meanwhile, and none is damaged
        return ReplacedLoadError(message, touched)
    if touched:
        return DamagedLoadError(message, touched)
    if is_gone:
        return NotACheckpointError(message)
    return CorruptError(message)
