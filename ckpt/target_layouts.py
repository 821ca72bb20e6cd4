"""The layouts that a job of N ranks would have, by rules of names: for plans without the job."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from ckpt.state.patterns import matches
from sharding.errors import ArgumentError
from sharding.layout import Layout, Mesh, Placement, Replicate, Shape, Shard

AXIS = "world"
"""The name of the one axis of a mesh that the caller does not describe."""
_AXIS = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([1-9][0-9]{0,8})")
_PLACEMENT = re.compile(r"replicate|shard\(([0-9]{1,3})\)")


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """The placements of the tensors whose names a pattern selects, one for each mesh axis."""

    pattern: str
    placements: tuple[Placement, ...]

    @classmethod
    def parsed(cls, text: str) -> PlacementRule:
        """Returns the rule of a text. Raises ArgumentError for another text.

        >>> PlacementRule.parsed("*.bias=replicate")
        PlacementRule(pattern='*.bias', placements=(Replicate(),))
        >>> PlacementRule.parsed("replicate,shard(1)").pattern
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

    def cached(self) -> Callable[[str, Shape], Layout]:
        """Returns `of` with one object for equal layouts, which makes plans of many ranks fast."""
        known: dict[Layout, Layout] = {}

        def layout_of(name: str, shape: Shape) -> Layout:
            found = self.of(name, shape)
            return known.setdefault(found, found)

        return layout_of


def parsed_mesh(text: str | None, world_size: int) -> Mesh:
    """Returns the mesh of a text such as `dp=2,tp=4`; without a text one axis.

    Raises ArgumentError for another text, and for a mesh that has not `world_size` ranks.

    >>> parsed_mesh("dp=2,tp=4", 8).sizes, parsed_mesh(None, 8).names
    ((2, 4), ('world',))
    """
    if text is None:
        return Mesh.grid((AXIS,), (world_size,))
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
