"""What a rank writes, and where each part of it lies in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch

from ckpt.errors import StateChangedError
from ckpt.state.memory import is_plain
from ckpt.transfer.write import WriteItem


class Slot(NamedTuple):
    """A part, and its bytes `[lo, hi)` of the arena's data."""

    part: WriteItem
    lo: int
    hi: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.hi - self.lo

    @property
    def is_on_cuda(self) -> bool:
        """Whether a stream of the device can copy it."""
        return self.part.leaf.local.is_cuda

    @property
    def is_plain(self) -> bool:
        """Whether its bytes lie end to end in host memory."""
        return is_plain(self.part.leaf.local)

    @property
    def flat(self) -> torch.Tensor:
        """The part's elements in one dimension; of a contiguous tensor its own memory."""
        return self.part.leaf.local.reshape(-1)[self.part.lo : self.part.hi]

    def address(self) -> int:
        """Where the bytes of a plain part begin.

        Raises StateChangedError where the tensor has given up its memory.
        """
        part, lo, hi = self
        local = part.leaf.local
        start: int = local.data_ptr() + part.lo * part.leaf.dtype.itemsize
        memory = local.untyped_storage()
        if start + hi - lo > memory.data_ptr() + memory.nbytes():
            raise StateChangedError(
                f"{self.part.name} has no memory for its {self.nbytes:,} bytes, as where it was "
                "resized or offloaded; save it when it is whole, or call wait_staged() of the "
                "save's handle before it gives its memory up"
            )
        return start


def slots(parts: Sequence[WriteItem]) -> list[Slot]:
    """The parts end to end, in the order in which they lie in a shard file.

    That is by falling size of their elements, so that each is aligned to it.
    """
    found, at = [], 0
    by_size = [(part.leaf.dtype.itemsize, part) for part in parts]
    by_size.sort(key=itemgetter(0), reverse=True)
    for itemsize, part in by_size:
        end = at + (part.hi - part.lo) * itemsize
        found.append(Slot(part, at, end))
        at = end
    return found
