"""The guarantees of a store, and its unfinished files, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """The guarantees of one store; docs/stores.md has a table of them."""

    put_if_absent: bool | None
    """Whether exactly one of several simultaneous commits without `replace` succeeds. If False, a
    commit looks for the file just before the write, and two commits at one instant may both
    succeed. None is unknown: servers differ, and the first commit of a process finds out."""
    atomic_replace: bool
    """Whether a read during a replacing commit returns either the old content or the new."""
    hides_unfinished: bool
    """Whether a partly written file is invisible under its name."""
    durable: bool
    """Whether a created or committed file survives a loss of power."""


class Start(NamedTuple):
    """The first bytes of a file."""

    data: bytes
    size: int
    """Of the whole file."""
    tag: str
    """The store's mark of this content; empty in stores without one."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A file whose write has begun and neither finished nor been aborted."""

    name: str
    """The name of the complete file; in a bucket also `<folder>/<name>` for a folder below."""
    started: float
    """The start of the write, or the last write if only that is known: seconds since 1970 by the
    store's clock."""
    upload_id: str
    """The store's name of the upload."""
    nbytes: int = 0
    """The bytes that it takes; 0 if unknown."""
