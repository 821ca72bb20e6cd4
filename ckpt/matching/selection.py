"""Which names of a checkpoint or target are meant, by shell patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of the target's names to load."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]

    @classmethod
    def of(
        cls, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None
    ) -> Selection:
        """A selection from one pattern, several or none: none includes all and excludes nothing."""

        def patterns(given: str | Sequence[str] | None) -> tuple[str, ...]:
            return (given,) if isinstance(given, str) else tuple(given or ())

        return cls(("*",) if include is None else patterns(include), patterns(exclude))

    def __contains__(self, name: str) -> bool:
        if self.is_all:
            return True
        return any(fnmatchcase(name, pattern) for pattern in self.include) and not any(
            fnmatchcase(name, pattern) for pattern in self.exclude
        )

    @property
    def is_all(self) -> bool:
        """True when every name is in it."""
        return self.include == ("*",) and not self.exclude
