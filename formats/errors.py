"""The errors of bytes, grouped by the remedy of a caller.

Each class has a stable `kind`, a word that programs can compare and that `ckpt --json` prints
(`sharding.errors` has the root and the rules).
"""

from __future__ import annotations

from sharding.errors import CkptError

__all__ = [
    "CorruptError",
    "ForeignFileError",
    "FormatError",
    "GoneError",
    "HostileError",
    "SizeError",
    "TooLargeError",
    "UnsupportedError",
]


class FormatError(CkptError, ValueError):
    """The bytes do not follow the rules of the format. The message names the file and the place."""

    kind = "format"


class CorruptError(FormatError):
    """Bytes were changed since they were written, or are missing: restore them from a copy."""

    kind = "corrupt"


class HostileError(FormatError):
    """The file has content that no honest writer writes: a path outside, code, absurd sizes."""

    kind = "hostile"


class UnsupportedError(FormatError):
    """The file is sound, but this version cannot read it, or the target's format cannot hold it."""

    kind = "unsupported"


class ForeignFileError(UnsupportedError):
    """The file is of a known kind that is not read, such as HDF5. The message has the remedy."""

    kind = "foreign_file"

    def __init__(self, where: str, name: str, advice: str) -> None:
        super().__init__(f"{where}: this is {name}, which ckpt does not read; {advice}")


class TooLargeError(HostileError):
    """A file is larger than its limit for a read of the whole file."""

    def __init__(self, where: str, nbytes: int, limit: int) -> None:
        self.nbytes = nbytes
        super().__init__(f"{where}: the file has {nbytes} bytes, its limit is {limit} bytes")


class GoneError(CorruptError):
    """A file of a checkpoint is missing. It may have been there until a moment ago."""

    def __init__(self, where: str, rank: int | None = None) -> None:
        """`rank` is the one that wrote it, if that is known."""
        written = "" if rank is None else f" rank {rank} wrote it, and"
        super().__init__(
            f"{where}: the file is missing:{written} it was deleted, perhaps while the checkpoint "
            "was read, or not copied along; restore it from another copy"
        )


class SizeError(CorruptError):
    """A file has more or fewer bytes than were written."""

    def __init__(self, where: str, size: int, expected: int) -> None:
        super().__init__(
            f"{where}: the file has {size} bytes, {expected} were written: it was "
            f"{'truncated' if size < expected else 'appended to'}; restore it from another copy"
        )
