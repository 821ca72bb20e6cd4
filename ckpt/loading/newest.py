"""Finds the newest sound checkpoint in a folder of checkpoints.

Rules:

1. Only folders with a manifest count, that is, ckpt's own format. An unfinished save leaves no
   manifest, and other formats do not tell when they are complete.
2. The newest checkpoint is the one saved last. Checkpoints of a run have the order in which the
   run saved them, by a counter in their manifests: a clock that steps back changes nothing. A run
   that went back to step 100 thus continues from its own step 200, not from the abandoned step 300.
   Other checkpoints are ordered by the time in their manifests, which a copy of the folder keeps;
   those of the same second by name, with numbers by value.
3. A warning names each committed checkpoint that is skipped, and each folder that this process may
   not read.
4. A folder may change after it was listed: retention removes a checkpoint once a newer one exists.
   Nothing is skipped, and nothing missed, by a listing that is out of date: it is taken again.
"""

from __future__ import annotations

import heapq
import os
import re
from calendar import timegm
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from time import gmtime, strftime, strptime
from typing import NamedTuple, TypeVar
from warnings import warn

from ckpt.errors import FallbackWarning, NotACheckpointError, ReplacedError, Skipped
from ckpt.opening.sources import (
    MANIFEST_HEAD_BYTES,
    checkpoints_below,
    head_now,
    nothing_at,
    replaced_error,
    similar_path,
    unless_replaced,
)
from ckpt.stores.store import (
    Options,
    Store,
    absolute,
    is_file,
    join_url,
    natural,
    open_store,
    split_url,
)
from ckpt.transfer.facts import Checkpoints, Listing, checkpoints_in, concerns_one_file
from formats.errors import CorruptError, FormatError, GoneError, UnsupportedError
from formats.native.manifest import MANIFEST, Manifest, load, read_manifest

__all__ = ["latest"]

LISTINGS = 100
"""The most listings of a folder that changes after each."""
SHOWN = 5
UNREADABLE = "unreadable"
"""The kind of a place that the process may not read, or that is a link to itself."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
BEGAN, ORDER = "began", "order"
"""Keys of a run's metadata: the begin of the save in seconds since 1970, and `EPOCH.NUMBER`, the
number of the run's start and that of the save in it."""
_SECONDS = re.compile(r"\d{1,12}\.\d{6}")
_ORDER = re.compile(r"(\d{1,18})\.(\d{1,18})")

T = TypeVar("T")


class Age(NamedTuple):
    """When a checkpoint was saved."""

    time: float
    """By a clock, in seconds since 1970."""
    order: tuple[int, int] | None
    """Epoch and number of the save in its run; None if no run with a counter saved it."""
    name: str
    """The name of its folder."""


def newest_first(checkpoints: Iterable[T], age: Callable[[T], Age]) -> list[T]:
    """Returns checkpoints of one folder, the newest first.

    Those with a counter are in its order; equal ones stay as they were given. Beside those without,
    each counts as saved at the latest time that it or an earlier one of its run has: a clock that
    stepped back makes none of them old.

    >>> back = [Age(9.0, (1, 1), "step-1"), Age(5.0, (1, 2), "step-2"), Age(7.0, None, "mine")]
    >>> [one.name for one in newest_first(back, lambda one: one)]
    ['step-2', 'step-1', 'mine']
    """
    counted: list[tuple[tuple[int, int], float, T]] = []
    others: list[tuple[tuple[float, object], T]] = []
    for checkpoint in checkpoints:
        time, order, name = age(checkpoint)
        if order is None:
            others.append(((time, natural(name)), checkpoint))
        else:
            counted.append((order, time, checkpoint))
    counted.sort(key=lambda row: row[0], reverse=True)
    times = list(accumulate((time for _, time, _ in reversed(counted)), max))
    ordered = [
        ((time, natural(age(item).name)), item)
        for time, (_, _, item) in zip(reversed(times), counted, strict=True)
    ]
    others.sort(key=lambda row: row[0], reverse=True)
    merged = heapq.merge(ordered, others, key=lambda row: row[0], reverse=True)
    return [item for _, item in merged]


def order_of(text: str) -> tuple[int, int] | None:
    """Returns the order in a manifest's text; None if it is not valid."""
    matched = _ORDER.fullmatch(text)
    return None if matched is None else (int(matched[1]), int(matched[2]))


def seconds_of(text: str) -> float:
    """Returns the time in a manifest's text, in seconds since 1970; 0 if it is not valid."""
    return float(text) if _SECONDS.fullmatch(text) else 0.0


class Committed(NamedTuple):
    """A checkpoint of a folder."""

    name: str
    """The name of its folder."""
    time: str
    """The time of its commit, in ISO 8601."""
    metadata: Mapping[str, str]
    """The metadata of its manifest: the writer's and the user's."""

    @property
    def age(self) -> Age:
        """When its save began, if a run saved it; else the time of its commit."""
        seconds = seconds_of(self.metadata.get(BEGAN, "")) or _seconds(self.time)
        return Age(seconds, order_of(self.metadata.get(ORDER, "")), self.name)


