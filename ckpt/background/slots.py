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
    """An item of the plan, whose offset is its place in the arena's data, and its tensor."""

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
        """The item's elements in one dimension; of a contiguous tensor its own memory."""
        return self.leaf.local.reshape(-1)[self.item.lo : self.item.hi]

    def address(self) -> int:
        """Where the bytes of a plain item begin.

        Raises StateChangedError where the tensor has given up its memory.
        """
        item, local = self.item, self.leaf.local
        start: int = local.data_ptr() + item.lo * item.dtype.itemsize
        memory = local.untyped_storage()
        if start + item.nbytes > memory.data_ptr() + memory.nbytes():
            raise StateChangedError(
                f"{item.name} has no memory for its {item.nbytes:,} bytes, as where it was "
                "resized or offloaded; save it when it is whole, or call wait_staged() of the "
                "save's handle before it gives its memory up"
            )
        return start


def slots(plan: SavePlan, leaves: Sequence[Leaf]) -> list[Slot]:
    """The items of a plan with their tensors; `leaves` has them by number."""
    sources = [leaves[item.source] for item in plan.items]
    return list(map(Slot._make, zip(plan.items, sources, strict=True)))
