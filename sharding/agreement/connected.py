"""Channels with connections: what both ends have in common."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakSet

from sharding.agreement.channel import Call, Channel
from sharding.agreement.links import Failure
from sharding.agreement.rendezvous import Rendezvous

ENDED, LATE = "ProcessEnded", "TimeoutError"
"""Errors of ranks that could not say them themselves."""


class ConnectedChannel(Channel):
    """A channel with connections, which end with it and are not a forked child's."""

    def __init__(self, rendezvous: Rendezvous, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._rendezvous = rendezvous
        self._is_closed = False
        _open_channels.add(self)

    def __del__(self) -> None:
        with suppress(AttributeError):  # an interrupt came while it was made
            self.close()

    def _open(self, call: Call) -> Failure | None:
        if self._is_closed:
            said = (
                f"this process has none of the connections of rank {self.rank}: it was forked from "
                "it, or the process group has ended; save and load in the rank itself"
            )
            return Failure(call.stage, self.rank, "RuntimeError", said)
        return self._connected(call)

    @abstractmethod
    def _connected(self, call: Call) -> Failure | None:
        """Have what it takes to reach the others, or say why not."""

    @abstractmethod
    def close(self) -> None:
        """Nobody is reached any more."""

    def forget(self) -> None:
        """In a forked child: the connections are the parent's."""
        self.close()


def ended(stage: str, rank: int) -> Failure:
    """What a rank failed with that is not there any more."""
    return Failure(stage, rank, ENDED, "its process has ended, or has left the process group")


def late(stage: str, missing: Sequence[int], seconds: float) -> Failure:
    """What ranks failed with that were waited for in vain; the first of them is named for it."""
    others = f", nor have ranks {list(missing[1:9])}" if missing[1:] else ""
    said = f"it has not come within {seconds:g} s{others}"
    return Failure(stage, missing[0], LATE, said)


_open_channels: WeakSet[ConnectedChannel] = WeakSet()


def _forget_in_child() -> None:
    # A child that held a connection open would hide its parent's end from the others.
    for channel in tuple(_open_channels):
        channel.forget()


os.register_at_fork(after_in_child=_forget_in_child)
