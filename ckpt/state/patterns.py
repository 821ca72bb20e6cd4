r"""Patterns of names, renames and selections, in one syntax for all arguments and mapping files.

Rules:

1. A pattern with `*` and `?` matches the whole name: `*` any text, also dots, `?` one character.
   Every other character matches itself. Names of tensors contain brackets, which the patterns of a
   shell would read as sets.
2. A pattern between slashes, `/layers\.(\d+)\.w/`, is a regular expression of Python's `re` that
   matches the whole name.
3. A rename has an old and a new name. An old name without `*`, `?` or slashes is a name or a dotted
   prefix of names. After a pattern, each `*` and `?` of the new name stands for the text that the
   one at its place in the old name matched. After a regular expression, `\1` and `\g<name>` stand
   for its groups.
4. A name is renamed once: by the first pattern or regular expression that matches it, otherwise by
   the longest old name that is the name or a prefix of it. The empty old name puts a prefix before
   all other names.
5. Each pattern of a selection must match a name, and the whole selection must choose one. A
   mistyped pattern would otherwise load, write or compare nothing without notice.
6. Each verb defines the names for rule 5. A load takes those of the checkpoint and of all ranks'
   targets, a comparison those of both checkpoints, any other verb those of the checkpoint.
7. The argument dtype of a conversion has a dtype for all floats, or others for patterns of names:
   that of the first pattern that matches counts (`Casts`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, get_args

from ckpt.arguments import DtypeName
from formats.catalog import TensorRecord, Tree, join
from formats.dtypes import DType, dtype_of_torch
from sharding.errors import ArgumentError, ArgumentTypeError

Rename = Mapping[str, str] | Callable[[str], str]
"""Maps names of the checkpoint to names of the target: a function, or a dict (rules 3 and 4)."""

_WILD = re.compile(r"[*?]")


def matches(pattern: str, name: str) -> bool:
    r"""Whether a pattern matches a name.

    >>> matches("blk[0].*", "blk[0].w"), matches("blk[0].*", "blk0.w"), matches("blk?.w", "blk0.w")
    (True, False, True)
    >>> matches(r"/blk\d+\.w/", "blk12.w")
    True
    """
    return expression(pattern).fullmatch(name) is not None


def is_expression(pattern: str) -> bool:
    """Whether a pattern is a regular expression between slashes."""
    return len(pattern) > 2 and pattern[0] == pattern[-1] == "/"


def is_plain(pattern: str) -> bool:
    """Whether a pattern is a name, without `*`, `?` or slashes around it."""
    return not is_expression(pattern) and _WILD.search(pattern) is None


@lru_cache(4096)
def expression(pattern: str) -> re.Pattern[str]:
    """Returns the regular expression of a pattern, with a group for each `*` and `?`.

    Raises:
        ArgumentError: the text between slashes is no regular expression.
    """
    if is_expression(pattern):
        try:
            return re.compile(pattern[1:-1], re.DOTALL)
        except (re.error, OverflowError) as error:
            raise ArgumentError(f"{pattern!r} is no regular expression: {error}") from error
    parts = (f"({'.*' if at == '*' else '.'})" for at in _WILD.findall(pattern))
    return re.compile(
        "".join(
            re.escape(text) + wild
            for text, wild in zip(_WILD.split(pattern), [*parts, ""], strict=True)
        ),
        re.DOTALL,
    )


def check_rename(old: str, new: str) -> None:
    """Raises ArgumentError unless rule 3 has a meaning for a rename."""
    if is_expression(old):
        try:
            expression(old).sub(new, "")  # raises for a group that the expression lacks
        except (re.error, IndexError) as error:
            raise ArgumentError(f"{new!r} is no new name for {old!r}: {error}") from error
    elif not is_plain(old) and _WILD.findall(old) != _WILD.findall(new):
        raise ArgumentError(
            f"{old!r} cannot become {new!r}: each * and ? of the new name stands for the one at "
            "its place in the old name, so both have the same ones; a regular expression between "
            "slashes can change their order"
        )


def fill(pattern: str, texts: tuple[str, ...]) -> str:
    """Returns a pattern with texts in the place of its `*` and `?`.

    >>> fill("layers.*.w", ("3",))
    'layers.3.w'
    """
    left = iter(texts)
    return _WILD.sub(lambda _: next(left), pattern)


def renamer(rename: Rename | None) -> Callable[[str], str]:
    r"""Returns a function from names of the checkpoint to names of the target.

    Raises:
        ArgumentError: rule 3 has no meaning for an entry, or two entries have one old name.
        ArgumentTypeError: `rename` has another type, or returns another one.

    >>> renamer({"old": "new", "": "model"})("old.w"), renamer({"": "model"})("w")
    ('new.w', 'model.w')
    >>> renamer({"layers.*.w": "blocks.*.weight"})("layers.3.w")
    'blocks.3.weight'
    >>> renamer({r"/(.*)\.(\d+)/": r"\2.\1"})("w.3")
    '3.w'
    """
    if rename is None:
        return str
    if not isinstance(rename, Mapping):
        return _check_rename(rename)
    plain: dict[str, str] = {}
    for old, new in rename.items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise ArgumentTypeError(f"rename has {old!r:.80}: {new!r:.80}; names are text")
        check_rename(old, new)
        if is_plain(old) and plain.setdefault(old.rstrip("."), new.rstrip(".")) != new.rstrip("."):
            raise ArgumentError(f"rename has two new names for {old.rstrip('.')!r}; omit one")
    patterns = [(expression(old), old, new) for old, new in rename.items() if not is_plain(old)]

    def apply(name: str) -> str:
        for compiled, old, new in patterns:
            match = compiled.fullmatch(name)
            if match is not None:
                return match.expand(new) if is_expression(old) else fill(new, match.groups())
        prefix = prefix_in(plain, name)
        if prefix is None or prefix == name:
            return name if prefix is None else plain[prefix]
        rest = name[len(prefix) + 1 :] if prefix else name
        return f"{plain[prefix]}.{rest}" if plain[prefix] else rest

    return apply


def _check_rename(rename: Callable[[str], object]) -> Callable[[str], str]:
    """Returns the function of a user, with a check of its type and of its results."""
    if not callable(rename):
        raise ArgumentTypeError(
            f"rename is {rename!r:.80}; give a function, or a dict from old names to new ones"
        )

    def apply(name: str) -> str:
        new = rename(name)
        if not isinstance(new, str):
            raise ArgumentTypeError(
                f"rename({name!r}) returns {new!r:.80}; it must return the new name as text"
            )
        return new

    return apply


def prefix_in(table: Container[str], name: str) -> str | None:
    """Returns the longest key of a table that is a name or a dotted prefix of it; None if none is.

    >>> prefix_in({"a": 0, "a.b": 1}, "a.b.c"), prefix_in({"a": 0}, "ab"), prefix_in({"": 0}, "ab")
    ('a.b', None, '')
    """
    prefix = name
    while prefix not in table:
        if not prefix:
            return None
        prefix = prefix.rpartition(".")[0]
    return prefix


_SHOWN = 3
_COMPARED = 10_000
"""A mistyped name is compared with at most so many names: 100,000 would take a second."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The names that a pattern of `include` matches and no pattern of `exclude`."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    is_all: bool = field(init=False, repr=False, compare=False)
    """Whether the selection includes every name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_all", self.include == ("*",) and not self.exclude)

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
        return any(matches(pattern, name) for pattern in self.exclude)

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
        idle = tuple(claim for claim in each if claim.is_idle(names))
        whole = Claim(self.include, self.exclude)
        return (whole,) if self.exclude and names and not idle and whole.is_idle(names) else idle

    def check_chooses(self, names: Collection[str], where: str) -> None:
        """Raises ArgumentError unless each pattern matches a name and the selection chooses one."""
        idle = self.idle(names)
        if idle:
            problems = "; ".join(f"{claim.role}: {claim.advice(names)}" for claim in idle)
            raise ArgumentError(f"{where}: {problems}")


def _patterns(name: str, value: object) -> tuple[str, ...]:
    """Returns the patterns of an argument. Raises for one that is no text or no expression."""
    several = isinstance(value, Iterable) and not isinstance(value, str)
    patterns: list[str] = []
    for pattern in value if several else () if value is None else (value,):  # type: ignore[attr-defined]
        if not isinstance(pattern, str):
            raise ArgumentTypeError(
                f"{name} has {pattern!r:.80}; a pattern is text, and a regular expression stands "
                "between slashes: '/.*/'"
            )
        expression(pattern)
        patterns.append(pattern)
    return tuple(patterns)


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
            excluded = ", ".join(map(repr, self.exclude))
            count = len(_plain(names)) if self.include == ("*",) else "the included"
            return f"all {count} names are excluded by {excluded}; exclude less"
        [pattern] = self.include or self.exclude
        return no_name(pattern, names)

    def __str__(self) -> str:
        arguments = {"include": self.include, "exclude": self.exclude}
        return ", ".join(
            f"{role}={pattern!r}" for role, patterns in arguments.items() for pattern in patterns
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
        entries = [(key, join(path, key), item) for key, item in tree.items()]
        return {
            key: map_selected(item, selection, leaf, name)
            for key, name, item in entries
            if selection.is_all or is_selected(item, name, selection)
        }
    if isinstance(tree, list | tuple):
        named = [(join(path, index), item) for index, item in enumerate(tree)]
        items = [
            map_selected(item, selection, leaf, name)
            if selection.is_all or is_selected(item, name, selection)
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


FLOATS = ("F64", "F32", "F16", "BF16")
"""The floats that are cast. Smaller ones mean little without their scales."""


@dataclass(frozen=True, slots=True)
class Casts:
    """The dtype of each name: that of the first pattern that matches it; None keeps the stored."""

    patterns: tuple[tuple[str, DType | None], ...]

    @classmethod
    def of(cls, dtype: str | Mapping[str, str | None] | None) -> Casts:
        """Makes the casts of a caller's `dtype`: one name, or patterns with a name each.

        Raises:
            ArgumentError: weights cannot be cast to a dtype, or a pattern has no meaning.

        >>> casts = Casts.of({"*.norm.weight": "float32", "*": "bfloat16"})
        >>> str(casts.of_name("a.norm.weight")), str(casts.of_name("a.weight"))
        ('float32', 'bfloat16')
        """
        every: dict[str, object] = {} if dtype is None else {"*": dtype}
        dtypes = {**dtype} if isinstance(dtype, Mapping) else every
        for pattern in dtypes:
            expression(pattern)  # raises for a regular expression that is none
        return cls(tuple((pattern, _check_dtype(name)) for pattern, name in dtypes.items()))

    @property
    def of_all(self) -> DType | None:
        """The dtype of all floats; None if they keep theirs, or get several."""
        dtypes = {dtype for _, dtype in self.patterns}
        is_for_all = any(pattern == "*" for pattern, _ in self.patterns)
        return dtypes.pop() if is_for_all and len(dtypes) == 1 else None

    def of_name(self, name: str) -> DType | None:
        """Returns the dtype to which a tensor of floats is cast; None if it stays as it is."""
        return next((dtype for pattern, dtype in self.patterns if matches(pattern, name)), None)

    def names(self, name: str) -> bool:
        """Whether another pattern than `*` decides on a name."""
        found = next((pattern for pattern, _ in self.patterns if matches(pattern, name)), "*")
        return found != "*"

    def written_dtype(self, name: str, record: TensorRecord) -> DType:
        """Returns the dtype with which a tensor is written under a name."""
        target = self.of_name(name)
        return target if target is not None and record.dtype.name in FLOATS else record.dtype

    def check_all_match(self, names: Iterable[str], where: str) -> None:
        """Raises ArgumentError for a pattern that matches no name."""
        patterns = [pattern for pattern, _ in self.patterns if pattern != "*"]
        there = list(names) if patterns else []
        for pattern in patterns:
            if not any(matches(pattern, name) for name in there):
                raise ArgumentError(f"{where}: dtype: {no_name(pattern, there)}")


NO_CASTS = Casts(())


def _check_dtype(name: object) -> DType | None:
    if name is None:
        return None
    if not isinstance(name, str) or name.removeprefix("torch.") not in get_args(DtypeName):
        raise ArgumentError(
            f"floating-point tensors cannot be cast to {name!r}; give dtype= as one of the names "
            f"{', '.join(get_args(DtypeName))}"
        )
    return dtype_of_torch(name, "dtype=")
