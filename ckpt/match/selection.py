"""Which names of a checkpoint or target are meant, by patterns in which `*` and `?` stand for text.

Rules:

1. `*` is any text, dots too, and `?` one character. Every other character is itself: names of
   tensors have brackets in them, which a shell's patterns would take for sets of characters.
2. Each pattern matches a name, and the selection as a whole chooses one. A mistyped pattern would
   load, write or compare nothing, and nobody would see it.
3. Each verb says which names there are for rule 2: of a load those of the checkpoint and of all
   ranks' targets, of a comparison those of both checkpoints, else those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from sharding.errors import ArgumentError

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
    """Which names are meant: those that a pattern to include matches and none to exclude does."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]

    @classmethod
    def of(
        cls, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None
    ) -> Selection:
        """A selection from one pattern, several or none: none includes all and excludes nothing.

        Raises ArgumentError for an empty list of patterns to include, which selects nothing.
        """

        def patterns(given: str | Sequence[str] | None) -> tuple[str, ...]:
            return (given,) if isinstance(given, str) else tuple(given or ())

        if include is not None and not patterns(include):
            raise ArgumentError("include is an empty list, which selects nothing; omit it for all")
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

    def idle(self, names: Collection[str]) -> tuple[Claim, ...]:
        """What of this selection chooses none of these names: each pattern, or else the whole.

        >>> [str(claim) for claim in Selection.of("w*", "b*").idle(["w", "x"])]
        ["exclude='b*'"]
        >>> [str(claim) for claim in Selection.of("w*", "*").idle(["w", "x"])]
        ["include='w*', exclude='*'"]
        """
        each = [
            *(Claim((pattern,), ()) for pattern in self.include if pattern != "*"),
            *(Claim((), (pattern,)) for pattern in self.exclude),
        ]
        found = tuple(claim for claim in each if claim.is_idle(names))
        whole = Claim(self.include, self.exclude)
        return (whole,) if self.exclude and names and not found and whole.is_idle(names) else found

    def check_chooses(self, names: Collection[str], where: str) -> None:
        """Raise ArgumentError unless each pattern matches one of these names, and one is chosen."""
        idle = self.idle(names)
        if idle:
            said = "; ".join(f"{claim.role}: {claim.advice(names)}" for claim in idle)
            raise ArgumentError(f"{where}: {said}")


@dataclass(frozen=True, slots=True)
class Claim:
    """A part of a selection that has to choose a name: one pattern, or the selection as a whole."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]

    @property
    def role(self) -> str:
        """The argument that the patterns were given as."""
        return "exclude" if self.exclude else "include"

    def is_idle(self, names: Iterable[str]) -> bool:
        """Whether it chooses none of these names."""
        if self.include and self.exclude:
            chosen = Selection(self.include, self.exclude)
            return not any(name in chosen for name in names)
        [pattern] = self.include or self.exclude
        return not any(matches(pattern, name) for name in names)

    def advice(self, names: Collection[str]) -> str:
        """What is wrong, with the names that come near, and what to do."""
        if self.include and self.exclude:
            given = ", ".join(map(repr, self.exclude))
            count = len(_plain(names)) if self.include == ("*",) else "the included"
            return f"all {count} names are excluded by {given}; exclude less"
        [pattern] = self.include or self.exclude
        return no_name(pattern, names)

    def __str__(self) -> str:
        said = {"include": self.include, "exclude": self.exclude}
        return ", ".join(
            f"{role}={pattern!r}" for role, patterns in said.items() for pattern in patterns
        )


def no_name(pattern: str, names: Collection[str]) -> str:
    """Why a pattern is refused that matches none of these names; says which names come near."""
    known = _parts_of(_plain(names))
    near = get_close_matches(pattern.rstrip("*?."), known, _SHOWN) or known[:_SHOWN]
    there = f"there are {', '.join(near)}" if near else "there are no names"
    return f"{pattern!r} matches no name; {there}; mend or omit it"


def check_names_some(
    pattern: str, names: Collection[str], where: str, names_it: Callable[[str, str], bool]
) -> None:
    """Raise ArgumentError where a pattern names none of these; it says which names come near."""
    if pattern != "*" and not any(names_it(pattern, name) for name in names):
        raise ArgumentError(f"{where}: {no_name(pattern, names)}")


def _plain(names: Iterable[str]) -> list[str]:
    """The names, sorted; one that ends with a dot stands for whatever an object may have."""
    return sorted({name.rstrip(".") for name in names})


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
