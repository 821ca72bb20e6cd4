"""The process groups of a unit: the ranks that share its shards, and those that replicate them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401 - see [Note: defaults of torch's functions]
from torch.distributed import ProcessGroup

from sharding.errors import ArgumentError
from sharding.group_references import GroupReference, referred
from sharding.layout import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

_numbers: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""The counter of parameter groups of a process group: all members count alike."""


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """A part of the ranks of a process group, or all, and this process' place among them."""

    reference: GroupReference | None
    """The reference to the group; None: this process alone."""
    members: tuple[int, ...]
    """The ranks of the members in the group."""
    rank: int
    """This process' index in `members`."""

    @classmethod
    def of(cls, group: ProcessGroup) -> ShardGroup:
        """Returns all ranks of a group."""
        return cls(ref(group), tuple(range(dist.get_world_size(group))), dist.get_rank(group))

    @classmethod
    def alone(cls) -> ShardGroup:
        """Returns this process alone: no tensor is divided."""
        return cls(None, (0,), 0)

    @property
    def group(self) -> ProcessGroup | None:
        """The group; None: this process alone. Raises DestroyedGroupError."""
        return None if self.reference is None else referred(self.reference)

    @property
    def ranks(self) -> list[int]:
        """The ranks in the default group."""
        if self.group is None:
            return [dist.get_rank()]
        ranks = dist.get_process_group_ranks(self.group)
        return [ranks[member] for member in self.members]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    @property
    def others(self) -> list[int]:
        """The other indices, from the next one on, so that ranks begin with different ones."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def part(self, size: int) -> ShardGroup:
        """Returns the run of `size` consecutive ranks that contains this process."""
        first = self.rank // size * size
        return ShardGroup(self.reference, self.members[first : first + size], self.rank - first)


@dataclass(frozen=True, slots=True)
class HybridGroups:
    """The ranks over which a unit is sharded, and those over which it is replicated."""

    shard: ShardGroup
    replicate: ShardGroup
    """The ranks that hold the same shard."""
    grid: Mesh | None = None
    """All ranks, if a mesh was given: the replicas along its first axis, shards along its last."""

    @property
    def size(self) -> int:
        """The number of ranks whose gradients are summed."""
        return self.shard.size * self.replicate.size

    @property
    def group(self) -> ProcessGroup:
        """The process group that numbers the unit's parameter groups."""
        group = self.shard.group or self.replicate.group
        if group is None:
            raise ArgumentError("a unit must be shared over at least one process group")
        return group

    def next_number(self) -> int:
        """Returns the number of a new parameter group, the same on all ranks of the group."""
        return next(_numbers.setdefault(self.group, count()))
