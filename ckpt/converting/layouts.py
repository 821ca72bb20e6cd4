"""The layouts that a job of N ranks would have, and the files of a kind of state dict.

A rule of names gives a tensor's layout for plans without the job. The kind of a state dict defines
a rank's part of each tensor:

    full      the whole tensor, on every rank
    sharded   the rows of `torch.chunk`
    local     a run of `ceil(numel / N)` row-major elements

Every rank has the whole of a tensor without dimensions, in all kinds.

Rules:

1. The plan for a kind equals the plan of N processes that save such a state
   (`ckpt.plan.save_plan`): replicated elements are stored once, divided among the ranks.
2. In the layout of a kind a rank stores one run of a tensor's row-major elements. A rank's file can
   therefore be streamed from any source.
3. These functions are pure. Most tensors of a model share few layouts, so results are cached.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ckpt.plan.save_plan import choose_layouts
from ckpt.state.patterns import matches
from formats.catalog import OutgoingTensor
from formats.limits import RANKS
from formats.native.manifest import StoredTensor
from sharding.errors import ArgumentError
from sharding.kind import Kind
from sharding.layout import Box, FlatShard, Layout, Mesh, Piece, Placement, Replicate, Shape, Shard

WORLD = "world"
"""The name of the one mesh axis over all ranks, as of a save's plain tensors and flat parts."""
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
    layouts = {
        tensor.name: StoredTensor(
            tensor.shape, tensor.dtype, layout_of(kind, tensor.shape, world_size)
        )
        for tensor in tensors
    }
    stored = choose_layouts(layouts)
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


@lru_cache(1024)
def run_of(layout: Layout, rank: int) -> tuple[int, Shape]:
    """Returns the rank's local storage as a run of the whole tensor: its first element and shape.

    The shape is that of the local array if the run covers it, otherwise one-dimensional (rule 2).
    Raises ArgumentError for a layout with several runs for one rank.

    >>> run_of(layout_of(Kind.SHARDED, (5, 4), 3), 1)
    (8, (2, 4))
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
    return lo, local if hi - lo == prod(local) else (hi - lo,)


def check_kind(kind: str | None, world_size: int | None) -> tuple[Kind | None, int | None]:
    """Returns the kind and the number of ranks that the caller gave: both, or neither.

    `full` without a number means one rank.

    Raises:
        ArgumentError: the kind is unknown, the number is out of range, or one lacks the other.
    """
    is_count = type(world_size) is int and 1 <= world_size <= RANKS
    if world_size is not None and not is_count:
        raise ArgumentError(
            f"the world size is {world_size!r}; give a whole number from 1 to {RANKS}"
        )
    if kind is None:
        if world_size is not None:
            raise ArgumentError(
                f"a world size of {world_size} needs a kind: give one of {Kind.names()} as well "
                "(kind=)"
            )
        return None, None
    chosen = Kind.from_name(kind)
    if world_size is None and chosen is not Kind.FULL:
        raise ArgumentError(
            f"the kind {chosen.value} needs a number of ranks: give it as well (world_size=)"
        )
    return chosen, world_size or 1


_AXIS = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([1-9][0-9]{0,8})")
_PLACEMENT = re.compile(r"replicate|shard\(([0-9]{1,3})\)")


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """The placements of the tensors whose names a pattern selects, one for each mesh axis."""

    pattern: str
    placements: tuple[Placement, ...]

    @classmethod
    def parse(cls, text: str) -> PlacementRule:
        """Returns the rule of a text. Raises ArgumentError for another text.

        >>> PlacementRule.parse("*.bias=replicate")
        PlacementRule(pattern='*.bias', placements=(Replicate(),))
        >>> PlacementRule.parse("replicate,shard(1)").pattern
        '*'
        """
        pattern, separator, words = text.rpartition("=")
        return cls(
            pattern if separator else "*",
            tuple(_placement(word, text) for word in words.split(",")),
        )


@dataclass(frozen=True, slots=True)
class TargetLayouts:
    """A mesh, and the rules for its tensors: the last rule that selects a name decides.

    A tensor that no rule selects is cut along its first dimension by the last axis of the mesh, as
    `fully_shard` cuts it, and replicated along the other axes. A tensor without dimensions is
    replicated, whatever the rules say.

    Raises:
        ArgumentError: a rule has not one placement for each axis of the mesh.
    """

    mesh: Mesh
    rules: Sequence[PlacementRule] = ()

    def __post_init__(self) -> None:
        pairs = zip(self.mesh.names, self.mesh.sizes, strict=True)
        axes = ", ".join(f"{name}={size}" for name, size in pairs)
        for rule in self.rules:
            if len(rule.placements) != len(self.mesh.sizes):
                raise ArgumentError(
                    f"{len(rule.placements)} placements for {rule.pattern!r}, and the mesh is "
                    f"{axes}: give one placement for each axis, or another mesh="
                )

    def of(self, name: str, shape: Shape) -> Layout:
        """Returns the layout of a tensor.

        Raises ArgumentError for a rule that does not fit the mesh or the tensor.
        """
        axes = len(self.mesh.sizes)
        if not shape:
            return Layout(shape, self.mesh, (Replicate(),) * axes)
        placements: tuple[Placement, ...] = (*(Replicate(),) * (axes - 1), Shard(0))
        for rule in self.rules:
            if matches(rule.pattern, name):
                placements = rule.placements
        try:
            return Layout(shape, self.mesh, placements)
        except ArgumentError as error:
            raise ArgumentError(
                f"{name}, of shape {list(shape)}: {error}; give its name a rule of its own, as in "
                f"'{name}=replicate'"
            ) from error

    def with_cache(self) -> Callable[[str, Shape], Layout]:
        """Returns `of` with one object for equal layouts, which makes plans of many ranks fast."""
        known: dict[Layout, Layout] = {}

        def layout_of(name: str, shape: Shape) -> Layout:
            layout = self.of(name, shape)
            return known.setdefault(layout, layout)

        return layout_of


def parse_mesh(text: str | None, world_size: int) -> Mesh:
    """Returns the mesh of a text such as `dp=2,tp=4`; without a text one axis.

    Raises ArgumentError for another text, and for a mesh that has not `world_size` ranks.

    >>> parse_mesh("dp=2,tp=4", 8).sizes, parse_mesh(None, 8).names
    ((2, 4), ('world',))
    """
    if text is None:
        return Mesh.grid((WORLD,), (world_size,))
    found = [_AXIS.fullmatch(axis.strip()) for axis in text.split(",")]
    axes = [(each[1], int(each[2])) for each in found if each]
    if len(axes) < len(found) or len({name for name, _ in axes}) < len(axes):
        raise ArgumentError(f"the mesh {text!r} is not a list of axes, as in dp=2,tp=4")
    sizes = [size for _, size in axes]
    if prod(sizes) != world_size:
        raise ArgumentError(
            f"the mesh {text} has {prod(sizes)} ranks, and the world size is {world_size}"
        )
    return Mesh.grid([name for name, _ in axes], sizes)


def _placement(word: str, text: str) -> Placement:
    matched = _PLACEMENT.fullmatch(word.strip())
    if matched is None:
        raise ArgumentError(
            f"{word.strip()!r} in {text!r} is not a placement; give replicate or shard(0), "
            "shard(1), ... for each axis of the mesh"
        )
    return Replicate() if matched[1] is None else Shard(int(matched[1]))
