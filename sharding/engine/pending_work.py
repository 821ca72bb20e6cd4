"""Messages on their way: nothing that gloo may still write to or read from goes before it has.

gloo's thread copies between a connection and the bare address that a message was posted with. A
message that nobody waits for any more, since another of the same exchange failed or the wait was
interrupted, stays posted: what comes for it is taken in, and does not stop what comes behind it.

Rules:

1. What is posted and not awaited is kept until the process group is gone, whoever lets go of it.
2. Storages are emptied and filled by who owns them, not by references: an owner does neither to
   one that a message was posted with until `wait` has returned.
3. An interrupt (KeyboardInterrupt) comes before a wait or after it, not in the middle: what gloo
   was asked for once, it has forgotten. `wait` may be called again then.
"""

from __future__ import annotations

from datetime import timedelta
from operator import methodcaller
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup, Work

Message = tuple[Work, torch.Tensor]

_kept: WeakKeyDictionary[ProcessGroup, list[Message]] = WeakKeyDictionary()


class PendingWork:
    """Messages of one group, awaited together."""

    __slots__ = ("_arrived", "_kept", "_messages")

    def __init__(self, group: ProcessGroup | None) -> None:
        self._messages: list[Message] = []
        self._arrived: list[object] = []
        """As many as have been awaited."""
        self._kept = [] if group is None else _kept.setdefault(group, [])

    def add(self, work: Work, tensor: torch.Tensor) -> None:
        """A message and its memory."""
        self._messages.append((work, tensor))

    @property
    def arrived(self) -> int:
        """How many, in the order they were added, are known to have arrived or to be sent."""
        return len(self._arrived)

    def wait(self, seconds: float | None = None) -> None:
        """All have arrived, or are sent, each within so many seconds; the group's by default.

        Raises the error of the first that has not: the one behind those that `arrived`.
        """
        awaited = methodcaller("wait", *([] if seconds is None else [timedelta(seconds=seconds)]))
        works = [work for work, _ in self._messages[self.arrived :]]
        self._arrived.extend(map(awaited, works))  # one step of the interpreter: rule 3

    def __del__(self) -> None:
        self._kept.extend(self._messages[self.arrived :])
