"""The three kinds of state dict. Imports no torch: files are converted without it."""

from __future__ import annotations

from enum import Enum

from sharding.errors import ArgumentError


class Kind(str, Enum):
    """A rank's part of every tensor of a state; all of a tensor without dimensions."""

    FULL = "full"
    """The full tensor, on every rank."""
    SHARDED = "sharded"
    """The rank's rows, or the part that a DTensor's placements give it."""
    LOCAL = "local"
    """The rank's part as it is in memory: in general a run of the row-major elements."""

    @classmethod
    def from_name(cls, name: str) -> Kind:
        """Returns the kind of this name. Raises ArgumentError, which lists the kinds, for others.

        >>> Kind.from_name("full") is Kind.FULL
        True
        """
        for kind in cls:
            if kind.value == name:
                return kind
        raise ArgumentError(f"{name!r} is not a kind of state; the kinds are {cls.names()}")

    @classmethod
    def names(cls) -> str:
        """Returns all kinds, for messages."""
        return ", ".join(kind.value for kind in cls)