class Listed(NamedTuple):
    """A folder of checkpoints."""

    newest: list[Committed]
    """Those that can be read, the newest first."""
    found: Checkpoints


def _seconds(time: str) -> float:
    try:
        return float(timegm(strptime(time, _TIME_FORMAT)))
    except ValueError:
        return 0.0


def latest(
    folder: str | os.PathLike[str], *, verify: bool = False, storage_options: Options = None
) -> str:
    """Returns the path or URL of the newest sound checkpoint in a folder.

    A sound checkpoint is a committed one of ckpt's own format, with an intact manifest and with all
    its files in their full length. With `verify` all its checksums are compared too, which takes as
    long as reading it. A FallbackWarning names newer checkpoints that are not sound. One process
    can call this; no process group is involved.

    Raises:
        NotACheckpointError: the folder has no committed checkpoint.
        CorruptError: no checkpoint of the folder is sound. The message has the reasons.
        OSError: the folder has only folders that this process may not read.
        ReplacedError: a checkpoint was replaced each time that it was checked.
        UnsupportedError: a checkpoint was written by a later version of ckpt.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (9, 10):
    ...         ckpt.save(f"{folder}/step-{step}", {"w": torch.ones(2)})
    ...     ckpt.latest(folder).removeprefix(folder)
    '/step-10'
    """
    url, skipped = newest_sound(folder, verify, storage_options)
    if skipped:
        warn(FallbackWarning(url, skipped), stacklevel=2)
    return url


def newest_sound(
    folder: str | os.PathLike[str], verify: bool, options: Options
) -> tuple[str, list[Skipped]]:
    """Returns the result of `latest` and the newer checkpoints that are not sound. Raises alike."""
    listing = list_checkpoints(folder, options)
    tries_left = LISTINGS
    while True:
        failure, result, tries_left = None, ("", list[Skipped]()), tries_left - 1
        try:
            result = _newest_sound(folder, listing, verify, options)
        except (FormatError, NotACheckpointError, ReplacedError) as error:
            failure = error
        if failure is None and not result[1]:
            return result
        before, listing = listing, list_checkpoints(folder, options)
        if tries_left and listing.newest != before.newest:
            continue
        if failure is not None:
            raise failure
        return result


def _newest_sound(
    folder: str | os.PathLike[str],
    listing: Listed,
    verify: bool,
    options: Options,
) -> tuple[str, list[Skipped]]:
    """Returns the result of `newest_sound` for one listing. Raises alike."""
    skipped = [
        Skipped(join_url(folder, name), UNREADABLE, str(error))
        for name, error in listing.found.unreadable.items()
    ]
    for checkpoint in listing.newest:
        url = join_url(folder, checkpoint.name)
        wrong = wrong_with(url, verify, options, listing.found)
        if wrong is None:
            return url, skipped
        skipped.append(wrong)
    if not listing.newest:
        for error in listing.found.unreadable.values():
            raise error
    if skipped:
        reasons = "; ".join(wrong.message for wrong in skipped[:SHOWN])
        more = f"; and {len(skipped) - SHOWN} more" if len(skipped) > SHOWN else ""
        raise CorruptError(
            f"{os.fspath(folder)}: none of the {len(skipped)} checkpoints in it is sound: "
            f"{reasons}{more}"
        )
    raise NotACheckpointError(f"{os.fspath(folder)}: {_what_is_there(folder, options)}")


def list_committed(folder: str | os.PathLike[str], options: Options) -> list[Committed]:
    """Returns the checkpoints of a folder that can be read, sound or not, newest first."""
    return list_checkpoints(folder, options).newest


def list_checkpoints(
    folder: str | os.PathLike[str],
    options: Options,
    with_bases: bool = False,
    listing: Listing | None = None,
) -> Listed:
    """Returns the checkpoints of a folder, newest first, and the reasons of unreadable ones.

    `listing` is one of all files, if the caller has it.

    If none of the folders in it has a manifest, newer ones may have taken the places of all of them
    meanwhile: two looks must agree on that (rule 4).
    """
    before: list[str] = []
    with open_store(folder, options) as store:
        checkpoints = checkpoints_in(store, with_bases, listing)
        for _ in range(LISTINGS):
            names = [] if checkpoints.facts or checkpoints.unreadable else store.folders()
            if names == before:
                break
            before = names
            checkpoints = checkpoints_in(store, with_bases)
        committed = [
            Committed(name, _time(store, name, facts.metadata, checkpoints), facts.metadata)
            for name, facts in checkpoints.facts.items()
        ]
    return Listed(newest_first(committed, lambda checkpoint: checkpoint.age), checkpoints)


