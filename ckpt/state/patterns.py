r"""Patterns of names, and renames: one syntax for include, exclude, rename and mapping files.

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
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from functools import lru_cache

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
            found = compiled.fullmatch(name)
            if found is not None:
                return found.expand(new) if is_expression(old) else fill(new, found.groups())
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
