"""The result of a check of a checkpoint, as values to print, compare, or store as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from formats.catalog import Catalog
from formats.errors import FormatError


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a stored checkpoint."""

    file: str
    """The file in the checkpoint's folder; the folder itself if no single file is damaged."""
    message: str
    """The problem, its place and the remedy: complete without the other fields."""
    tensor: str | None = None
    """The damaged tensor, if the problem concerns one."""
    lo: int | None = None
    """The first damaged byte of the file, if known."""
    hi: int | None = None
    """One past the last damaged byte."""
    kind: str = "corrupt"
    """The `kind` of the error that a read would raise: `corrupt`, `hostile`, `format`, ..."""

    @classmethod
    def of(cls, error: FormatError, file: str, tensor: str | None = None) -> Problem:
        """Returns the problem of a reader's error."""
        return cls(file, str(error), tensor, kind=error.kind)


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of the check of one format."""

    checked: str
    """The parts that this format lets a reader check, as text."""
    bytes_checked: int = 0
    """Bytes that were compared with a checksum."""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks that are not damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of `verify`."""

    url: str
    format: str
    files: int = 0
    """The number of the checkpoint's files; 0 if its description could not be read."""
    bytes_checked: int = 0
    """Bytes that were compared with a checksum."""
    checked: str
    """The parts that this format lets a reader check, as text."""
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    """Remarks that are not damage, such as files that belong to no checkpoint."""
    tensors: int | None = None
    """The number of its tensors; None if its description could not be read."""

    @property
    def sound(self) -> bool:
        """Whether the check found no problem."""
        return not self.problems


def file_problems(sizes: Mapping[str, int], catalog: Catalog) -> str:
    """Returns a text on files of a native checkpoint that are missing or have other sizes.

    It is empty without such files, and for other formats, whose readers check themselves. `sizes`
    are those of the files in the folder.
    """
    if catalog.format != "ckpt":
        return ""
    files = catalog.files
    missing = sum(file.name not in sizes for file in files)
    other = sum(sizes.get(file.name, file.size) != file.size for file in files)
    of = f"of {len(files)} files"
    said = (f"{missing} {of} missing", f"{other} {of} cut or appended to")
    return ", ".join(text for text, number in zip(said, (missing, other), strict=True) if number)
