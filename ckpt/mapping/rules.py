"""The rules of a mapping as values, and their inverse.

A rule says that the tensors of some names, on the left, are the tensors of other names, on the
right. A rule without a rearrangement renames, with the words of `ckpt.state.patterns`. In a rule
with one, names have `*` and `?` too, and axes in braces (`ckpt.mapping.rearrange`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ckpt.mapping.rearrange import PARTS, Rearrange, axes_of, check_axes
from ckpt.state.patterns import check_rename, is_expression
from formats.catalog import join
from sharding.errors import ArgumentError

__all__ = ["TensorMapping"]

Size = int | str
"""A number, or numbers and parameters with `*` and `/` between, as in `heads / kv_heads`."""

_AXIS = re.compile(r"\{([A-Za-z_][A-Za-z_0-9]*)\}")
_WILD = re.compile(r"[*?]")


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors by their names in the source and in the target of a conversion."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    rearrange: Rearrange | None = None
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """The sizes of axes. An axis with the name of a parameter has its value."""
    parts: tuple[Size, ...] = ()
    """The ratio of the sizes along `*` of a list of names; empty if they are equal."""
    optional: bool = False
    """Whether the checkpoint may lack the rule's names."""
    where: str = ""
    """The place of the rule for errors: the mapping and the number of the rule."""

    def __post_init__(self) -> None:
        if self.rearrange is None:
            self._check_rename()
        else:
            self._check_tensors(self.rearrange)

    @property
    def inverse(self) -> Rule:
        """The rule from its targets to its sources.

        Raises:
            ArgumentError: the rule has a regular expression.
        """
        if is_expression(self.sources[0]):
            raise ArgumentError(
                f"{self.where}: a regular expression has no inverse: write the rule with `*`, or a "
                "second mapping for the way back"
            )
        turned = self.rearrange.inverse if self.rearrange is not None else None
        return replace(self, sources=self.targets, targets=self.sources, rearrange=turned)

    def _check_rename(self) -> None:
        if len(self.sources) != 1 or len(self.targets) != 1:
            raise ArgumentError(
                f"{self.where}: a rule with a list of names needs rearrange, for example "
                '"* ... -> * ..."'
            )
        if self.sizes or self.parts:
            raise ArgumentError(f"{self.where}: sizes and parts need rearrange")
        try:
            check_rename(self.sources[0], self.targets[0])
        except ArgumentError as error:
            raise ArgumentError(f"{self.where}: {error}") from error

    def _check_tensors(self, rearrange: Rearrange) -> None:
        names = (*self.sources, *self.targets)
        for name in names:
            if is_expression(name):
                raise ArgumentError(
                    f"{self.where}: {name!r}: a rule with rearrange has no regular expressions; "
                    "write `*` and `{axis}`"
                )
            if _WILD.findall(name) != _WILD.findall(names[0]):
                raise ArgumentError(
                    f"{self.where}: {names[0]!r} and {name!r} have different `*` and `?`; each "
                    "stands for one text in all names of the rule"
                )
        if len(self.sources) > 1 and len(self.targets) > 1:
            raise ArgumentError(f"{self.where}: only one side of a rule can be a list of names")
        lists = max(len(self.sources), len(self.targets))
        parts_are_there = {PARTS in axes_of(side) for side in (rearrange.left, rearrange.right)}
        if parts_are_there != {lists > 1}:
            raise ArgumentError(
                f"{self.where}: `{rearrange}` has `*` on both sides if and only if the rule has a "
                "list of names"
            )
        if self.parts and len(self.parts) != lists:
            raise ArgumentError(f"{self.where}: {len(self.parts)} parts for {lists} names")
        left, right = (self._axes_in(side) for side in (self.sources, self.targets))
        check_axes(rearrange, left, right, self.where)
        unknown = sorted({*self.sizes} - {*axes_of(rearrange.left), *left})
        if unknown:
            raise ArgumentError(f"{self.where}: sizes has {', '.join(unknown)}, which is no axis")

    def _axes_in(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the axes in braces of a side; all of its names have the same."""
        axes = name_axes(names[0])
        for name in names:
            if sorted(name_axes(name)) != sorted(set(axes)):
                raise ArgumentError(
                    f"{self.where}: {names[0]!r} and {name!r} have different axes in braces, or "
                    "one of them twice"
                )
        return axes


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """The rules for all tensors of a checkpoint: `ckpt.mapping.parse` reads them from a file."""

    name: str
    """The name of the mapping for errors and reports."""
    rules: tuple[Rule, ...]
    exclude: tuple[str, ...] = ()
    """Patterns of names to leave out, in both directions, whether there are any or not."""
    strict: bool = False
    """Whether a tensor that no rule names is an error. Otherwise it keeps its name."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that a checkpoint of tied weights may lack -> the names with which they are tied."""
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameter -> keys of a Hugging Face `config.json` that have its value; the first counts."""

    @property
    def size_names(self) -> frozenset[str]:
        """The names that a parameter can have: declared ones, axes, and those in sizes."""
        found = set(self.parameters)
        for rule in self.rules:
            if rule.rearrange is not None:
                found.update(axes_of(rule.rearrange.left), axes_of(rule.rearrange.right))
            for size in (*rule.sizes.values(), *rule.parts):
                found.update(parameters_in(size))
        return frozenset(found - {PARTS})

    def inverse(self, name: str | None = None) -> TensorMapping:
        """Returns the mapping from the targets to the sources, which adds no tied names.

        Raises:
            ArgumentError: a rule has a regular expression.
        """
        turned = tuple(rule.inverse for rule in self.rules)
        title = name or f"the inverse of {self.name}"
        return replace(self, name=title, rules=turned, tied={})

    def below(self, prefix: str) -> TensorMapping:
        """Returns the mapping whose new names have a prefix and a dot before them.

        For a target such as `{"model": model}`. Names without a rule have no prefix.
        """
        rules = [
            replace(rule, targets=tuple(join(prefix, target) for target in rule.targets))
            for rule in self.rules
        ]
        return replace(self, rules=tuple(rules))


def name_axes(name: str) -> tuple[str, ...]:
    """Returns the axes in braces of a name.

    >>> name_axes("layers.*.experts.{expert}.w1")
    ('expert',)
    """
    return tuple(_AXIS.findall(name))


def parameters_in(size: Size) -> list[str]:
    """Returns the parameters in a size."""
    return re.findall(r"[A-Za-z_]\w*", str(size))


def value_of(size: Size, parameters: Mapping[str, int], where: str) -> int:
    """Returns the value of a size.

    Raises:
        ArgumentError: the text has another form, a parameter has no value, or a division has a
            remainder.

    >>> value_of("heads / kv_heads", {"heads": 32, "kv_heads": 8}, "rule 1")
    4
    """
    value, dividing = 1, False
    terms = re.split(r"\s*([*/])\s*", str(size).strip())
    for term in terms:
        if term in ("*", "/"):
            dividing = term == "/"
            continue
        number = int(term) if term.isdecimal() else parameters.get(term)
        if number is None:
            raise ArgumentError(
                f"{where}: {term!r} has no value; give it with parameters={{'{term}': NUMBER}}, "
                "or convert from a folder with a config.json"
            )
        if number < 1 or (dividing and value % number):
            raise ArgumentError(f"{where}: {size!r} is no whole number: {value} / {number}")
        value = value // number if dividing else value * number
    return value


@lru_cache(4096)
def names_matching(name: str) -> re.Pattern[str]:
    """Returns the expression of a rule's name: a group for each `*` and `?`, named ones for axes.

    >>> names_matching("layers.*.w{e}").fullmatch("layers.a.b.w12").groups()
    ('a.b', '12')
    """
    parts = []
    for text in re.split(r"([*?]|\{[A-Za-z_][A-Za-z_0-9]*\})", name):
        axis = _AXIS.fullmatch(text)
        if axis is not None:
            parts.append(f"(?P<{axis[1]}>0|[1-9][0-9]{{0,8}})")
        else:
            parts.append({"*": "(.*)", "?": "(.)"}.get(text, re.escape(text)))
    return re.compile("".join(parts), re.DOTALL)


def name_with(name: str, texts: tuple[str, ...], indices: Mapping[str, int]) -> str:
    """Returns a rule's name with texts in the place of `*` and `?`, and indices in that of axes.

    >>> name_with("layers.*.experts.{expert}.w1", ("3",), {"expert": 0})
    'layers.3.experts.0.w1'
    """
    left = iter(texts)
    return re.sub(
        r"[*?]|\{([A-Za-z_][A-Za-z_0-9]*)\}",
        lambda found: str(indices[found[1]]) if found[1] else next(left),
        name,
    )
