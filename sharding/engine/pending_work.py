"""Messages in flight: memory that gloo may still read or write outlives the messages.

gloo's thread copies between a connection and the address that a message was posted with. A message
without a waiter stays posted, after an interrupt or the failure of another message of
its exchange. Gloo still receives its data, which does not stop the messages behind it.

Rules:

1. A message that is posted and not awaited stays referenced until its process group is gone.
2. The owner of a storage empties and fills it; references do not keep it filled. An owner does
   neither to the storage of a posted message until `wait` has returned.
3. An interrupt (KeyboardInterrupt) comes before a wait or after it, never in the middle: gloo
   forgets a request once it is asked for. `wait` may be called again after an interrupt.
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
        """One item for each message that was awaited."""
        self._kept = [] if group is None else _kept.setdefault(group, [])

    def add(self, work: Work, tensor: torch.Tensor) -> None:
        """A message and its memory."""
        self._messages.append((work, tensor))

    @property
    def arrived(self) -> int:
        """The number of messages, in the order of `add`, that have surely arrived or been sent."""
        return len(self._arrived)

    def wait(self, seconds: float | None = None) -> None:
        """Waits until all have arrived or are sent: `seconds` each, or the group's time-out.

        Raises the RuntimeError of the first message that has not: the one at index `arrived`.
        """
        awaited = methodcaller("wait", *([] if seconds is None else [timedelta(seconds=seconds)]))
        works = [work for work, _ in self._messages[self.arrived :]]
        self._arrived.extend(map(awaited, works))  # one step of the interpreter: rule 3

    def __del__(self) -> None:
        self._kept.extend(self._messages[self.arrived :])
