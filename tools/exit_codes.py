"""The exit codes of `ckpt` and their meanings, for scripts and for `ckpt --help`."""

from __future__ import annotations

from enum import IntEnum

from ckpt.errors import ExistsError, NotACheckpointError
from formats.errors import FormatError, UnsupportedError
from sharding.errors import ShardingError


class ExitCode(IntEnum):
    """The exit code of a command."""

    FINE = 0
    DIFFERENT = 1
    USAGE = 2
    NOT_A_CHECKPOINT = 3
    DAMAGED = 4
    STORE = 5
    EXISTS = 6
    UNSUPPORTED = 7
    INTERNAL = 70
    """EX_SOFTWARE of sysexits.h."""
    INTERRUPTED = 130
    """128 + SIGINT, as in shells."""
    BROKEN_PIPE = 141
    """128 + SIGPIPE."""


MEANINGS = {
    ExitCode.FINE: "done; for verify: sound; for diff: no difference",
    ExitCode.DIFFERENT: "verify found damage, diff found a difference",
    ExitCode.USAGE: "wrong arguments",
    ExitCode.NOT_A_CHECKPOINT: "there is no checkpoint at the path or URL",
    ExitCode.DAMAGED: "a damaged or hostile file was met",
    ExitCode.STORE: "the disk or object store failed",
    ExitCode.EXISTS: "what is there was not overwritten, or not removed as others borrow from it",
    ExitCode.UNSUPPORTED: "the file uses, or the target cannot hold, something not supported",
    ExitCode.INTERNAL: "a bug in ckpt",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
    ExitCode.BROKEN_PIPE: "the reader of the output stopped reading",
}
"""The meaning of each code."""


def table() -> str:
    """Returns the codes and their meanings, for `--help`."""
    rows = "\n".join(f"  {code.value:>3}  {meaning}" for code, meaning in MEANINGS.items())
    return f"exit codes:\n{rows}"


def code_of(error: BaseException) -> ExitCode:
    """Returns the exit code for an error."""
    found = ExitCode.INTERNAL
    for kinds, code in _BY_ERROR:
        if isinstance(error, kinds):
            found = code
            break
    return found


_BY_ERROR: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], ExitCode], ...] = (
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
    (BrokenPipeError, ExitCode.BROKEN_PIPE),
    (NotACheckpointError, ExitCode.NOT_A_CHECKPOINT),
    (ExistsError, ExitCode.EXISTS),
    (UnsupportedError, ExitCode.UNSUPPORTED),
    ((FormatError, ShardingError), ExitCode.DAMAGED),
    (ValueError, ExitCode.USAGE),
    (OSError, ExitCode.STORE),
)
"""The exit codes by class of error; the first class that fits counts."""
