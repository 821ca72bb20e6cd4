"""The ranks that share and those that replicate, for every strategy and form of groups."""

from __future__ import annotations

import os
import warnings
from socket import gethostname

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sharding.describe.dtensor import check_gathers, hybrid_grid
from sharding.engine.shard_group import HybridGroups, ShardGroup
from sharding.errors import ArgumentError
from sharding.group_references import release_with_groups
from sharding.policies import ShardingStrategy

HYBRID = {ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2}
KEEPS_AFTER_FORWARD = {ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2}

Groups = ProcessGroup | tuple[ProcessGroup, ProcessGroup | None]
"""One group; or, for hybrid strategies, the ranks to shard over and those to replicate over."""


def chosen_groups(
    strategy: ShardingStrategy, given: Groups | None, mesh: DeviceMesh | None, has_policy: bool
) -> Groups:
    """Returns the groups that a user names or implies. All ranks call this; it may make groups.

    Raises ArgumentError if a hybrid strategy has no groups and no policy, since every instance
    would make its own, or if group and mesh contradict the strategy.
    """
    if given is not None and mesh is not None:
        raise ArgumentError("Cannot pass both process_group and device_mesh at the same time.")
    hybrid = strategy in HYBRID
    if mesh is not None:
        release_with_groups(mesh)
        if mesh.ndim != 1 + hybrid:
            raise ArgumentError(
                f"{strategy} takes a device_mesh of {1 + hybrid} dimensions, not of {mesh.ndim}"
            )
        check_gathers(mesh, range(mesh.ndim)[::-1])
        return (mesh.get_group(1), mesh.get_group(0)) if hybrid else mesh.get_group(0)
    if given is not None:
        if hybrid != isinstance(given, tuple):
            raise ArgumentError(
                f"Expected process_group to be passed in as a {'tuple' if hybrid else 'group'} for "
                f"{strategy}, but got {type(given)}"
            )
        return given
    if not hybrid:
        return _world()
    if not has_policy:
        raise ArgumentError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or "
            "device_mesh."
        )
    return _by_node()


def hybrid_groups_of(
    strategy: ShardingStrategy, groups: Groups, mesh: DeviceMesh | None = None
) -> HybridGroups:
    """Returns the groups of ranks that share and that replicate; `mesh` is the one they are of."""
    if isinstance(groups, tuple):
        to_shard, to_replicate = groups
        replicas = ShardGroup.alone() if to_replicate is None else ShardGroup.of(to_replicate)
        grid = None if mesh is None else hybrid_grid(mesh)
        return HybridGroups(ShardGroup.of(to_shard), replicas, grid)
    if strategy is ShardingStrategy.NO_SHARD:
        return HybridGroups(ShardGroup.alone(), ShardGroup.of(groups))
    return HybridGroups(ShardGroup.of(groups), ShardGroup.alone())


def settled_strategy(strategy: ShardingStrategy | None, groups: Groups) -> ShardingStrategy:
    """Returns the strategy; over one rank NO_SHARD, with a UserWarning if that is a change."""
    asked = strategy or ShardingStrategy.FULL_SHARD
    if isinstance(groups, tuple) or dist.get_world_size(groups) > 1:
        return asked
    if asked is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {asked} since the world size is 1.",
            stacklevel=4,
        )
    return ShardingStrategy.NO_SHARD


def _by_node() -> Groups:
    """Returns the ranks of a node, which share, and those at one place in all nodes: replicas.

    A node has LOCAL_WORLD_SIZE ranks, which torchrun sets; without it, the ranks of one host name.
    """
    size = dist.get_world_size()
    said = os.environ.get("LOCAL_WORLD_SIZE")
    if said is not None and said.isdigit() and 0 < int(said) <= size:
        node = int(said)
    else:
        hosts: list[str] = [""] * size
        dist.all_gather_object(hosts, gethostname())
        node = hosts.count(hosts[0])
        if any(hosts[r] != hosts[r // node * node] for r in range(size)):
            node = 0
    if node == 0 or size % node:
        raise ArgumentError(
            f"the {size} ranks are not spread evenly over nodes, one after the other; pass "
            "process_group=(to shard over, to replicate over) or a device_mesh"
        )
    if node == size:
        return _world(), None
    mine: tuple[ProcessGroup, ProcessGroup | None] = (_world(), None)
    rank = dist.get_rank()
    for first in range(0, size, node):
        group = dist.new_group(list(range(first, first + node)))
        if first <= rank < first + node and group is not None:
            mine = group, mine[1]
    for place in range(node):
        group = dist.new_group(list(range(place, size, node)))
        if rank % node == place and group is not None:
            mine = mine[0], group
    return mine


def _world() -> ProcessGroup:
    group: ProcessGroup | None = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise ArgumentError(
            "there is no default process group; call torch.distributed.init_process_group first, "
            "or pass process_group"
        )
    return group