def wrong_with(
    url: str, verify: bool, options: Options, beside: Checkpoints | None = None
) -> Skipped | None:
    """Returns why a checkpoint is not sound, by its manifest and sizes; None if it is sound.

    With `verify` all checksums are compared too. `beside` is a listing of the folder around it.

    Raises:
        UnsupportedError: the checkpoint was written by a later version of ckpt.
        ReplacedError: the checkpoint was replaced each time that it was checked.
    """
    try:
        unless_replaced(lambda: _check_whole(url, options, beside))
        if verify:
            from ckpt.checking.verify import verify as verify_all  # other loads spare it

            for problem in verify_all(url, storage_options=options).problems[:1]:
                return Skipped(url, problem.kind, problem.message)
    except UnsupportedError:
        raise
    except (FormatError, NotACheckpointError) as error:
        return Skipped(url, error.kind, str(error))
    except OSError as error:
        if not concerns_one_file(error):
            raise
        return Skipped(url, UNREADABLE, f"{url}: {error}")
    return None


def _time(store: Store, name: str, metadata: Mapping[str, str], found: Checkpoints) -> str:
    """Returns the time in a manifest, or else that of its last write by the store's clock."""
    time = metadata.get("time", "")
    if _TIME.fullmatch(time):
        return time
    written = found.written_at(store, name)
    return "" if written is None else strftime(_TIME_FORMAT, gmtime(written))


def _check_whole(url: str, options: Options, beside: Checkpoints | None) -> None:
    """Raises an error unless the manifest is intact and all files that it names have their sizes.

    Raises:
        ReplacedError: a file is missing or has another size, and the manifest was replaced.
        CorruptError, NotACheckpointError: the checkpoint is damaged or missing.
    """
    with open_store(url, options) as store:
        try:
            data = read_manifest(store)
        except FileNotFoundError as error:
            raise NotACheckpointError(f"{url}: no checkpoint: there is no {MANIFEST}") from error
        manifest = load(data, f"{url}/{MANIFEST}")
        if beside is not None and _has_all_sizes(url, manifest, beside):
            return
        try:
            _check_all_sizes(url, store, manifest, options)
        except CorruptError as error:
            now = head_now(absolute(url), store)
            if now != data[:MANIFEST_HEAD_BYTES]:
                raise replaced_error(url, "a file of it", now) from error
            raise


def _has_all_sizes(url: str, manifest: Manifest, beside: Checkpoints) -> bool:
    """Whether a listing shows all files of a checkpoint and of its bases, with their sizes."""
    if beside.files is None:
        return False
    own = split_url(url)[1]
    needed = {(own, file.name): file.size for file in manifest.files}
    for base in manifest.bases:
        if base is not None:
            needed |= {(base.folder, file.name): file.size for file in base.files}
    for (folder, name), size in needed.items():
        seen = beside.files.get(folder, {}).get(name)
        if seen is None or seen.nbytes != size:
            return False
    return True


def _check_all_sizes(url: str, store: Store, manifest: Manifest, options: Options) -> None:
    _check_sizes(url, store, {file.name: file.size for file in manifest.files})
    parent, _ = split_url(url)
    for base in manifest.bases:
        if base is not None:
            with open_store(join_url(parent, base.folder), options) as beside:
                sizes = {file.name: file.size for file in base.files}
                _check_sizes(f"{url}: it borrows from {beside.url}", beside, sizes)


def _check_sizes(where: str, store: Store, wanted: dict[str, int]) -> None:
    sizes = store.sizes()
    for name, size in wanted.items():
        if name not in sizes:
            raise GoneError(f"{where}/{name}")
        if sizes[name] != size:
            raise CorruptError(
                f"{where}/{name}: the file has {sizes[name]} bytes, {size} were written; restore "
                "it from another copy"
            )


def _what_is_there(folder: str | os.PathLike[str], options: Options) -> str:
    with open_store(folder, options) as store:
        if store.exists(MANIFEST):
            above, _ = split_url(folder)
            return f"this is a checkpoint itself; give the folder that it lies in, {above}"
        entries = store.entries()
        below = checkpoints_below(store, entries, only_native=True)
    if is_file(folder, options):
        return "this is a file; give a folder of checkpoints"
    if not entries:
        return f"no checkpoint here ({nothing_at(folder)}){similar_path(folder)}"
    folders = sorted((name[:-1] for name in entries if name.endswith("/")), key=natural)
    if not folders:
        return "no folder is in it, so no checkpoint of ckpt's own format"
    more = f" and {len(folders) - SHOWN} more" if len(folders) > SHOWN else ""
    names = ", ".join(folders[-SHOWN:]) + more
    text = f"no folder in it is a committed checkpoint of ckpt's own format ({names})"
    return text if below is None else f"{text}; {below.advice(store.url)}"
