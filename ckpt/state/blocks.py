"""The blocks of quantised optimizer state, and the parts of them that ranks hold.

Rules:

1. A class stores blocks if it has a `block_size`, and inner tensors `codes` and `scale` that follow
   the row-major elements: `scale` has an entry for each block, and each entry of `codes` has the
   codes of one element or more. Other inner tensors, such as `qmap`, are equal on all ranks. This
   holds for torchao.optim.
2. Ranks have parts of a whole tensor's blocks if one mesh axis cuts the rows and no other axis cuts
   the tensor. Then a rank's elements are consecutive. Each part must consist of whole blocks.
3. torchao keeps a part of fewer than 4,096 elements plain (`_AdamBase._new_buffer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from sharding.layout import FlatShard, Layout, Replicate, Shard

CODES, SCALE = "codes", "scale"
FOLLOWING = frozenset((CODES, SCALE))
"""The inner tensors that follow the elements (rule 1)."""
TORCHAO = "torchao."
LEAST_OF_TORCHAO = 4096
"""The fewest elements of a part that torchao.optim quantises (rule 3)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor whose consecutive elements are divided among ranks (rule 2)."""

    layout: Layout
    stride: int
    """Elements of a rank's part; the last parts may have fewer."""

    @classmethod
    def of(cls, layout: Layout) -> Cut | None:
        """Returns the cut of a layout; None unless it cuts rows along one axis, or not at all."""
        stride = layout.numel
        for placement, size in zip(layout.placements, layout.mesh.sizes, strict=True):
            if isinstance(placement, Replicate):
                continue
            if placement != Shard(0) or stride != layout.numel:
                return None
            stride = -(-layout.shape[0] // size) * prod(layout.shape[1:])
        return cls(layout, stride)

    def is_between(self, block: int) -> bool:
        """Whether every cut lies between two blocks of so many elements."""
        return self.stride % block == 0 and self.layout.numel % block == 0

    @property
    def least(self) -> int:
        """The elements of the smallest part."""
        sizes = zip(self.layout.placements, self.layout.mesh.sizes, strict=True)
        parts = prod(size for placement, size in sizes if not isinstance(placement, Replicate))
        return max(0, self.layout.numel - (parts - 1) * self.stride)

    def entries(self, elements: int) -> Layout:
        """Returns the layout of a tensor with one entry for each `elements` elements."""
        placements = tuple(
            FlatShard(0, self.stride // elements) if isinstance(placement, Shard) else placement
            for placement in self.layout.placements
        )
        return Layout((self.layout.numel // elements,), self.layout.mesh, placements)
