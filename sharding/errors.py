"""The root of all errors, and those about tensors, layouts, arguments and ranks.

Rules:

1. `CkptError` is the root of every error that `ckpt`, `formats` and `sharding` raise on purpose.
   The base that Python has for the case stays a base: `ValueError`, `OSError`, `TimeoutError`.
2. A class has one stable `kind`, the word a program may compare: the name of the class without
   `Error`, in snake case. A class that a caller handles as its base has the base's.
3. No text of an error shows a password that stands in a URL.

Pure Python: no torch. `docs/decisions/028-one-error-root.md` says why the root is here.
"""

from __future__ import annotations

from collections.abc import Sequence

from sharding.url_secrets import without_secrets

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CkptError",
    "DestroyedGroupError",
    "HoleError",
    "LocalShapeError",
    "MisuseError",
    "NotAMemberError",
    "OptimizerMismatchError",
    "PartialError",
    "RankError",
    "ShardingError",
    "TorchAssertionError",
    "TransferError",
    "UnknownPlacementError",
    "WorldMismatchError",
]

SHOWN_NAMES = 20
"""How many names a message lists; the exception has all of them."""


class CkptError(Exception):
    """The root: whatever `ckpt`, `formats` and `sharding` refuse or fail at."""

    kind = "ckpt"

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(one) if isinstance(one, str) else one for one in args))


class ArgumentError(CkptError, ValueError):
    """An argument, or a variable of the environment, has a value that is not taken."""

    kind = "argument"


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument, or an object in it, has a type that is not taken."""


class MisuseError(CkptError, RuntimeError):
    """A call does not fit the state that a module, a device or the ranks are in."""

    kind = "misuse"


class TorchAssertionError(MisuseError, AssertionError):
    """A misuse for which torch's own function raises an AssertionError."""


class ShardingError(CkptError, ValueError):
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

    kind = "unknown_placement"


class LocalShapeError(ShardingError):
    """A rank's local tensor is not the part that the tensor's own placements give to the rank."""

    kind = "local_shape"


class WorldMismatchError(LocalShapeError):
    """A local state dict was made by another rank, or by another number of them."""

    kind = "world_mismatch"


class OptimizerMismatchError(ShardingError):
    """An optimizer's state is not that of this optimizer: of another module, or in other groups."""

    kind = "optimizer_mismatch"


class NotAMemberError(ShardingError):
    """A process takes part in what is for the members of a process group that it is not in."""

    kind = "not_a_member"


class DestroyedGroupError(ShardingError):
    """A process group is needed that has been destroyed: shard again in a new one."""

    kind = "destroyed_group"


class TransferError(CkptError, RuntimeError):
    """Elements did not come from another rank, or could not be sent to it. The rank is named."""

    kind = "transfer"


class RankError(CkptError):
    """Another rank failed; every rank raises. `rank`, `error` and `message` say what happened."""

    kind = "rank"
    touched: tuple[str, ...] = ()
    """Of a load, the tensors of this rank's own target that were filled before."""

    def __init__(self, stage: str, rank: int, error: str, message: str) -> None:
        self.rank = rank
        self.error = error
        self.message = without_secrets(message)
        super().__init__(f"{stage} failed on rank {rank} with {error}: {message}")

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}. On this rank: {mixed_content(self.touched)}" if self.touched else text


def mixed_content(touched: Sequence[str]) -> str:
    """A sentence that names the tensors which a load that failed has touched."""
    names = ", ".join(touched[:SHOWN_NAMES])
    more = len(touched) - SHOWN_NAMES
    return f"The target may hold a mix of old and new bytes in: {names}" + (
        f" and {more} more" if more > 0 else ""
    )


def said(error: BaseException) -> str:
    """The text of an exception and, in parentheses, the notes that were added to it."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{error}{notes}"
