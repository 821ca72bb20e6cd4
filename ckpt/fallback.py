"""Loading from an older checkpoint where one is damaged or missing: `ckpt.load(..., fallback=)`.

Rules:

1. Damage alone makes a load go back: bytes that are missing or changed, or no checkpoint at all.
   Where the target does not fit, a store fails or a rank dies, an older one would not help.
2. All ranks decide alike, by the failure that they agreed on.
3. A checkpoint that is replaced while it is read is not damaged: the same place is begun again, on
   all ranks alike.
4. A failed try may have filled a part of the target. The one that succeeds has to fill all of that;
   no call returns a mix of two checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from warnings import warn

from ckpt.errors import (
    DamagedLoadError,
    FallbackWarning,
    NotACheckpointError,
    PartialLoadError,
    RankError,
    ReplacedError,
    ReplacedLoadError,
    Skipped,
)
from ckpt.newest import committed, natural
from ckpt.stores.replacement_guard import TRIES
from ckpt.stores.store import Options, absolute, is_file, join_url, split_url
from formats.errors import CorruptError, FormatError, HostileError
from formats.storage import GoneError, SizeError, TooLargeError
from sharding.agreement.ranks import Ranks

TO_USER = 7
"""Calls from where all ranks are told of a warning to the program that called `ckpt.load`."""
Url = str | os.PathLike[str]

DAMAGE = {
    kind.__name__: kind.kind
    for kind in (
        *(CorruptError, DamagedLoadError, GoneError, SizeError),
        *(FormatError, HostileError, TooLargeError, NotACheckpointError),
    )
}
"""The errors after which an older checkpoint is tried: their `kind` by their class."""
REPLACED = (ReplacedError.__name__, ReplacedLoadError.__name__)
"""Those after which the same place is tried again."""


class Loaded(NamedTuple):
    """What one try gave."""

    state: object
    names: frozenset[str]
    """The tensors of this rank's target that it filled."""


def load_or_older(
    ranks: Ranks,
    url: Url,
    fallback: bool | Sequence[Url],
    load: Callable[[str], Loaded],
    options: Options,
) -> tuple[object, str]:
    """The state from `url`, or from the first of its fallbacks that is sound; and that one.

    Called by all ranks; `load` is what they do together for one of them. Raises what the last try
    failed with, or a PartialLoadError where that says nothing of what an earlier one touched.
    """
    skipped: list[Skipped] = []
    touched: dict[str, None] = {}
    older: list[str] | None = None
    here, tries = os.fspath(url), 1
    while True:
        ranks.told = None
        try:
            loaded = load(here)
        except Exception as error:
            said = error.touched if isinstance(error, PartialLoadError | RankError) else ()
            touched.update(dict.fromkeys(said))
            if tries < TRIES and _failure(ranks) in REPLACED:
                tries += 1
                continue
            is_said = touched.keys() <= set(said)
            kind = DAMAGE.get(_failure(ranks))
            if kind is None:
                if not touched or (is_said and not skipped):
                    raise
                raise PartialLoadError(
                    f"{_partly_read(url, skipped)}; then {here} failed with "
                    f"{type(error).__name__}: {error}",
                    list(touched),
                ) from error
            skipped.append(Skipped(here, kind, str(error)))
            older = _older(ranks, url, fallback, options) if older is None else older
            if older:
                here, tries = older.pop(0), 1
                continue
            if len(skipped) == 1 and is_said:
                raise
            raise _none_is_sound(skipped, list(touched)) from error
        if left := touched.keys() - loaded.names:
            raise PartialLoadError(
                f"{_partly_read(url, skipped)}; {here}, loaded in its place, does not have all "
                "that was filled from that",
                sorted(left),
            )
        if skipped:
            ranks.run_on_all("telling of the fallback", partial(_tell, ranks, here, skipped))
        return loaded.state, here


def _partly_read(url: Url, skipped: Sequence[Skipped]) -> str:
    """Why a target holds some of what was not loaded."""
    if skipped:
        return f"{skipped[0].url} is damaged and was read in part"
    return f"{os.fspath(url)} was replaced while it was read"


def _tell(ranks: Ranks, taken: str, skipped: Sequence[Skipped]) -> None:
    if ranks.rank == 0:
        warn(FallbackWarning(taken, skipped), stacklevel=TO_USER)


def _failure(ranks: Ranks) -> str:
    """The class of the failure that all ranks know of; empty where there is none."""
    return "" if ranks.told is None else ranks.told[1]


def older_beside(url: Url, options: Options) -> list[str]:
    """The names of the folders beside a checkpoint with older ones, newest first.

    Of one that was not committed, those whose names come before its own.
    """
    if is_file(url, options):
        return []
    folder, name = _folder_and_name(url)
    beside = committed(folder, options)
    for at, one in enumerate(beside):
        if one.name == name:
            return [older.name for older in beside[at + 1 :]]
    return [one.name for one in beside if natural(one.name) < natural(name)]


def _older(ranks: Ranks, url: Url, fallback: bool | Sequence[Url], options: Options) -> list[str]:
    """What to try next, newest first: the same on all ranks."""
    if fallback is False:
        return []
    if not isinstance(fallback, bool):
        return [os.fspath(other) for other in fallback]
    found = ranks.run_on_all(
        "looking for an older checkpoint",
        lambda: older_beside(url, options) if ranks.rank == 0 else [],
    )
    names: list[str] = json.loads(ranks.broadcast(json.dumps(found).encode()))
    return [join_url(_folder_and_name(url)[0], name) for name in names]


def _folder_and_name(url: Url) -> tuple[str, str]:
    folder, name = split_url(url)
    return split_url(absolute(url)) if name in (".", "..") else (folder, name)


def _none_is_sound(skipped: Sequence[Skipped], touched: Sequence[str]) -> Exception:
    """The error where the fallbacks are damaged too."""
    said = "; ".join(one.message for one in skipped)
    message = f"{skipped[0].url}: neither it nor one of its fallbacks can be loaded: {said}"
    is_gone = all(one.kind == NotACheckpointError.kind for one in skipped)
    if touched and is_gone:  # a try that was replaced touched them, and nothing was damaged
        return ReplacedLoadError(message, touched)
    if touched:
        return DamagedLoadError(message, touched)
    if is_gone:
        return NotACheckpointError(message)
    return CorruptError(message)
