"""The common part of both ends of a channel with connections."""

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
"""The names of the errors of ranks that cannot send their own."""


class ConnectedChannel(Channel):
    """A channel with connections, which end with the channel and which no forked child uses."""

    def __init__(self, rendezvous: Rendezvous, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._rendezvous = rendezvous
        self._is_closed = False
        _open_channels.add(self)

    def __del__(self) -> None:
        with suppress(AttributeError):  # an interrupt came during the constructor
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
        """Connects, or gets ready for connections; returns the failure, if any."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections."""

    def forget(self) -> None:
        """Closes the connections in a forked child: they belong to the parent."""
        self.close()


def ended(stage: str, rank: int) -> Failure:
    """Returns the failure of a rank whose process has ended."""
    return Failure(stage, rank, ENDED, "its process has ended, or has left the process group")


def late(stage: str, missing: Sequence[int], seconds: float) -> Failure:
    """Returns the failure of ranks that have not come in time, told as that of the first one."""
    others = f", nor have ranks {list(missing[1:9])}" if missing[1:] else ""
    said = f"it has not come within {seconds:g} s{others}"
    return Failure(stage, missing[0], LATE, said)


_open_channels: WeakSet[ConnectedChannel] = WeakSet()


def _forget_in_child() -> None:
    # If a child kept a connection open, the other ranks would not notice the end of its parent.
    for channel in tuple(_open_channels):
        channel.forget()


os.register_at_fork(after_in_child=_forget_in_child)
