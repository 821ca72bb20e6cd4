"""What can be wrong with bytes, grouped by what a caller would do about it.

Each class has a stable `kind`, the word a program may compare and `ckpt --json` prints
(`sharding.errors` has the root and the rules).
"""

from __future__ import annotations

from sharding.errors import CkptError

__all__ = ["CorruptError", "FormatError", "HostileError", "UnsupportedError"]


class FormatError(CkptError, ValueError):
    """The bytes are not what a reader of this format accepts. The message names file and place."""

    kind = "format"


class CorruptError(FormatError):
    """Bytes changed after they were written, or some are missing: restore them from elsewhere."""

    kind = "corrupt"


class HostileError(FormatError):
    """The file asks for something no honest writer writes: a path outside, code, absurd sizes."""

    kind = "hostile"


class UnsupportedError(FormatError):
    """A sound file that uses something this version does not read or the target cannot hold."""

    kind = "unsupported"
