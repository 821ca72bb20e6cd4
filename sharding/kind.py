"""The three kinds of state dict. No torch: files are converted from kind to kind without it."""

from __future__ import annotations

from enum import Enum

from sharding.errors import ArgumentError


class Kind(str, Enum):
    """The part that a rank has of every tensor of a state; all of one without dimensions."""

    FULL = "full"
    """The full tensor, like every other rank."""
    SHARDED = "sharded"
    """Its rows, or the part that a DTensor's placements give it."""
    LOCAL = "local"
    """Its part as it is in memory: in general a run of the row-major elements."""

    @classmethod
    def named(cls, name: str) -> Kind:
        """The kind of this name. Raises ArgumentError, which lists the kinds, where there is none.

        >>> Kind.named("full") is Kind.FULL
        True
        """
        for kind in cls:
            if kind.value == name:
                return kind
        raise ArgumentError(f"{name!r} is no kind of state; the kinds are {cls.names()}")

    @classmethod
    def names(cls) -> str:
        """All of them, for messages."""
        return ", ".join(kind.value for kind in cls)
