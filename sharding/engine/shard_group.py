"""Which ranks share the shards of a unit, and which hold copies of the same shard."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401 - see [Note: defaults of torch's functions]
from torch.distributed import ProcessGroup

from sharding.group_references import GroupReference, referred

if TYPE_CHECKING:
    from collections.abc import Iterator

_numbers: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""By group: its members count alike, whatever else each of them shards with others."""


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """The ranks of a group, or some of them, and which of them this process is."""

    reference: GroupReference | None
    """To the group; None: this process alone."""
    members: tuple[int, ...]
    """Ranks in the group."""
    rank: int
    """This process' index in `members`."""

    @classmethod
    def of(cls, group: ProcessGroup) -> ShardGroup:
        """All ranks of a group."""
        return cls(ref(group), tuple(range(dist.get_world_size(group))), dist.get_rank(group))

    @classmethod
    def alone(cls) -> ShardGroup:
        """This process and no other: nothing is divided."""
        return cls(None, (0,), 0)

    @property
    def group(self) -> ProcessGroup | None:
        """The group; None: this process alone. Raises DestroyedGroupError."""
        return None if self.reference is None else referred(self.reference)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.members)

    @property
    def others(self) -> list[int]:
        """The other indices, beginning behind this one so that not all turn to one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def part(self, size: int) -> ShardGroup:
        """Those of the same run of `size` as this process: all are divided into such runs."""
        first = self.rank // size * size
        return ShardGroup(self.reference, self.members[first : first + size], self.rank - first)


@dataclass(frozen=True, slots=True)
class HybridGroups:
    """Over which ranks a unit is sharded, and over which it is replicated besides."""

    shard: ShardGroup
    replicate: ShardGroup
    """The ranks that hold the same shard."""

    @property
    def size(self) -> int:
        """Ranks whose gradients are summed."""
        return self.shard.size * self.replicate.size

    @property
    def group(self) -> ProcessGroup:
        """The group that names the unit's messages."""
        group = self.shard.group or self.replicate.group
        if group is None:
            raise ValueError("a unit must be shared over at least one process group")
        return group

    def next_number(self) -> int:
        """The number of a new parameter group, the same on all ranks of the group."""
        return next(_numbers.setdefault(self.group, count()))
