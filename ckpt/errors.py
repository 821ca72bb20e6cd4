"""What can go wrong in saving and loading, grouped by what a caller would do about it.

All errors of the packages are here: those of bytes come from `formats`, those of tensors, arguments
and ranks from `sharding.errors`, which has the root, `CkptError`, and the rules of `kind`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.storage import GoneError, SizeError, TooLargeError
from sharding.errors import (
    SHOWN_NAMES,
    ArgumentError,
    ArgumentTypeError,
    CkptError,
    DestroyedGroupError,
    HoleError,
    LocalShapeError,
    MisuseError,
    NotAMemberError,
    OptimizerMismatchError,
    PartialError,
    RankError,
    ShardingError,
    TorchAssertionError,
    TransferError,
    UnknownPlacementError,
    WorldMismatchError,
    mixed_content,
)
from sharding.url_secrets import without_secrets

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BackgroundError",
    "BusyError",
    "CkptError",
    "ClosedError",
    "CorruptError",
    "DamagedLoadError",
    "DestroyedGroupError",
    "Difference",
    "ExistsError",
    "FallbackWarning",
    "FormatError",
    "GoneError",
    "HoleError",
    "HostileError",
    "InUseError",
    "LocalShapeError",
    "MismatchError",
    "MisuseError",
    "NotACheckpointError",
    "NotAMemberError",
    "OptimizerMismatchError",
    "PartialError",
    "PartialLoadError",
    "RankError",
    "ReplacedError",
    "ReplacedLoadError",
    "ReplicasWarning",
    "ShardingError",
    "SizeError",
    "Skipped",
    "StateChangedError",
    "StateError",
    "StoreError",
    "TensorIndexError",
    "TooLargeError",
    "TorchAssertionError",
    "TransferError",
    "UnknownNameError",
    "UnknownPlacementError",
    "UnsupportedError",
    "UnverifiedWarning",
    "WaitTimeoutError",
    "WorldMismatchError",
]


class StateError(CkptError, ValueError):
    """The state holds something that cannot be stored, or two names that are the same."""

    kind = "state"


class ExistsError(CkptError, FileExistsError):
    """A committed checkpoint or file is in the way; nothing was written over it."""

    kind = "exists"


class InUseError(ExistsError):
    """Other checkpoints borrow from this one: it can be neither deleted nor overwritten."""

    kind = "in_use"


class NotACheckpointError(CkptError, FileNotFoundError):
    """There is no committed checkpoint of a known format at this place."""

    kind = "not_a_checkpoint"


class StoreError(CkptError, OSError):
    """The disk or object store failed; what was committed before is untouched."""

    kind = "store"


class ReplacedError(StoreError):
    """The checkpoint was replaced or deleted while it was read. None is damaged: read it again."""

    kind = "replaced"


class BusyError(CkptError):
    """A save is in flight on some rank, and another was not to wait for it: that one is refused."""

    kind = "busy"


class StateChangedError(CkptError):
    """A tensor was changed in place before it was copied; there is no checkpoint of it."""

    kind = "state_changed"


class BackgroundError(CkptError):
    """An earlier save failed in the background, of which nobody had been told."""

    kind = "background"


class ClosedError(CkptError, ValueError):
    """A checkpoint was read that had been closed: open it again."""

    kind = "closed"


class UnknownNameError(CkptError, KeyError):
    """An open checkpoint has no tensor of this name."""

    kind = "unknown_name"
    __str__ = Exception.__str__  # KeyError's would put the sentence in quotes


class TensorIndexError(CkptError, IndexError):
    """An index does not fit the shape of a stored tensor."""

    kind = "tensor_index"


class WaitTimeoutError(CkptError, TimeoutError):
    """A save in the background was not over in the time given; it goes on."""

    kind = "wait_timeout"


class MismatchError(CkptError, ValueError):
    """Checkpoint and target do not fit together; the target was not touched.

    All differences are listed, not only the first.
    """

    kind = "mismatch"

    def __init__(self, url: str, differences: Sequence[Difference]) -> None:
        self.url = url
        self.differences = tuple(differences)
        shown = [f"  {difference}" for difference in self.differences[:SHOWN_NAMES]]
        if len(self.differences) > SHOWN_NAMES:
            shown.append(f"  ... and {len(self.differences) - SHOWN_NAMES} more")
        super().__init__(
            f"{url} does not fit the target, which was not touched:\n" + "\n".join(shown)
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which a checkpoint and a target do not fit."""

    name: str
    problem: str
    """`missing`, `unexpected`, `shape`, `dtype`, `structure`, or `pattern`: it names nothing."""
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


class PartialLoadError(CkptError):
    """Reading failed half-way: the tensors in `touched` may hold a mix of old and new bytes."""

    kind = "partial_load"

    def __init__(self, message: str, touched: Sequence[str]) -> None:
        self.touched = tuple(touched)
        super().__init__(f"{message}. {mixed_content(self.touched)}")


class DamagedLoadError(PartialLoadError, CorruptError):
    """Reading met changed or missing bytes half-way."""

    kind = "corrupt"


class ReplacedLoadError(PartialLoadError, ReplacedError):
    """The checkpoint was replaced or deleted when some of it had been read into the target."""

    kind = "replaced"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that was passed over for an older one."""

    url: str
    kind: str
    """`kind` of the error that loading it raises: `corrupt`, `not_a_checkpoint`, ..."""
    message: str


class FallbackWarning(UserWarning):
    """A checkpoint was not sound and an older one was taken in its place."""

    def __init__(self, taken: str, skipped: Sequence[Skipped]) -> None:
        self.taken = taken
        """The path or URL of the one that was taken."""
        self.skipped = tuple(skipped)
        """What was passed over, newest first, and why."""
        shown = "\n".join(f"  {one.message}" for one in self.skipped)
        super().__init__(
            f"{without_secrets(taken)} is taken in the place of what is not sound:\n{shown}"
        )


class SaveFailedWarning(UserWarning):
    """A checkpoint of a run was not saved, or not removed; training went on."""


class ReplicasWarning(UserWarning):
    """Tensors that ranks have as replicas of one another differ; one rank's are stored."""


class UnverifiedWarning(UserWarning):
    """Some of what was read could not be compared with a checksum, though the format has some."""

    def __init__(self, url: str, tensors: Sequence[str]) -> None:
        self.url = url
        """The checkpoint."""
        self.tensors = tuple(tensors)
        """The tensors on this rank of which a part of a record was read; empty where it was on
        other ranks alone."""
        shown = ", ".join(self.tensors[:5]) or "on other ranks"
        more = f" and {len(self.tensors) - 5} more" if len(self.tensors) > 5 else ""
        super().__init__(
            f"{without_secrets(url)}: parts of records were read ({shown}{more}), and a record has "
            "one CRC-32 for all its bytes, so that a flipped bit in these would not be seen; give "
            "verify='all' to read such records whole and compare, or verify=False to compare none"
        )
