"""How N ranks store tensors of a kind, and what each of their files holds: plans, without a rank.

A kind says what a rank has of every tensor:

    full      all of it, like every other rank
    sharded   the rows that torch.chunk gives it
    local     its run of the row-major elements, `ceil(numel / N)` of them

A tensor without dimensions is whole on every rank, whatever the kind.

Rules:

1. The plan for a kind is the one that N processes would make if they saved such a state
   (`ckpt.plan.save_plan`): what several ranks have is stored once, divided among them.
2. What a rank stores of a tensor is one run of its row-major elements, in every layout made here.
   So a rank's file can be streamed from any source without gathering anything.
3. Pure: the same on every machine, and nothing is opened. Most tensors of a model share few
   layouts, so what follows from one is kept.
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
"""What saving calls the one axis over all ranks that plain tensors and flat parts are held by."""
ROWS = "dim_0"
"""What torch calls the one axis of a mesh without names, over which DTensors are sharded."""


@dataclass(frozen=True, slots=True)
class Division:
    """Which rank's file gets what."""

    stored: Mapping[str, StoredTensor]
    """By name, in the state's order."""
    parts: Mapping[int, Sequence[str]]
    """Rank -> the names of which its file has something, in the state's order; ranks ascend."""
    world_size: int


def of_kind(tensors: Iterable[OutgoingTensor], kind: Kind, world_size: int) -> Division:
    """The files of `world_size` ranks with a state of this kind (rule 1)."""
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
    """Whole tensors in order, as many together as fit into a file; a larger one alone."""
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
    """Who has what of a tensor of this shape in a state of this kind.

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
    """What a rank stores of a tensor: row-major elements `[lo, hi)`, and the shape they have."""

    lo: int
    hi: int
    shape: tuple[int, ...]
    """Of the local array where it is whole, else one-dimensional."""


@lru_cache(1024)
def run_of(layout: Layout, rank: int) -> Run:
    """The rank's local storage as a run of the whole tensor (rule 2).

    Raises ArgumentError for a layout that gives it elements which lie apart.

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
    """The kind and the number of ranks that were asked for: both, or neither.

    `full` without a number means one rank. Raises ArgumentError for a word that is no kind, a
    number that is no number of ranks, and one of the two without the other.
    """
    is_count = type(world_size) is int and 1 <= world_size <= RANKS
    if world_size is not None and not is_count:
        raise ArgumentError(
            f"a world size of {world_size!r}: it is a whole number of ranks, from 1 to {RANKS}"
        )
    if kind is None:
        if world_size is not None:
            raise ArgumentError(
                f"a world size of {world_size} without a kind does not say who has what: give one "
                f"of {Kind.names()} as well (kind=, --kind)"
            )
        return None, None
    chosen = Kind.named(kind)
    if world_size is None and chosen is not Kind.FULL:
        raise ArgumentError(
            f"{chosen.value} over how many ranks? Give the number as well (world_size=, "
            "--world-size)"
        )
    return chosen, world_size or 1
