"""Plans the files of N ranks for a kind of state dict, in one process.

The kind defines a rank's part of each tensor:

    full      the whole tensor, on every rank
    sharded   the rows of `torch.chunk`
    local     a run of `ceil(numel / N)` row-major elements

Every rank has the whole of a tensor without dimensions, in all kinds.

Rules:

1. The plan for a kind equals the plan of N processes that save such a state
   (`ckpt.plan.save_plan`): replicated elements are stored once, divided among the ranks.
2. In every layout of this module a rank stores one run of a tensor's row-major elements. A rank's
   file can therefore be streamed from any source.
3. These functions are pure. Most tensors of a model share few layouts, so results are cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ckpt.plan.save_plan import stored_layouts
from formats.limits import RANKS
from formats.native.manifest import StoredTensor
from formats.outgoing import OutgoingTensor
from sharding.errors import ArgumentError
from sharding.kind import Kind
from sharding.layout import Box, FlatShard, Layout, Mesh, Piece, Placement, Replicate, Shard

WORLD = "world"
"""A save's name for the one mesh axis over all ranks of plain tensors and flat parts."""
ROWS = "dim_0"
"""Torch's name for the one axis of a mesh without names."""


@dataclass(frozen=True, slots=True)
class Division:
    """The division of tensors into the files of ranks."""

    stored: Mapping[str, StoredTensor]
    """By name, in the state's order."""
    parts: Mapping[int, Sequence[str]]
    """Rank -> the names in its file, in the state's order; ranks ascend."""
    world_size: int


def of_kind(tensors: Iterable[OutgoingTensor], kind: Kind, world_size: int) -> Division:
    """Returns the files of `world_size` ranks with a state dict of this kind (rule 1)."""
    held = {
        tensor.name: StoredTensor(
            tensor.shape, tensor.dtype, layout_of(kind, tensor.shape, world_size)
        )
        for tensor in tensors
    }
    stored = stored_layouts(held)
    parts: dict[int, list[str]] = {}
    for name, tensor in stored.items():
        for rank in tensor.layout.holders(Box.whole(tensor.shape)):
            parts.setdefault(rank, []).append(name)
    return Division(stored, {rank: parts[rank] for rank in sorted(parts)}, world_size)


def by_size(tensors: Iterable[OutgoingTensor], max_bytes: int) -> Division:
    """Returns files of whole tensors in order, as many in a file as fit; a larger one is alone."""
    stored: dict[str, StoredTensor] = {}
    parts: dict[int, list[str]] = {}
    rank, nbytes = 0, 0
    for tensor in tensors:
        if rank in parts and nbytes + tensor.nbytes > max_bytes:
            rank, nbytes = rank + 1, 0
        parts.setdefault(rank, []).append(tensor.name)
        nbytes += tensor.nbytes
        layout = Layout.single(tensor.shape, rank)
        stored[tensor.name] = StoredTensor(tensor.shape, tensor.dtype, layout)
    return Division(stored, parts, 1)


@lru_cache(1024)
def layout_of(kind: Kind, shape: tuple[int, ...], world_size: int) -> Layout:
    """Returns the layout of a tensor of this shape in a state dict of this kind.

    >>> [str(layout_of(kind, (5, 4), 3)) for kind in Kind]
    ['world:3=R', 'dim_0:3=S(0)', 'world:3=F(0,7)']
    """
    axis = WORLD
    placement: Placement = Replicate()
    if shape and kind is Kind.SHARDED:
        axis, placement = ROWS, Shard(0)
    elif shape and kind is Kind.LOCAL:
        placement = FlatShard(0, max(1, -(-prod(shape) // world_size)))
    return Layout(shape, Mesh.grid((axis,), (world_size,)), (placement,))


@dataclass(frozen=True, slots=True)
class Run:
    """A rank's stored part of a tensor: row-major elements `[lo, hi)` with their shape."""

    lo: int
    hi: int
    shape: tuple[int, ...]
    """The shape of the local array if the run covers it; otherwise one-dimensional."""


@lru_cache(1024)
def run_of(layout: Layout, rank: int) -> Run:
    """Returns the rank's local storage as a run of the whole tensor (rule 2).

    Raises ArgumentError for a layout with several runs for one rank.

    >>> run_of(layout_of(Kind.SHARDED, (5, 4), 3), 1)
    Run(lo=8, hi=16, shape=(2, 4))
    """
    whole = Piece.packed(Box.whole(layout.shape))
    lo = hi = 0
    for index, piece in enumerate(layout.pieces(rank)):
        part = whole.part(piece.box)
        if index == 0:
            lo = hi = part.at
        if part.at != hi or not part.is_packed:
            raise ArgumentError(f"{layout}: the elements of rank {rank} are not one run")
        hi += part.box.numel
    local = layout.local_shape(rank)
    return Run(lo, hi, local if hi - lo == prod(local) else (hi - lo,))


def checked_kind(kind: str | None, world_size: int | None) -> tuple[Kind | None, int | None]:
    """Returns the kind and the number of ranks that the caller gave: both, or neither.

    `full` without a number means one rank.

    Raises:
        ArgumentError: the kind is unknown, the number is out of range, or one lacks the other.
    """
    is_count = type(world_size) is int and 1 <= world_size <= RANKS
    if world_size is not None and not is_count:
        raise ArgumentError(
            f"the world size is {world_size!r}; it is a whole number of ranks, from 1 to {RANKS}"
        )
    if kind is None:
        if world_size is not None:
            raise ArgumentError(
                f"a world size of {world_size} needs a kind: give one of {Kind.names()} as well "
                "(kind=)"
            )
        return None, None
    chosen = Kind.named(kind)
    if world_size is None and chosen is not Kind.FULL:
        raise ArgumentError(
            f"the kind {chosen.value} needs a number of ranks: give it as well (world_size=)"
        )
    return chosen, world_size or 1
