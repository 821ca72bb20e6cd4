"""The placements of a layout: the division of a tensor by one mesh axis each.

A layout has one placement per mesh axis. The placements apply in this order, independent of the
axes' order in the mesh (rule P1): first every `Shard` and `StridedShard`, left to right, which cut
the tensor along dimensions; then every `FlatShard`, left to right, which cuts the remaining
row-major elements; last all `Split` together, which divide the remaining elements evenly.
`Replicate` and `Only` cut nothing: all coordinates of a `Replicate` axis hold the result, and one
coordinate of an `Only` axis holds it.

`Shard` follows torch.chunk (rule P2): every coordinate but the last few gets `ceil(n / size)`
indices, the next one the rest, the others none. `StridedShard` is torch's placement of the
same name (rule P3): the dimension is first cut into `split` chunks, then each chunk over the axis,
and a coordinate holds its part of every chunk, end to end. FSDP over tensor parallelism needs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same elements."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts dimension `dim` by torch.chunk's rule (P2)."""

    dim: int

    @property
    def split(self) -> int:
        """1: the dimension is cut as a whole."""
        return 1

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The axis cuts each of `split` chunks of dimension `dim` (P3)."""

    dim: int
    split: int

    def __str__(self) -> str:
        return f"SS({self.dim},{self.split})"


@dataclass(frozen=True, slots=True)
class FlatShard:
    """The tensor's elements are `[offset, offset + numel)` of a packed buffer cut every `stride`.

    Coordinate i holds buffer elements `[i * stride, (i + 1) * stride)`: FSDP1's flat parameters,
    ZeRO's and Megatron's distributed optimizers.
    """

    offset: int
    stride: int

    def __str__(self) -> str:
        return f"F({self.offset},{self.stride})"


@dataclass(frozen=True, slots=True)
class Split:
    """Replicas that share the work: each holds an even part of the elements, in row-major order.

    All `Split` axes count together, the last one fastest. A saved replicated tensor has this
    placement if each of its replicas wrote a part.
    """

    def __str__(self) -> str:
        return "split"


@dataclass(frozen=True, slots=True)
class Only:
    """Only coordinate `index` of the axis holds the elements."""

    index: int

    def __str__(self) -> str:
        return f"only({self.index})"


Placement = Replicate | Shard | StridedShard | FlatShard | Split | Only
