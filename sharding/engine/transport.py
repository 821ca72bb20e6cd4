"""Transports move tensors between ranks: two of them behind one protocol, chosen by the backend.

The environment variable SHARDING_TRANSPORT overrides the choice: `p2p`, the default with gloo; or
`collectives`, gloo's own, for comparisons, or for a network that point-to-point messages overload.
A unit reads the variable at its first all-gather; it must be equal on all ranks. A part of the
ranks of a gloo group (`reshard_after_forward=2`) always uses `p2p`: collectives would need a
process group, and torch makes one reliably only if all ranks of the default group take part.

All ranks of the shard group call every method, in the same order, with the same sizes and the same
composition. Point-to-point messages of different compositions never meet. A collective meets any
collective of the other ranks, and detects a difference afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from sharding.engine.collectives import CollectiveTransport
from sharding.engine.composition import Composition
from sharding.engine.p2p import P2PTransport
from sharding.engine.shard_group import ShardGroup
from sharding.errors import ArgumentError


class PendingAllGather(Protocol):
    """An all-gather in flight."""

    def wait(self) -> None:
        """Waits until the places are filled. Called once."""
        ...


class NoGather:
    """The all-gather of a group that is not divided."""

    def wait(self) -> None:
        """Returns at once: the parameters are in place."""


class PendingReduceScatter(Protocol):
    """A reduce-scatter in flight."""

    def wait(self) -> list[torch.Tensor]:
        """Returns this rank's sums, flat. Waits. Called once."""
        ...


class Transport(Protocol):
    """A transport between ranks. Tensors are contiguous, one-dimensional and of one dtype."""

    shard_group: ShardGroup

    def all_gather(
        self,
        mine: Sequence[torch.Tensor],
        places: Sequence[Sequence[torch.Tensor]],
        composition: Composition,
    ) -> PendingAllGather:
        """Starts to fill `places[r]` with the `mine` of rank r, on all ranks."""
        ...

    def reduce_scatter(
        self, parts: Sequence[Sequence[torch.Tensor]], composition: Composition
    ) -> PendingReduceScatter:
        """Starts to sum, for each rank r, the `parts[r]` of all ranks."""
        ...

    def all_reduce(self, flat: torch.Tensor, composition: Composition) -> None:
        """Sums `flat` over all ranks, in place. Waits."""
        ...


def transport_between(shard_group: ShardGroup, device: torch.device) -> Transport:
    """Returns the fastest transport of these ranks for this device, or the chosen one.

    Raises ArgumentError if the chosen one does not exist, or cannot be used here.
    """
    asked = os.environ.get("SHARDING_TRANSPORT", "")
    if asked not in ("", "p2p", "collectives"):
        raise ArgumentError(
            f"SHARDING_TRANSPORT={asked!r}: there are 'p2p' and 'collectives'; unset it for "
            "the faster of them"
        )
    if shard_group.group is None:
        return P2PTransport(shard_group)
    by_message = "gloo" in str(dist.get_backend(shard_group.group)) and device.type == "cpu"
    if asked == "p2p" and not by_message:
        raise ArgumentError(
            f"SHARDING_TRANSPORT='p2p' needs gloo and tensors in host memory, not "
            f"{dist.get_backend(shard_group.group)} and {device}; unset it"
        )
    is_part = shard_group.size < dist.get_world_size(shard_group.group)
    if by_message and (is_part or asked != "collectives"):
        return P2PTransport(shard_group)
    return CollectiveTransport(shard_group)
