"""Agreement by collectives, for process groups without a store: those of MPI.

Without a store, the rules of `sharding.agreement.channel` do not hold: the others wait for a
missing rank until the time-out of the process group, and do not hear of a rank that leaves a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

import torch.distributed as dist

from sharding.agreement.channel import Call, Channel, Join
from sharding.agreement.links import Failure, Message
from sharding.group_references import referred

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CollectiveChannel(Channel):
    """A channel in which all ranks get all records, and each makes the same answer from them."""

    from_any_thread = False

    def __init__(self, group: ProcessGroup | None, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._group = None if group is None else ref(group)

    def _open(self, call: Call) -> Failure | None:
        return None

    def _leave(self, call: Call, failure: Failure) -> None:
        pass

    def _meet(self, call: Call, mine: Message, join: Join) -> bytes | Failure:
        everyone: list[tuple[Failure | None, bytes]] = [(None, b"")] * self.world_size
        group = None if self._group is None else referred(self._group)
        dist.all_gather_object(everyone, (mine.failure, mine.data), group=group)
        failures = [failure for failure, _ in everyone if failure is not None]
        return failures[0] if failures else join([data for _, data in everyone])
