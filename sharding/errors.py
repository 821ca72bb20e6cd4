"""What can be wrong between a tensor and its layout, grouped by what a caller would do about it.

Each class has a stable `kind`, the word a program may compare. Pure Python: no torch.
"""

from __future__ import annotations


def said(error: BaseException) -> str:
    """The text of an exception and, in parentheses, the notes that were added to it."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{error}{notes}"


class ShardingError(ValueError):
    """A tensor, a module or a layout is not what this package can describe."""

    kind = "sharding"


class HoleError(ShardingError):
    """A wanted box is held by no rank. The message names the box."""

    kind = "hole"


class PartialError(ShardingError):
    """Ranks hold summands of a tensor, not parts of it: redistribute it, then describe it."""

    kind = "partial"


class UnknownPlacementError(ShardingError):
    """A tensor is divided in a way that no placement of `sharding.layout` describes."""

    kind = "placement"


class LocalShapeError(ShardingError):
    """A rank's local tensor is not the part that the tensor's own placements give to the rank."""

    kind = "local-shape"


class WorldMismatchError(LocalShapeError):
    """A local state dict was made by another rank, or by another number of them."""

    kind = "world"


class OptimizerMismatchError(ShardingError):
    """An optimizer's state is not that of this optimizer: of another module, or in other groups."""

    kind = "optimizer"


class NotAMemberError(ShardingError):
    """A process takes part in what is for the members of a process group that it is not in."""

    kind = "member"


class DestroyedGroupError(ShardingError):
    """A process group is needed that has been destroyed: shard again in a new one."""

    kind = "destroyed-group"


class TransferError(RuntimeError):
    """Elements did not come from another rank, or could not be sent to it. The rank is named."""

    kind = "transfer"


class RankError(Exception):
    """Another rank failed; every rank raises. `rank`, `error` and `message` say what happened."""

    kind = "rank"

    def __init__(self, stage: str, rank: int, error: str, message: str) -> None:
        self.rank = rank
        self.error = error
        self.message = message
        super().__init__(f"{stage} failed on rank {rank} with {error}: {message}")
