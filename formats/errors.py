"""What can be wrong with bytes, grouped by what a caller would do about it.

Each class has a stable `kind`, the word a program may compare and `ckpt --json` prints.
"""

from __future__ import annotations

from formats.url_secrets import without_secrets


class FormatError(ValueError):
    """The bytes are not what a reader of this format accepts. The message names file and place."""

    kind = "format"

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(one) if isinstance(one, str) else one for one in args))


class CorruptError(FormatError):
    """Bytes changed after they were written, or some are missing: restore them from elsewhere."""

    kind = "corrupt"


class HostileError(FormatError):
    """The file asks for something no honest writer writes: a path outside, code, absurd sizes."""

    kind = "hostile"


class UnsupportedError(FormatError):
    """A sound file that uses something this version does not read or the target cannot hold."""

    kind = "unsupported"
