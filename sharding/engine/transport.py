"""How tensors get from rank to rank: one interface, two ways, chosen by the group's back end.

The environment variable SHARDING_TRANSPORT, read where a unit is first gathered, chooses by hand:
`collectives` for gloo's own, to compare with, or where many ranks share a network that point-to-
point messages overload; `p2p`, the default with gloo. It must be the same on all ranks. Some
ranks of a gloo group (`reshard_after_forward=2`) always use messages: collectives would need a
group of their own, which torch makes reliably only where all ranks of the default group take part.

All ranks of the shard group call every method, in the same order, with the same sizes and the
same composition, which says what the call carries. Messages of unlike compositions never meet;
collectives take part in whatever others call, and find a difference afterwards.
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


class PendingAllGather(Protocol):
    """A gather on its way."""

    def wait(self) -> None:
        """What was gathered is in its places. Called once."""
        ...


class PendingReduceScatter(Protocol):
    """A sum on its way."""

    def wait(self) -> list[torch.Tensor]:
        """This rank's sums. Called once."""
        ...


class Transport(Protocol):
    """Between the ranks of `shard_group`. Tensors are contiguous and of one dimension and dtype."""

    shard_group: ShardGroup

    def all_gather(
        self,
        mine: Sequence[torch.Tensor],
        places: Sequence[Sequence[torch.Tensor]],
        composition: Composition,
    ) -> PendingAllGather:
        """Start to fill `places[r]` with what rank r has as `mine`, this rank's own included."""
        ...

    def reduce_scatter(
        self, parts: Sequence[Sequence[torch.Tensor]], composition: Composition
    ) -> PendingReduceScatter:
        """Start to sum, on every rank r, what all ranks have as `parts[r]`."""
        ...

    def all_reduce(self, flat: torch.Tensor, composition: Composition) -> None:
        """`flat` is the sum over ranks, on all of them the same."""
        ...


def transport_between(shard_group: ShardGroup, device: torch.device) -> Transport:
    """The fastest way between these ranks for tensors on this device, unless another is asked for.

    Raises ValueError where the way asked for does not exist.
    """
    asked = os.environ.get("SHARDING_TRANSPORT", "")
    if asked not in ("", "p2p", "collectives"):
        raise ValueError(
            f"SHARDING_TRANSPORT={asked!r}: there are 'p2p' and 'collectives'; unset it for "
            "the faster of them"
        )
    if shard_group.group is None:
        return P2PTransport(shard_group)
    by_message = "gloo" in str(dist.get_backend(shard_group.group)) and device.type == "cpu"
    if asked == "p2p" and not by_message:
        raise ValueError(
            f"SHARDING_TRANSPORT='p2p' needs gloo and tensors in host memory, not "
            f"{dist.get_backend(shard_group.group)} and {device}; unset it"
        )
    is_part = shard_group.size < dist.get_world_size(shard_group.group)
    if by_message and (is_part or asked != "collectives"):
        return P2PTransport(shard_group)
    return CollectiveTransport(shard_group)
