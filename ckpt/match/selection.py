"""Selects names of a checkpoint or target by patterns.

Rules:

1. `ckpt.state.patterns` defines the patterns: `*` and `?`, or a regular expression between slashes.
2. Each pattern must match a name, and the whole selection must choose one. A mistyped pattern would
   otherwise load, write or compare nothing without notice.
3. Each verb defines the names for rule 2. A load takes those of the checkpoint and of all ranks'
   targets, a comparison those of both checkpoints, any other verb those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ckpt.state.patterns import expression, matches
from formats.catalog import Tree, join
from sharding.errors import ArgumentError, ArgumentTypeError

_SHOWN = 3
_COMPARED = 10_000
"""A mistyped name is compared with at most so many names: 100,000 would take a second."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The names that a pattern of `include` matches and no pattern of `exclude`."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]

    @classmethod
    def of(
        cls, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None
    ) -> Selection:
        """Makes a selection of one pattern, several, or None: all names, or none to exclude.

        Raises:
            ArgumentError: `include` is an empty list, or a regular expression is none.
            ArgumentTypeError: a pattern is no text.
        """
        included, excluded = _patterns("include", include), _patterns("exclude", exclude)
        if include is not None and not included:
            raise ArgumentError("include is an empty list, which selects nothing; omit it for all")
        return cls(("*",) if include is None else included, excluded)

    def __contains__(self, name: str) -> bool:
        if self.is_all:
            return True
        return any(matches(pattern, name) for pattern in self.include) and not self.excludes(name)

    def excludes(self, name: str) -> bool:
        """Whether a pattern of `exclude` matches a name."""
        return any(matches(pattern, name) for pattern in self.exclude)

    @property
    def is_all(self) -> bool:
        """Whether the selection includes every name."""
        return self.include == ("*",) and not self.exclude

    def idle(self, names: Collection[str]) -> tuple[Claim, ...]:
        """Returns the patterns that match none of these names, or the selection if it chooses none.

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
        """Raises ArgumentError unless each pattern matches a name and the selection chooses one."""
        idle = self.idle(names)
        if idle:
            said = "; ".join(f"{claim.role}: {claim.advice(names)}" for claim in idle)
            raise ArgumentError(f"{where}: {said}")


def _patterns(name: str, given: object) -> tuple[str, ...]:
    """Returns the patterns of an argument. Raises for one that is no text or no expression."""
    several = isinstance(given, Iterable) and not isinstance(given, str)
    found: list[str] = []
    for pattern in given if several else () if given is None else (given,):  # type: ignore[attr-defined]
        if not isinstance(pattern, str):
            raise ArgumentTypeError(
                f"{name} has {pattern!r:.80}; a pattern is text, and a regular expression stands "
                "between slashes: '/.*/'"
            )
        expression(pattern)
        found.append(pattern)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Claim:
    """A part of a selection that must choose a name: one pattern, or the whole selection."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]

    @property
    def role(self) -> str:
        """The argument with the patterns."""
        return "exclude" if self.exclude else "include"

    def is_idle(self, names: Iterable[str]) -> bool:
        """Whether the claim chooses none of these names."""
        if self.include and self.exclude:
            chosen = Selection(self.include, self.exclude)
            return not any(name in chosen for name in names)
        [pattern] = self.include or self.exclude
        return not any(matches(pattern, name) for name in names)

    def advice(self, names: Collection[str]) -> str:
        """Returns the problem, with similar names, and the remedy."""
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


def is_selected(tree: Tree, path: str, selection: Selection) -> bool:
    """Whether the selection includes a leaf, or a name below a container."""
    if selection.is_all:
        return True
    if isinstance(tree, dict) and tree:
        return any(is_selected(item, join(path, key), selection) for key, item in tree.items())
    if isinstance(tree, list | tuple) and tree:
        return path in selection or any(
            is_selected(item, join(path, i), selection) for i, item in enumerate(tree)
        )
    return path in selection


def map_selected(
    tree: Tree, selection: Selection, leaf: Callable[[Tree, str], object], path: str = ""
) -> Any:
    """Returns the selected part of a tree, with `leaf(node, name)` in the place of each leaf.

    A dict lacks its unselected entries, and a list has None for them.

    >>> map_selected({"a": 1, "b": [2, 3]}, Selection.of("b.1", None), lambda node, name: name)
    {'b': [None, 'b.1']}
    """
    if isinstance(tree, dict):
        return {
            key: map_selected(item, selection, leaf, join(path, key))
            for key, item in tree.items()
            if is_selected(item, join(path, key), selection)
        }
    if isinstance(tree, list | tuple):
        named = [(join(path, index), item) for index, item in enumerate(tree)]
        items = [
            map_selected(item, selection, leaf, name)
            if is_selected(item, name, selection)
            else None
            for name, item in named
        ]
        return items if isinstance(tree, list) else tuple(items)
    return leaf(tree, path)


def no_name(pattern: str, names: Collection[str]) -> str:
    """Returns the problem of a pattern that matches none of these names, with similar names."""
    known = _parts_of(_plain(names))
    near = get_close_matches(pattern.rstrip("*?."), known, _SHOWN) or known[:_SHOWN]
    there = f"there are {', '.join(near)}" if near else "there are no names"
    return f"{pattern!r} matches no name; {there}; correct or omit the pattern"


def check_names_some(
    pattern: str, names: Collection[str], where: str, names_it: Callable[[str, str], bool]
) -> None:
    """Raises ArgumentError, with similar names, if a pattern names none of these."""
    if pattern != "*" and not any(names_it(pattern, name) for name in names):
        raise ArgumentError(f"{where}: {no_name(pattern, names)}")


def _plain(names: Iterable[str]) -> list[str]:
    """Returns the names, sorted. A name with a final dot stands for all entries of an object."""
    return sorted({name.rstrip(".") for name in names})


def _parts_of(names: Collection[str]) -> list[str]:
    """Returns the names of the branches and leaves of a tree of names, upper ones first."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]))
        if len(found) > _COMPARED:
            break
    return sorted(found, key=lambda part: part.count("."))
