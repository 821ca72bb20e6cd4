"""The rules of a mapping as values, their inverse, and the files that they are read from.

A rule says that the tensors of some names, on the left, are the tensors of other names, on the
right. A rule without a rearrangement renames, with the words of `ckpt.state.patterns`. In a rule
with one, names have `*` and `?` too, and axes in braces. The notation of a rearrangement is that of
einops, `(heads two half) ... -> (heads half two) ...`:

1. A dimension is an axis, or axes in parentheses, the last the fastest. `...` stands for all other
   dimensions. Both sides have the same axes, each once.
2. Names of tensors may have axes in braces: `experts.{expert}.w1` stands for the tensors 0, 1, 2 …
   along the axis `expert`, which its side of the arrow therefore does not have.
3. A parameter in angle brackets stands for its number in a name: `layers.<layers>.eh_proj`.
4. `*` is the axis along which the names of a list lie: `* ... -> * ...` is `torch.cat`, and
   `(groups *) ... -> (groups *) ...` takes rows of each tensor in turn.

A mapping file is TOML, or JSON with the same keys:

    strict = true
    exclude = ["*.rotary_emb.inv_freq"]
    tied = { "lm_head.weight" = "model.embed_tokens.weight" }

    [parameters]
    heads = "num_attention_heads"

    [[rule]]
    from = "model.layers.*.self_attn.q_proj.weight"
    to = "layers.*.attention.wq.weight"
    rearrange = "(heads two half) ... -> (heads half two) ..."
    sizes = { two = 2 }

docs/converting.md has every key. Unknown keys are errors.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TypeVar

from ckpt.state.patterns import check_rename, is_expression
from formats.catalog import join
from formats.errors import FormatError
from formats.limits import decode_object
from sharding.errors import ArgumentError
from sharding.layout import Shape

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
    requires: tuple[str, ...] = ()
    """Names of which the checkpoint has to have one, with the same texts; no condition if empty."""
    where: str = ""
    """The place of the rule for errors: the mapping and the number of the rule."""

    def __post_init__(self) -> None:
        wild = _WILD.findall(self.sources[0])
        odd = [name for name in self.requires if _WILD.findall(name) != wild or name_axes(name)]
        if odd or (self.requires and (not wild or is_expression(self.sources[0]))):
            raise ArgumentError(
                f"{self.where}: `requires` is {', '.join(self.requires)}: it has no axes in braces"
                f", and the same `*` and `?` as {self.sources[0]!r}, at least one"
            )
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
    """The rules for all tensors of a checkpoint: `ckpt.mapping.rules` reads them from a file."""

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
    model_types: tuple[str, ...] = ()
    """The `model_type`s, in a `config.json`, of the Hugging Face folders that the mapping reads."""

    @property
    def size_names(self) -> frozenset[str]:
        """The names that a parameter can have: declared ones, axes, and those in sizes."""
        names = set(self.parameters)
        for rule in self.rules:
            if rule.rearrange is not None:
                names.update(axes_of(rule.rearrange.left), axes_of(rule.rearrange.right))
            for size in (*rule.sizes.values(), *rule.parts):
                names.update(parameters_in(size))
        return frozenset(names - {PARTS})

    def inverse(self, name: str | None = None) -> TensorMapping:
        """Returns the mapping from the targets to the sources, which adds no tied names.

        Raises:
            ArgumentError: a rule has a regular expression.
        """
        turned = tuple(rule.inverse for rule in self.rules)
        title = name or f"the inverse of {self.name}"
        return replace(self, name=title, rules=turned, tied={})

    def with_numbers(self, parameters: Mapping[str, int]) -> TensorMapping:
        """Returns the mapping with numbers in the place of its parameters in names.

        Raises:
            ArgumentError: a parameter in the name of a rule that is not optional has no value.
        """
        rules = []
        for rule in self.rules:
            for key in self.parameters:
                sign, number = f"<{key}>", str(parameters.get(key, ""))
                if sign not in rule.sources[0] + rule.targets[0]:
                    continue
                if number or not rule.optional:
                    value_of(key, parameters, rule.where)
                    sources, targets = (
                        tuple(name.replace(sign, number) for name in names)
                        for names in (rule.sources, rule.targets)
                    )
                    rule = replace(rule, sources=sources, targets=targets)
            rules.append(rule)
        return replace(self, rules=tuple(rules))

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


ELLIPSIS = "..."
PARTS = "*"
"""The axis along which the names of a list lie."""

Dims = tuple[tuple[str, ...], ...]
"""The axes of each dimension."""

_TOKEN = re.compile(r"\s*(\.\.\.|\*|\(|\)|[A-Za-z_][A-Za-z_0-9]*|\S)")
_WORD = re.compile(r"\*|[A-Za-z_][A-Za-z_0-9]*")


@dataclass(frozen=True, slots=True)
class Rearrange:
    """The dimensions of the tensors on both sides of the arrow."""

    left: Dims
    right: Dims

    @classmethod
    def parse(cls, text: str, where: str) -> Rearrange:
        """Returns the rearrangement that a text describes.

        Raises:
            ArgumentError: the text breaks rule 1, apart from axes in names. `where` names the rule.

        >>> Rearrange.parse("(heads two) i -> two heads i", "rule 1").right
        (('two',), ('heads',), ('i',))
        """
        sides = text.split("->")
        if len(sides) != 2:
            raise ArgumentError(f"{where}: {text!r} is no rearrangement: write one `->`")
        left, right = (_dims(side, f"{where}: {text!r}") for side in sides)
        if ((ELLIPSIS,) in left) != ((ELLIPSIS,) in right):
            raise ArgumentError(f"{where}: {text!r} has `...` on one side of the arrow only")
        return cls(left, right)

    @property
    def inverse(self) -> Rearrange:
        """The rearrangement from the right to the left."""
        return Rearrange(self.right, self.left)

    def __str__(self) -> str:
        return f"{_text(self.left)} -> {_text(self.right)}"


def _dims(text: str, where: str) -> Dims:
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(text):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group:
            dims.append(tuple(group))
            group = None
        elif token == ELLIPSIS and group is None:
            dims.append((ELLIPSIS,))
        elif _WORD.fullmatch(token):
            if group is None:
                dims.append((token,))
            else:
                group.append(token)
        else:
            raise ArgumentError(f"{where} is no rearrangement: {token!r} has no meaning there")
    if group is not None:
        raise ArgumentError(f"{where} is no rearrangement: a parenthesis is not closed")
    flat = [axis for dim in dims for axis in dim]
    twice = next((axis for axis in flat if flat.count(axis) > 1), None)
    if twice is not None:
        raise ArgumentError(f"{where} has the axis {twice} twice on one side")
    return tuple(dims)


def axes_of(dims: Dims) -> tuple[str, ...]:
    return tuple(axis for dim in dims for axis in dim if axis != ELLIPSIS)


def with_rank(dims: Dims, rank: int, where: str) -> Dims:
    """Returns the dimensions of a tensor of this rank, with axes in the place of `...`.

    Raises:
        ArgumentError: no tensor of this rank has these dimensions.

    >>> with_rank((("a",), ("...",)), 3, "w")
    (('a',), ('...0',), ('...1',))
    """
    extra = rank - sum(dim != (ELLIPSIS,) for dim in dims)
    if extra < 0 or (extra and (ELLIPSIS,) not in dims):
        raise ArgumentError(f"{where} has {rank} dimensions, the rule has `{_text(dims)}`")
    return expand(dims, extra)


def expand(dims: Dims, extra: int) -> Dims:
    """Returns the dimensions with so many axes in the place of `...`."""

    def each() -> Iterator[tuple[str, ...]]:
        for dim in dims:
            if dim == (ELLIPSIS,):
                yield from ((f"{ELLIPSIS}{number}",) for number in range(extra))
            else:
                yield dim

    return tuple(each())


def sizes_of(dims: Dims, shape: Shape, known: Mapping[str, int], where: str) -> dict[str, int]:
    """Returns the size of each axis of a tensor of this shape.

    Raises:
        ArgumentError: a known size does not divide its dimension, or two sizes are unknown.

    >>> sizes_of((("heads", "half"), ("i",)), (8, 3), {"heads": 2}, "w")
    {'heads': 2, 'half': 4, 'i': 3}
    """
    by_axis: dict[str, int] = {}
    for dim, size in zip(dims, shape, strict=True):
        unknown = [axis for axis in dim if axis not in known]
        if len(unknown) > 1:
            raise ArgumentError(
                f"{where}: a dimension of {size} is ({' '.join(dim)}), and the sizes of "
                f"{' and '.join(unknown)} are unknown; give all but one: with "
                f"parameters={{'{unknown[0]}': NUMBER}}, by a config.json beside the "
                "checkpoint, or in `sizes` of the rule"
            )
        others = prod(known[axis] for axis in dim if axis in known)
        rest = size // others if others and unknown else 1
        if others * rest != size:
            sizes = ", ".join(f"{axis} = {known[axis]}" for axis in dim if axis in known)
            raise ArgumentError(
                f"{where}: a dimension of {size} of shape {list(shape)} is not ({' '.join(dim)}) "
                f"with {sizes}"
            )
        by_axis.update({axis: known.get(axis, rest) for axis in dim})
    return by_axis


def check_axes(
    rearrange: Rearrange, left: Collection[str], right: Collection[str], where: str
) -> None:
    """Raises ArgumentError unless both sides have the same axes, with those in the names."""
    sides = (rearrange.left, left, "left"), (rearrange.right, right, "right")
    for dims, named, side in sides:
        both = next((axis for axis in axes_of(dims) if axis in named), None)
        if both is not None:
            raise ArgumentError(f"{where}: {{{both}}} is in a name of the {side} and in its shape")
    here, there = ({*axes_of(dims), *named} for dims, named, _ in sides)
    lone = sorted(here ^ there)
    if lone:
        raise ArgumentError(
            f"{where}: `{rearrange}` has {', '.join(lone)} on one side only: both sides must have "
            "the "
            "same axes, in the shapes or in braces in the names"
        )


def _text(dims: Dims) -> str:
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEYS = ("about", "strict", "exclude", "tied", "parameters", "rule", "model_types")
_RULE_KEYS = ("from", "to", "rearrange", "sizes", "parts", "optional", "requires")


def read_mapping_file(path: str | os.PathLike[str]) -> TensorMapping:
    """Returns the mapping in a file.

    Raises:
        ArgumentError: no file is there, or its text is no mapping. The message names the rule.
    """
    place = Path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{place}: no mapping file: {error}") from error
    return parse_mapping(text, str(place), is_json=place.suffix == ".json")


def parse_mapping(text: str, name: str, is_json: bool = False) -> TensorMapping:
    """Returns the mapping in a text. Raises ArgumentError as `read_mapping_file` does."""
    try:
        found = decode_object(text, name) if is_json else tomllib.loads(text)
    except (FormatError, tomllib.TOMLDecodeError) as error:
        raise ArgumentError(f"{name}: {error}") from error
    top = _Table(found, name, _KEYS)
    rules = top.get("rule", list)
    if not rules:
        raise ArgumentError(f"{name}: a mapping needs at least one [[rule]]")
    if not all(isinstance(rule, dict) for rule in rules):
        raise top._wrong("rule", "a list of tables: [[rule]]")
    parameters, tied = top.get("parameters", dict), top.get("tied", dict)
    return TensorMapping(
        name,
        tuple(_rule(rule, f"{name}: rule {number}") for number, rule in enumerate(rules, 1)),
        top.texts("exclude"),
        top.get("strict", bool),
        {key: _Table(tied, f"{name}: tied", ()).get(key, str) for key in tied},
        {key: _Table(parameters, f"{name}: parameters", ()).texts(key) for key in parameters},
        top.texts("model_types"),
    )


def _rule(found: Mapping[str, object], where: str) -> Rule:
    table = _Table(found, where, _RULE_KEYS)
    for key in ("from", "to"):
        if key not in found:
            raise ArgumentError(f"{where}: `{key}` is missing")
    pattern = table.get("rearrange", str)
    return Rule(
        table.texts("from"),
        table.texts("to"),
        Rearrange.parse(pattern, where) if pattern else None,
        {key: _size(size, f"{where}: sizes") for key, size in table.get("sizes", dict).items()},
        tuple(_size(size, f"{where}: parts") for size in table.get("parts", list)),
        table.get("optional", bool),
        table.texts("requires"),
        where,
    )


T = TypeVar("T")
_WORDS = {str: "a text", bool: "true or false", list: "a list", dict: "a table"}


class _Table:
    """The values of a table, checked."""

    def __init__(self, found: Mapping[str, object], where: str, keys: tuple[str, ...]) -> None:
        self._found = found
        self._where = where
        unknown = sorted(set(found) - set(keys)) if keys else []
        if unknown:
            raise ArgumentError(
                f"{where}: {', '.join(unknown)}: unknown; the keys are {', '.join(keys)}"
            )

    def texts(self, key: str) -> tuple[str, ...]:
        """Returns one text or a list of them."""
        value = self._found.get(key, [])
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self._wrong(key, "a text or a list of texts")
        if key in self._found and not items:
            raise self._wrong(key, "at least one text")
        return tuple(items)

    def get(self, key: str, kind: type[T]) -> T:
        """Returns a value of this kind; an empty one, or False, if the key is missing."""
        value = self._found.get(key, kind())
        if not isinstance(value, kind):
            raise self._wrong(key, _WORDS[kind])
        return value

    def _wrong(self, key: str, wanted: str) -> ArgumentError:
        value = self._found.get(key)
        return ArgumentError(f"{self._where}: `{key}` is {value!r:.80}; it is {wanted}")


def _size(value: object, where: str) -> Size:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ArgumentError(f"{where}: {value!r:.80} is no number and no text such as 'heads / 2'")
