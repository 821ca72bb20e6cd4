"""The exit codes of `ckpt` and their meanings, for scripts, and the texts of `--help`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    ExitCode.FINE: "done; verify: sound; diff: no difference; doctor: each promise holds",
    ExitCode.DIFFERENT: "verify found damage, diff a difference, doctor a promise that fails",
    ExitCode.USAGE: "wrong arguments",
    ExitCode.NOT_A_CHECKPOINT: "there is no checkpoint at the path or URL",
    ExitCode.DAMAGED: "a damaged or hostile file was met",
    ExitCode.STORE: "the disk or object store failed",
    ExitCode.EXISTS: "what is there was not overwritten, or not removed as others borrow from it",
    ExitCode.UNSUPPORTED: "the file uses, or the target cannot hold, something not supported",
    ExitCode.INTERNAL: "an error that no other code tells: a rank that failed, or a bug in ckpt",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
    ExitCode.BROKEN_PIPE: "the reader of the output stopped reading",
}
"""The meaning of each code."""


EVERY_COMMAND_S = frozenset(
    {
        ExitCode.FINE,
        ExitCode.USAGE,
        ExitCode.INTERNAL,
        ExitCode.INTERRUPTED,
        ExitCode.BROKEN_PIPE,
    }
)
"""The codes with which each command may end."""
OF_A_READER = (
    ExitCode.NOT_A_CHECKPOINT,
    ExitCode.DAMAGED,
    ExitCode.STORE,
    ExitCode.UNSUPPORTED,
)
"""The further codes of a command that reads a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """The texts of a command in `--help`."""

    summary: str
    """A line for the list of the commands."""
    description: str
    examples: Sequence[tuple[str, str]]
    """Command lines and their effects."""
    codes: Sequence[ExitCode] = ()
    """The codes with which this command may end, beside those of every command."""

    @property
    def every_code(self) -> frozenset[ExitCode]:
        """All codes with which the command may end."""
        return EVERY_COMMAND_S.union(self.codes)

    @property
    def epilog(self) -> str:
        """The examples and the codes, below the arguments."""
        return epilog(self.examples, self.every_code)


def epilog(examples: Sequence[tuple[str, str]], codes: Iterable[ExitCode]) -> str:
    """Returns examples and the meanings of exit codes, for the end of `--help`."""
    chosen = set(codes)
    lines = ["examples:"]
    for line, effect in examples:
        lines += [f"  {line}", f"      {effect}"]
    rows = [f"  {code.value:>3}  {text}" for code, text in MEANINGS.items() if code in chosen]
    return "\n".join([*lines, "", "exit codes:", *rows])


def code_of(error: BaseException) -> ExitCode:
    codes = (code for kinds, code in _BY_ERROR if isinstance(error, kinds))
    return next(codes, ExitCode.INTERNAL)


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
