"""The tensors that a rank writes, each with its place in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ckpt.errors import StateChangedError
from ckpt.plan.save_plan import SavePlan, WriteItem
from ckpt.state.flatten import Leaf
from ckpt.state.memory import is_plain


class Slot(NamedTuple):
    """An item of the plan with its tensor; the item's offset is its place in the arena's data."""

    item: WriteItem
    leaf: Leaf

    @property
    def local(self) -> torch.Tensor:
        """The rank's part of the tensor."""
        return self.leaf.local

    @property
    def is_plain(self) -> bool:
        """Whether its bytes lie end to end in host memory."""
        return is_plain(self.leaf.local)

    @property
    def flat(self) -> torch.Tensor:
        """Returns the item's elements in one dimension: without a copy if they are contiguous."""
        return self.leaf.local.reshape(-1)[self.item.lo : self.item.hi]

    def address(self) -> int:
        """Returns the address of a plain item's first byte.

        Raises StateChangedError if the tensor has given up its memory.
        """
        item, local = self.item, self.leaf.local
        start: int = local.data_ptr() + item.lo * item.dtype.itemsize
        memory = local.untyped_storage()
        if start + item.nbytes > memory.data_ptr() + memory.nbytes():
            raise StateChangedError(
                f"{item.name} has no memory for its {item.nbytes:,} bytes: it was resized or "
                "offloaded; save it while it has its memory, or call wait_staged() of the save's "
                "handle before it gives its memory up"
            )
        return start


def slots(plan: SavePlan, leaves: Sequence[Leaf]) -> list[Slot]:
    """Returns the items of a plan with their tensors; `leaves` has the tensors by number."""
    sources = [leaves[item.source] for item in plan.items]
    return list(map(Slot._make, zip(plan.items, sources, strict=True)))
