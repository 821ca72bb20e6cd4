"""Which names of a checkpoint or target are meant, by patterns in which `*` and `?` stand for text.

`*` is any text, dots too, and `?` one character. Every other character is itself: names of tensors
have brackets in them, which a shell's patterns would take for sets of characters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

_SHOWN = 3
_COMPARED = 10_000
"""Names that a mistyped one is compared with: it takes a second for a hundred thousand."""


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names a name.

    >>> matches("blk[0].*", "blk[0].w"), matches("blk[0].*", "blk0.w"), matches("blk?.w", "blk0.w")
    (True, False, True)
    """
    return fnmatchcase(name, pattern.replace("[", "[[]"))


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
        return any(matches(pattern, name) for pattern in self.include) and not any(
            matches(pattern, name) for pattern in self.exclude
        )

    @property
    def is_all(self) -> bool:
        """True when every name is in it."""
        return self.include == ("*",) and not self.exclude

    def check_chooses(self, names: Collection[str], where: str) -> None:
        """Raise ValueError where a pattern to include names nothing, or no name is left over.

        What was mistyped would choose nothing, and nothing is soon found to be as it should be.
        """
        if self.is_all:
            return
        for pattern in self.include:
            check_names_some(pattern, names, where)
        if names and not any(name in self for name in names):
            excluded = ", ".join(map(repr, self.exclude))
            raise ValueError(
                f"{where}: all {len(names)} names are excluded by {excluded}; exclude less"
            )


def check_names_some(
    pattern: str,
    names: Collection[str],
    where: str,
    names_it: Callable[[str, str], bool] = matches,
) -> None:
    """Raise ValueError where a pattern names none of these; it says which names come near."""
    if pattern == "*" or any(names_it(pattern, name) for name in names):
        return
    known = _parts_of(sorted(names))
    near = get_close_matches(pattern.rstrip("*?."), known, _SHOWN) or known[:_SHOWN]
    there = f"there are {', '.join(near)}" if near else "there are no names"
    raise ValueError(f"{where}: {pattern!r} matches no name; {there}; mend or omit the pattern")


def _parts_of(names: Collection[str]) -> list[str]:
    """The names of the branches and leaves of a tree of names, the upper ones first."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]))
        if len(found) > _COMPARED:
            break
    return sorted(found, key=lambda part: part.count("."))
