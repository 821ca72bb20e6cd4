"""What a store promises, and what it holds that is no file yet: as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """What may be relied on at one place; docs/stores.md has a table of them."""

    put_if_absent: bool | None
    """Of several commits without `replace` at once exactly one succeeds. Else absence is looked
    for just before the write, and two at the same instant may both succeed. None is not known
    yet: servers differ, and the first commit of a process finds out."""
    atomic_replace: bool
    """Whoever reads while a commit replaces a file sees the old content or the new."""
    hides_unfinished: bool
    """A file that is being written, or whose writing failed, is not there under its name."""
    durable: bool
    """What was created and committed outlives this process and a loss of power."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A file whose writing began and neither ended nor was taken back, or that is being written."""

    name: str
    """What it would be called; in a bucket perhaps `<folder>/<name>`, of a folder below."""
    started: float
    """When it was begun or, where only that is known, last written: seconds since 1970 by the
    store's clock."""
    upload_id: str
    """By which the store knows it."""
    nbytes: int = 0
    """What it takes, where that is known."""
