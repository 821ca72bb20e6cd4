"""Waits for newer versions of a live state, or newer checkpoints of a run, on all ranks alike.

Rank 0 asks the server of a live state, which answers once there is a newer version, and looks into
the folder of a run. All ranks meet at least every `ROUND_SECONDS`, so that the end of a rank is
noticed while nothing is published.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple

from ckpt.errors import WaitTimeoutError
from ckpt.live.chain import newest_version, version_numbers
from ckpt.live.store import LiveStore
from ckpt.live.swarm import sharing
from ckpt.run.policy import RunStep
from ckpt.run.steps import list_steps
from ckpt.stores.addresses import LiveUrl, parse
from ckpt.stores.store import Options, is_live, join_url, keep, open_store
from formats.native.manifest import MANIFEST
from sharding.agreement.ranks import Ranks, result_or_error
from sharding.errors import ArgumentError

if TYPE_CHECKING:
    from sharding.agreement.ranks import Group

__all__ = ["LiveVersion", "follow"]

ROUND_SECONDS = 5.0
"""The longest wait of one request."""


@dataclass(frozen=True, slots=True)
class LiveVersion:
    """A version of a live state, or a checkpoint of a run."""

    number: int
    """The version, or the step."""
    url: str
    """Its address, with the token of a live state: `ckpt.load` takes it."""

    def __repr__(self) -> str:
        return f"LiveVersion({parse(self.url).shown if is_live(self.url) else self.url})"


def follow(
    url: str | os.PathLike[str],
    *,
    after: int | None = None,
    group: Group = None,
    timeout: float | None = None,
    look_seconds: float = 5.0,
    share: bool = False,
    storage_options: Options = None,
) -> Iterator[LiveVersion]:
    """Yields the newest version of a live state, then, each time, whichever is newest.

    Of a run (the folder of a `Checkpointer`) these are the checkpoints, in the order in which they
    were committed; of a folder that `ckpt.publish(through=)` writes, the versions. The folder may
    come later. All ranks of `group` call this and iterate alike (one process needs no group); all
    get the same versions. Those of a live state rise. Versions that were replaced between two steps
    of the loop are left out. Communicates.

        for version in ckpt.follow(url):
            ckpt.load(version.url, model)

    Args:
        url: `live://host:port/name?token=...`, without a version; or the folder of a run, or of
            `ckpt.publish(through=)`.
        after: yields only versions above this number; of a run, only checkpoints that are newer
            than that of this step, or all if it has none. None takes any.
        timeout: the longest wait for a newer version, in seconds; None waits without an end. A
            server that has not begun, or has ended, is an UnreachableError at once.
        look_seconds: the pause between two looks at a folder.
        share: loads from this live state keep the bytes that they read from other hosts in memory,
            and give them to other readers that share, as long as the iterator lives: N readers take
            hardly more than one model from the publisher. Listens at the address of this host that
            reaches the publisher.
        storage_options: as for `ckpt.load`; of a live state `token`, `timeout` and `certificate`.

    Raises:
        ArgumentError: an argument has another value.
        WaitTimeoutError: no newer version has come in time.
        NotACheckpointError: nothing of this name is published there, or not any more.
        UnreachableError, StoreTimeoutError: the server has ended, or says nothing.
        AccessDeniedError: the token is wrong, or the folder may not be read.
        RankError: another rank failed.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ckpt.Checkpointer(folder, every_steps=1) as run:
    ...         versions = ckpt.follow(folder, timeout=60, look_seconds=0.1)
    ...         for step in (1, 2):
    ...             _ = run.save(step, {"w": torch.ones(2)})
    ...             run.wait_until_finished()
    ...             print(next(versions).number)
    1
    2
    """
    place = os.fspath(url)
    if is_live(place) and parse(place).version is not None:
        raise ArgumentError(
            f"{parse(place).shown}: give ckpt.follow the address without a version, and the "
            "version as after="
        )
    if after is not None and (not isinstance(after, int) or after < -1):
        raise ArgumentError(f"after is {after!r}; give the number of a version, or None")
    for name, seconds in (("timeout", timeout), ("look_seconds", look_seconds)):
        is_number = isinstance(seconds, int | float)
        if seconds is not None and not (is_number and 0 <= seconds < float("inf")):
            raise ArgumentError(f"{name} is {seconds!r}; give seconds from 0 on, or None")
    if not isinstance(share, bool) or (share and not is_live(place)):
        raise ArgumentError(
            f"share is {share!r} for {parse(place).shown if is_live(place) else place}; give True "
            "for the address of a live state, or False"
        )
    return _versions(place, after, group, timeout, look_seconds, share, storage_options)


class _Seen(NamedTuple):
    """A version that was found."""

    number: int
    url: str
    order: tuple[int, int] | None = None
    """The order of a checkpoint in its run."""

    def is_before(self, step: RunStep) -> bool:
        """Whether a checkpoint of the same run is newer."""
        if self.order is None or step.order is None:
            return step.step != self.number
        return step.order > self.order


_Look = Callable[[_Seen | None, float], _Seen | None]
"""Returns the newest version if it is newer than the one before, perhaps after so many seconds."""


def _versions(
    url: str,
    after: int | None,
    group: Group,
    timeout: float | None,
    look_seconds: float,
    share: bool,
    options: Options,
) -> Iterator[LiveVersion]:
    ranks = Ranks(group)
    with ExitStack() as stack:
        store = stack.enter_context(LiveStore(url, options or {})) if is_live(url) else None
        if share:
            stack.enter_context(sharing(url, options or {}))
        kept = keep(url)  # noqa: F841 - while this runs
        if store is None:
            look = _looks_at_folder(url, look_seconds, options)
        else:
            look = _looks_at(store, parse(url))
        seen = None if after is None else _Seen(after, "")
        while True:
            seen = _newer(ranks, url, look, seen, timeout)
            yield LiveVersion(seen.number, seen.url)


def _newer(ranks: Ranks, url: str, look: _Look, seen: _Seen | None, timeout: float | None) -> _Seen:
    """Returns the version after `seen`. All ranks call this; communicates."""
    ends = None if timeout is None else monotonic() + timeout

    def find() -> _Seen | None:
        left = ROUND_SECONDS if ends is None else max(0.0, ends - monotonic())
        newer = look(seen, min(ROUND_SECONDS, left))
        if newer is None and ends is not None and monotonic() >= ends:
            shown = parse(url).shown if is_live(url) else url
            last = "no version" if seen is None else f"no version after {seen.number}"
            raise WaitTimeoutError(f"{shown}: {last} was published within the timeout")
        return newer

    with ranks.call("ckpt.follow"):
        while True:
            newer, error = result_or_error(find) if ranks.rank == 0 else (None, None)
            newest = ranks.agree(
                "waiting for a newer version",
                error,
                number=0 if newer is None else newer.number + 1,
                note=b"" if newer is None else newer.url.encode(),
            )
            if newest.number:
                return newer or _Seen(newest.number - 1, newest.note.decode())


def _looks_at(store: LiveStore, address: LiveUrl) -> _Look:
    """The looks at a live state: the server waits."""

    def look(seen: _Seen | None, seconds: float) -> _Seen | None:
        after = -1 if seen is None else seen.number
        newest = max(store.news(after, seconds), default=-1)
        return _Seen(newest, str(address.at(newest))) if newest > after else None

    return look


def _looks_at_folder(url: str, pause: float, options: Options) -> _Look:
    """The looks at a folder of versions or of a run, with a pause before each but the first."""
    due, is_first, is_run = monotonic(), True, False

    def look(seen: _Seen | None, seconds: float) -> _Seen | None:
        nonlocal due, is_first, is_run
        if is_first:
            is_first = False
            with open_store(url, options) as store:
                if store.exists(MANIFEST):
                    raise ArgumentError(
                        f"{url} is a checkpoint: give ckpt.follow the folder of the run"
                    )
        if due - monotonic() > seconds:
            sleep(seconds)
            return None
        sleep(max(0.0, due - monotonic()))
        due = monotonic() + pause
        if not is_run:
            with open_store(url, options) as store:
                folders = store.folders()
                if version_numbers(folders):
                    after = -1 if seen is None else seen.number
                    found = newest_version(url, store, folders, after)
                    return None if found is None else _Seen(*found)
        for step in list_steps(url, options).steps:
            if seen is not None and not seen.is_before(step):
                return None
            is_run = True
            if step.is_sound:
                return _Seen(step.step, join_url(url, step.name), step.order)
        return None

    return look
