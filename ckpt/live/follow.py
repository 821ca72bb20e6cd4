"""Waits for newer versions of a live state, on all ranks alike.

Rank 0 asks the server, which answers once there is a newer version. All ranks meet at least every
`ROUND_SECONDS`, so that the end of a rank is noticed while nothing is published.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from ckpt.errors import WaitTimeoutError
from ckpt.live.store import LiveStore
from ckpt.stores.addresses import LiveUrl, parse
from ckpt.stores.store import Options
from sharding.agreement.ranks import Ranks, result_or_error
from sharding.errors import ArgumentError

if TYPE_CHECKING:
    from sharding.agreement.ranks import Group

__all__ = ["LiveVersion", "follow"]

ROUND_SECONDS = 5.0
"""The longest wait of one request."""


@dataclass(frozen=True, slots=True)
class LiveVersion:
    """A version of a live state."""

    number: int
    url: str
    """Its address, with the token: `ckpt.load` takes it."""

    def __repr__(self) -> str:
        return f"LiveVersion({parse(self.url).shown})"


def follow(
    url: str,
    *,
    after: int | None = None,
    group: Group = None,
    timeout: float | None = None,
    storage_options: Options = None,
) -> Iterator[LiveVersion]:
    """Yields the newest version of a live state, then, each time, whichever is newest.

    All ranks of `group` call this and iterate alike (one process needs no group); all get the same
    versions, which rise. Versions that were replaced between two steps are left out. Communicates.

        for version in ckpt.follow(url):
            ckpt.load(url, model)  # this version, or a newer one

    Args:
        url: `live://host:port/name?token=...`, without a version.
        after: yields only versions above this number; None takes any.
        timeout: the longest wait for a newer version, in seconds; None waits without an end. A
            server that has not begun, or has ended, is an UnreachableError at once.
        storage_options: `token`, `timeout` and `certificate`, as in docs/live.md.

    Raises:
        ArgumentError: an argument has another value.
        WaitTimeoutError: no newer version has come in time.
        NotACheckpointError: nothing of this name is published there, or not any more.
        UnreachableError, StoreTimeoutError: the server has ended, or says nothing.
        AccessDeniedError: the token is wrong.
        RankError: another rank failed.
    """
    address = parse(url)
    if address.version is not None:
        raise ArgumentError(
            f"{address.shown}: give ckpt.follow the address without a version, and the version as "
            "after="
        )
    if after is not None and (not isinstance(after, int) or after < -1):
        raise ArgumentError(f"after is {after!r}; give the number of a version, or None")
    is_number = isinstance(timeout, int | float)
    if timeout is not None and not (is_number and 0 <= timeout < float("inf")):
        raise ArgumentError(f"timeout is {timeout!r}; give seconds from 0 on, or None")
    return _versions(address, -1 if after is None else after, group, timeout, storage_options)


def _versions(
    address: LiveUrl, after: int, group: Group, timeout: float | None, options: Options
) -> Iterator[LiveVersion]:
    ranks = Ranks(group)
    with LiveStore(str(address), options or {}) as store:
        while True:
            after = _newer(ranks, store, after, timeout)
            yield LiveVersion(after, str(address.at(after)))


def _newer(ranks: Ranks, store: LiveStore, after: int, timeout: float | None) -> int:
    """Returns the newest version above `after`. All ranks call this; communicates."""
    ends = None if timeout is None else monotonic() + timeout
    with ranks.call("ckpt.follow"):
        while True:
            newest, error = result_or_error(lambda: _look(ranks, store, after, ends))
            told = ranks.agree("waiting for a newer version", error, number=newest or 0)
            if told.number:
                return told.number - 1


def _look(ranks: Ranks, store: LiveStore, after: int, ends: float | None) -> int:
    """Returns the newest version plus one, 0 if none is above `after`; 0 on ranks other than 0."""
    if ranks.rank:
        return 0
    left = ROUND_SECONDS if ends is None else max(0.0, ends - monotonic())
    newest = store.news(after, min(ROUND_SECONDS, left)).newest
    if newest is not None and newest > after:
        return newest + 1
    if left <= ROUND_SECONDS and ends is not None and monotonic() >= ends:
        raise WaitTimeoutError(
            f"{store.url}: no version above {after} was published within the timeout"
        )
    return 0
