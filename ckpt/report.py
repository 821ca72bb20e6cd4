"""What a check of a checkpoint found, as values: to print, to compare, to turn into JSON."""

from __future__ import annotations

from dataclasses import dataclass

from formats.errors import FormatError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a stored checkpoint."""

    file: str
    """The file in the checkpoint's folder; the folder itself where no single file is to blame."""
    message: str
    """What is wrong, where, and what to do: complete without the other fields."""
    tensor: str | None = None
    """The tensor that is hurt, where it is one."""
    lo: int | None = None
    """First damaged byte of the file, where it is known which."""
    hi: int | None = None
    """One past the last one."""
    kind: str = "corrupt"
    """`kind` of the error that reading it would raise: `corrupt`, `hostile`, `format`, ..."""

    @classmethod
    def of(cls, error: FormatError, file: str, tensor: str | None = None) -> Problem:
        """The problem that a reader's error speaks of."""
        return cls(file, str(error), tensor, kind=error.kind)


@dataclass(frozen=True, slots=True)
class Findings:
    """What the check of one format found."""

    checked: str
    """What this format lets a reader check, in words."""
    bytes_checked: int = 0
    """Bytes that were compared with a checksum."""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    """What is worth saying and no damage."""


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of `verify`."""

    url: str
    format: str
    files: int
    """Files that the checkpoint consists of; 0 where its description could not be read."""
    bytes_checked: int
    """Bytes that were compared with a checksum."""
    checked: str
    """What this format lets a reader check, in words."""
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    """What is worth saying and no damage, such as files that belong to no checkpoint."""

    @property
    def sound(self) -> bool:
        """True when nothing was found wrong in what could be checked."""
        return not self.problems
