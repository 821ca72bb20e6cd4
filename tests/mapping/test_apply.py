"""A mapping changes names and shapes as numpy does, and its inverse gives the catalog back."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.mapping.apply import Mapped, map_catalog
from ckpt.mapping.rules import Dims, Rearrange, Rule, TensorMapping, parse_mapping
from formats.catalog import Catalog, TensorRef, Tree
from formats.dtypes import BY_NAME
from sharding.errors import ArgumentError
from tests.mapping.catalogs import catalog_of, numbered, read
from tests.selection import examples

AXES = ("a", "b", "c")


@dataclass(frozen=True)
class Case:
    """One rule, the sizes of its axes, and those of `*` in each name of the list."""

    rule: Rule
    sizes: dict[str, int]
    parts: tuple[int, ...]

    def arrays(self, names: tuple[str, ...], dims: Dims) -> dict[str, np.ndarray]:
        """What numpy makes of one numbered array over all axes, on one side of the rule."""
        sizes = self.sizes | {"*": sum(self.parts)}
        axes = [axis for axis in (*AXES, "e", "*") if axis in sizes and (axis != "*" or self.parts)]
        whole = numbered(*(sizes[axis] for axis in axes))
        found = {}
        ends = np.cumsum([0, *self.parts])
        stacked = [axis for axis in axes if f"{{{axis}}}" in names[0]]
        for number, name in enumerate(names):
            for index in product(*(range(sizes[axis]) for axis in stacked)):
                part = whole
                if len(names) > 1:
                    part = part[..., ends[number] : ends[number + 1]]
                place = dict(zip(stacked, index, strict=True))
                part = part[tuple(place.get(axis, slice(None)) for axis in axes)]
                rest = [axis for axis in axes if axis not in stacked]
                flat = [axis for dim in dims for axis in dim]
                part = part.transpose([rest.index(axis) for axis in flat])
                shape = iter(part.shape)
                part = part.reshape([prod(next(shape) for _ in dim) for dim in dims])
                found[name.format(**place)] = part
        return found


@st.composite
def grouped(draw: st.DrawFn, axes: list[str]) -> Dims:
    """The axes in a random order, some merged into one dimension."""
    order = draw(st.permutations(axes))
    dims: list[tuple[str, ...]] = []
    for axis in order:
        if dims and draw(st.booleans()):
            dims[-1] = (*dims[-1], axis)
        else:
            dims.append((axis,))
    return tuple(dims)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A rule: rearranged axes, perhaps a list of names, perhaps an axis in a name."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    parts = tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))) * draw(st.booleans())
    stacked_left, stacked_right = draw(st.booleans()), draw(st.booleans())
    if stacked_left or stacked_right:
        sizes["e"] = draw(st.integers(1, 3))
    every = [*AXES, *(["*"] if parts else [])]
    left = draw(grouped([*every, *(["e"] if stacked_right and not stacked_left else [])]))
    right = draw(grouped([*every, *(["e"] if stacked_left and not stacked_right else [])]))
    many = tuple(f"s{number}" for number in range(len(parts))) or ("s",)
    sources = tuple(f"{name}{'.{e}' if stacked_left else ''}" for name in many)
    targets = (f"t{'.{e}' if stacked_right else ''}",)
    rule = Rule(sources, targets, Rearrange(left, right), sizes, parts, where="the rule")
    case = Case(rule, sizes, parts)
    return Case(rule.inverse, sizes, parts) if draw(st.booleans()) else case


@settings(max_examples=examples(200))
@given(cases(), st.integers(1, 3))
def test_a_rule_gives_numpy_s_elements_and_its_inverse_the_first_ones(case: Case, cut: int) -> None:
    rearrange = case.rule.rearrange
    assert rearrange is not None
    before = case.arrays(case.rule.sources, rearrange.left)
    after = case.arrays(case.rule.targets, rearrange.right)
    catalog, elements = catalog_of(before, cut=cut)
    mapping = TensorMapping("m", (case.rule,), strict=True)
    found = map_catalog(Mapped.identity(catalog), mapping, {})
    assert {name: record.shape for name, record in found.catalog.tensors.items()} == {
        name: array.shape for name, array in after.items()
    }
    for name, array in after.items():
        assert np.array_equal(read(found.catalog.tensors[name], elements), array)
    assert set().union(*found.origins.values()) == set(before)
    back = map_catalog(found, mapping.inverse(), {})
    assert list(back.catalog.tensors) == list(before)
    for name, array in before.items():
        assert np.array_equal(read(back.catalog.tensors[name], elements), array)


def changed(
    text: str, shapes: dict[str, tuple[int, ...]], tree: Tree = None, **parameters: int
) -> Mapped:
    """What a mapping file makes of tensors of these shapes."""
    catalog, _ = catalog_of({name: numbered(*shape) for name, shape in shapes.items()}, tree)
    return map_catalog(Mapped.identity(catalog), parse_mapping(text, "my.toml"), parameters)


def shapes_of(found: Mapped) -> dict[str, tuple[int, ...]]:
    return {name: record.shape for name, record in found.catalog.tensors.items()}


QKV = """
[[rule]]
from = ["l.*.q", "l.*.k", "l.*.v"]
to = "l.*.qkv"
rearrange = "(groups *) ... -> (groups *) ..."
sizes = { groups = "kv_heads" }
parts = ["heads / kv_heads", 1, 1]
"""
HEADS = {"l.0.q": (8, 5), "l.0.k": (4, 5), "l.0.v": (4, 5)}


def test_parameters_and_ratios_divide_query_groups() -> None:
    found = changed(QKV, HEADS, heads=4, kv_heads=2)
    assert shapes_of(found) == {"l.0.qkv": (16, 5)}
    assert found.origins["l.0.qkv"] == ("l.0.q", "l.0.k", "l.0.v")


@pytest.mark.parametrize(
    ("text", "shapes", "said"),
    [
        (
            QKV,
            {"l.0.q": (8, 5), "l.0.k": (4, 5)},
            "l.0.q is there, but l.0.v of the same rule is missing",
        ),
        (
            QKV,
            HEADS | {"l.0.k": (3, 5)},
            "l.0.k: a dimension of 3 of shape [3, 5] is not (groups *)",
        ),
        (QKV, HEADS | {"l.0.k": (4, 6)}, "the axis ...0 is 5 in l.0.q and 6 in l.0.k"),
        (QKV, {"x": (1,)}, "my.toml: rule 1: 'l.*.q' matches no name; there are x"),
        (
            QKV,
            HEADS | {"l.1.q": (8, 5)},
            "l.1.q is there, but l.1.k, l.1.v of the same rule is missing",
        ),
        (
            QKV,
            HEADS | {"l.0.qkv": (2,)},
            "l.0.q, l.0.k, l.0.v and l.0.qkv both get the name l.0.qkv",
        ),
        (
            '[[rule]]\nfrom = "a.{e}"\nto = "a"\nrearrange = "i -> e i"',
            {"a.0": (2,), "a.3": (2,)},
            "a.0 is there, but a.1, a.2 of the same rule is missing",
        ),
        (
            '[[rule]]\nfrom = "a.{e}.{f}"\nto = "a"\nrearrange = "i -> e f i"',
            {"a.0.0": (2,), "a.999999999.999999999": (2,)},
            "a.0.0 is there, but a.0.1, a.0.2, a.0.3 and 999999999999999995 more",
        ),
        (
            QKV,
            HEADS | {"l.0.q": (4, 5)},
            "l.0.q, l.0.k, l.0.v have the sizes 2 : 2 : 2 along `*`, and `parts` are 2 : 1 : 1",
        ),
        (
            '[[rule]]\nfrom = "a.{e}"\nto = "a"\nrearrange = "i -> e i"',
            {"a.0": (2,), "a.1": (3,)},
            "a.1 has shape [3], a.0 has another: they cannot be put together",
        ),
        (
            '[[rule]]\nfrom = "a.{e}"\nto = "a"\nrearrange = "... -> e ..."',
            {"a.0": (2,), "a.1": (2, 3)},
            "a.1 has shape [2, 3], a.0 has another: they cannot be put together",
        ),
        (
            '[[rule]]\nfrom = ["a", "b"]\nto = "c"\nrearrange = "* ... -> * ..."',
            {"a": (2,), "b": (2, 3)},
            "b has shape [2, 3], a has another: they cannot be put together",
        ),
        ('[[rule]]\nfrom = "a"\nto = ""', {"a": (1,), "c": (1,)}, "a would have an empty name"),
        (
            '[[rule]]\nfrom = "a"\nto = "b"\nrearrange = "(h two d) -> (h d two)"',
            {"a": (8,)},
            "are unknown; give all but one: with parameters={'h': NUMBER}",
        ),
        (
            '[[rule]]\nfrom = "a"\nto = "b"\nrearrange = "i o -> o i"',
            {"a": (8,)},
            "a has 1 dimensions, the rule has `i o`",
        ),
        (
            '[[rule]]\nfrom = "a"\nto = "b"\nrearrange = "(h d) -> h d"\nsizes = { h = "heads" }',
            {"a": (8,)},
            "'heads' has no value; give it with parameters={'heads': NUMBER}",
        ),
        (
            '[[rule]]\nfrom = "a"\nto = ["b", "c"]\nrearrange = "* -> *"',
            {"a": (7,)},
            "7 along `*` of a is not divided into 1 + 1 equal parts",
        ),
        (
            'strict = true\n[[rule]]\nfrom = "a"\nto = "b"',
            {"a": (1,), "c": (1,)},
            "my.toml has no rule for c",
        ),
        (
            '[[rule]]\nfrom = "*"\nto = "x.*"\n[[rule]]\nfrom = "a"\nto = "b"',
            {"a": (1,)},
            "rule 2: 'a' matches",
        ),
        ('[[rule]]\nfrom = "a"\nto = "b"', {"a": (1,), "b": (1,)}, "a and b both get the name b"),
        (
            '[[rule]]\nfrom = "a"\nto = ["b", "b"]\nrearrange = "* -> *"',
            {"a": (4,)},
            "rule 1: two tensors get the name b",
        ),
        (
            '[[rule]]\nfrom = "a"\nto = "b"\nrearrange = "(h d) -> h d"\nsizes = {h = "5 / 2"}',
            {"a": (8,)},
            "'5 / 2' is no whole number: 5 / 2",
        ),
        (
            '[[rule]]\nfrom = "a"\nto = "b"\nrearrange = "(h d) -> h d"\nsizes = {h = "4 * 0"}',
            {"a": (8,)},
            "'4 * 0' is no whole number: 4 / 0",
        ),
    ],
)
def test_a_mapping_that_does_not_fit_is_an_error_with_the_names(
    text: str, shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    parameters = {"heads": 4, "kv_heads": 2} if text == QKV else {}
    with pytest.raises(ArgumentError) as raised:
        changed(text, shapes, **parameters)
    assert said in str(raised.value)


def test_an_error_shows_a_few_names_and_how_many_more_and_has_all_of_them() -> None:
    shapes: dict[str, tuple[int, ...]] = {f"b{index}": (1,) for index in range(9)}
    with pytest.raises(ArgumentError, match="has no rule for b0, b1, b2 and 6 more:") as raised:
        changed('strict = true\n[[rule]]\nfrom = "a"\nto = "b"', shapes)
    assert raised.value.names == (*shapes,)
    assert pickle.loads(pickle.dumps(raised.value)).names == (*shapes,)


def test_a_rule_holds_where_a_name_that_it_requires_is_there_in_both_directions() -> None:
    mapping = parse_mapping(
        """
        [[rule]]
        from = "h.*.norm"
        to = "l.*.expert_norm"
        requires = ["h.*.gate", "l.*.router"]
        [[rule]]
        from = "h.*.norm"
        to = "l.*.norm"
        [[rule]]
        from = "h.*.gate"
        to = "l.*.router"
        [[rule]]
        from = ["h.*.q", "h.*.k"]
        to = "l.*.qk"
        rearrange = "* -> *"
        requires = "h.*.gate"
        optional = true
        """,
        "two kinds of layers",
    )
    names = ("h.0.norm", "h.1.norm", "h.1.gate", "h.0.q", "h.0.k", "h.1.q", "h.1.k")
    catalog, _ = catalog_of({name: numbered(2) for name in names})
    there = map_catalog(Mapped.identity(catalog), mapping, {})
    wanted = {"l.0.norm", "l.1.expert_norm", "l.1.router", "h.0.q", "h.0.k", "l.1.qk"}
    assert set(there.catalog.tensors) == wanted
    kept = replace(mapping, rules=mapping.rules[:3])
    there = map_catalog(Mapped.identity(catalog), kept, {})
    back = map_catalog(there, kept.inverse(), {})
    assert set(back.catalog.tensors) == set(names)
    assert back.origins["h.1.norm"] == ("h.1.norm",)
    assert mapping.inverse().inverse().rules == mapping.rules


def test_a_parameter_in_a_name_is_its_number_in_both_directions() -> None:
    mapping = parse_mapping(
        """
        [parameters]
        n = "num_layers"
        [[rule]]
        from = "l.<n>.e.*"
        to = "mtp.e.*"
        [[rule]]
        from = "l.<n>.*"
        to = "mtp.l.*"
        """,
        "my.toml",
    )
    catalog, _ = catalog_of({n: numbered(1) for n in ("l.1.w", "l.2.e.w", "l.2.v", "l.22.v")})
    there = map_catalog(Mapped.identity(catalog), mapping, {"n": 2})
    assert set(there.catalog.tensors) == {"l.1.w", "mtp.e.w", "mtp.l.v", "l.22.v"}
    back = map_catalog(there, mapping.inverse(), {"n": 2})
    assert set(back.catalog.tensors) == set(catalog.tensors)
    with pytest.raises(ArgumentError, match=r"rule 1: 'n' has no value; give it with parameters="):
        map_catalog(there, mapping, {})


def test_the_tensors_of_an_expert_come_from_those_of_this_expert_alone() -> None:
    mapping = parse_mapping(
        """
        [[rule]]
        from = ["l.*.e.{e}.gate", "l.*.e.{e}.up"]
        to = "d.*.x.{e}.fc1"
        rearrange = "* ... -> * ..."
        [[rule]]
        from = "l.*.{t}.{e}.down"
        to = "d.*.down.{e}"
        rearrange = "... -> t ..."
        """,
        "experts",
    )
    parts = [f"e.{expert}.{name}" for expert in range(2) for name in ("gate", "up")]
    names = [f"l.0.{part}" for part in (*parts, *(f"{t}.{e}.down" for t in "01" for e in "01"))]
    catalog, _ = catalog_of({name: numbered(2) for name in names})
    there = map_catalog(Mapped.identity(catalog), mapping, {})
    assert there.origins == {
        "d.0.x.0.fc1": ("l.0.e.0.gate", "l.0.e.0.up"),
        "d.0.x.1.fc1": ("l.0.e.1.gate", "l.0.e.1.up"),
        "d.0.down.0": ("l.0.0.0.down", "l.0.1.0.down"),
        "d.0.down.1": ("l.0.0.1.down", "l.0.1.1.down"),
    }


def test_tensors_of_two_dtypes_do_not_become_one() -> None:
    catalog, _ = catalog_of({"a": numbered(4), "b": numbered(4)})
    other = catalog.tensors["b"]._replace(dtype=BY_NAME["F64"])
    catalog = replace(catalog, tensors={**catalog.tensors, "b": other})
    text = '[[rule]]\nfrom = ["a", "b"]\nto = "c"\nrearrange = "* -> *"'
    with pytest.raises(ArgumentError, match=r"a is int64 and b is float64; tensors of one rule"):
        map_catalog(Mapped.identity(catalog), parse_mapping(text, "my.toml"), {})


def test_a_number_with_leading_zeros_is_no_index() -> None:
    text = '[[rule]]\nfrom = "a.{e}"\nto = "a"\nrearrange = "i -> e i"'
    found = changed(text, {"a.0": (2,), "a.1": (2,), "a.01": (3,)})
    assert shapes_of(found) == {"a": (2, 2), "a.01": (3,)}


def test_an_inverse_adds_no_tied_names() -> None:
    mapping = parse_mapping('tied = { b = "a" }\n[[rule]]\nfrom = "*"\nto = "x.*"', "my.toml")
    assert mapping.tied == {"b": "a"}
    assert mapping.inverse().tied == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a mapping needs at least one [[rule]]"),
        ("rule = 3", "`rule` is 3; it is a list"),
        ("[[rule]]\nfrom = 'a.*'\nto = 'b.*'\nrequires = 'c'", "the same `*` and `?` as 'a.*'"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nrequires = 'c'", "as 'a', at least one"),
        ("strict = 1\n[[rule]]\nfrom = 'a'\nto = 'b'", "`strict` is 1; it is true or false"),
        ("rules = []", "rules: unknown; the keys are about, strict"),
        ("[[rule]]\nfrom = 'a'", "rule 1: `to` is missing"),
        ("[[rule]]\nfrom = []\nto = 'a'", "`from` is []; it is at least one text"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nrearange = ''", "rearange: unknown"),
        ("[[rule]]\nfrom = ['a', 'b']\nto = 'c'", "a list of names needs rearrange"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nparts = [1]", "sizes and parts need rearrange"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nrearrange = 'i j'", "write one `->`"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nrearrange = 'i j -> i'", "has j on one side only"),
        (
            "[[rule]]\nfrom = 'a'\nto = 'b'\nrearrange = 'i ... -> i'",
            "`...` on one side of the arrow only",
        ),
        (
            "[[rule]]\nfrom = 'a'\nto = 'b'\nrearrange = 'i i -> i'",
            "has the axis i twice on one side",
        ),
        (
            "[[rule]]\nfrom = 'a'\nto = 'b'\nrearrange = '(i j -> i j'",
            "a parenthesis is not closed",
        ),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nrearrange = '() i -> i'", "')' has no meaning there"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nrearrange = '2 i -> i 2'", "'2' has no meaning there"),
        (
            "[[rule]]\nfrom = 'a'\nto = 'b'\nrearrange = '* i -> i *'",
            "if and only if the rule has a list",
        ),
        (
            "[[rule]]\nfrom = ['a', 'b']\nto = 'c'\nrearrange = 'i -> i'",
            "if and only if the rule has a list",
        ),
        ("[[rule]]\nfrom = 'a.*'\nto = 'c'\nrearrange = 'i -> i'", "have different `*` and `?`"),
        ("[[rule]]\nfrom = '/a/'\nto = 'c'\nrearrange = 'i -> i'", "has no regular expressions"),
        (
            "[[rule]]\nfrom = 'a.{i}'\nto = 'c'\nrearrange = 'i -> i'",
            "{i} is in a name of the left and in",
        ),
        ("[[rule]]\nfrom = 'a.{e}'\nto = 'c'\nrearrange = 'i -> i'", "has e on one side only"),
        (
            "[[rule]]\nfrom = 'a'\nto = 'c'\nrearrange = 'i -> i'\nsizes = {j = 1}",
            "sizes has j, which is no axis",
        ),
        ("[[rule]]\nfrom = ['a', 'b']\nto = ['c', 'd']\nrearrange = '* -> *'", "only one side"),
        (
            "[[rule]]\nfrom = ['a', 'b']\nto = 'c'\nrearrange = '* -> *'\nparts = [1]",
            "1 parts for 2 names",
        ),
        ("[[rule]]\nfrom = 'a.*'\nto = 'c'", "'a.*' cannot become 'c'"),
        ("a = ", "my.toml: Invalid value"),
    ],
)
def test_a_wrong_mapping_file_is_an_error_that_names_the_rule(text: str, said: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        parse_mapping(text, "my.toml")
    assert str(raised.value).startswith("my.toml")
    assert said in str(raised.value)


def test_json_has_the_same_keys() -> None:
    text = '{"rule": [{"from": ["a", "b"], "to": "c", "rearrange": "* -> *", "parts": [1, 2]}]}'
    found = parse_mapping(text, "my.json", is_json=True)
    toml = "[[rule]]\nfrom = ['a', 'b']\nto = 'c'\nrearrange = '* -> *'\nparts = [1, 2]"
    assert found == parse_mapping(toml, "my.json")


def test_a_regular_expression_renames_and_has_no_inverse() -> None:
    text = r"""
    [[rule]]
    from = '/h\.(\d+)\.(?P<rest>.*)/'
    to = 'layers.\1.\g<rest>'
    """
    assert list(shapes_of(changed(text, {"h.0.a.w": (1,), "b": (2,)}))) == ["layers.0.a.w", "b"]
    with pytest.raises(ArgumentError, match="a regular expression has no inverse"):
        parse_mapping(text, "my.toml").inverse()


def test_names_without_a_rule_and_values_stay() -> None:
    tree: Tree = {"model": {"a": TensorRef("model.a"), "b": TensorRef("model.b")}, "step": 3}
    found = changed(
        '[[rule]]\nfrom = "model.a"\nto = "model.c"', {"model.a": (1,), "model.b": (2,)}, tree
    )
    assert found.catalog.tree == {
        "model": {"c": TensorRef("model.c"), "b": TensorRef("model.b")},
        "step": 3,
    }


def test_excluded_names_are_reported() -> None:
    found = changed('exclude = "b*"\n[[rule]]\nfrom = "a"\nto = "c"', {"a": (1,), "b1": (1,)})
    assert found.excluded == ("b1",)
    assert list(shapes_of(found)) == ["c"]


def test_a_mapping_follows_one_that_excludes_everything() -> None:
    nothing = changed('exclude = "*"\n[[rule]]\nfrom = "b"\nto = "c"\noptional = true', {"a": (1,)})
    rename = parse_mapping('[[rule]]\nfrom = ""\nto = "model"', "prefix")
    found = map_catalog(nothing, rename, {})
    assert (found.catalog.tensors, found.excluded) == ({}, ("a",))


TIED: Tree = {"a": TensorRef("a"), "b": TensorRef("a")}


@pytest.mark.parametrize(
    ("text", "tensors", "aliases"),
    [
        ('[[rule]]\nfrom = "a"\nto = "c"', ["c"], {"b": "c"}),
        (
            '[[rule]]\nfrom = "a"\nto = "z.c"\n[[rule]]\nfrom = "b"\nto = "z.b"',
            ["z.c"],
            {"z.b": "z.c"},
        ),
        ('[[rule]]\nfrom = "*"\nto = "x.*"\nrearrange = "i j -> j i"', ["x.a"], {"x.b": "x.a"}),
        ('[[rule]]\nfrom = "b"\nto = "c"\nrearrange = "i j -> j i"', ["a", "c"], {}),
        (
            'tied = { d = "a" }\n[[rule]]\nfrom = "*"\nto = "x.*"',
            ["x.a"],
            {"x.b": "x.a", "x.d": "x.a"},
        ),
        ('tied = { b = "a", q = "p" }\n[[rule]]\nfrom = "*"\nto = "x.*"', ["x.a"], {"x.b": "x.a"}),
    ],
)
def test_tied_names_stay_tied_if_they_change_alike(
    text: str, tensors: list[str], aliases: dict[str, str]
) -> None:
    found = changed(text, {"a": (2, 3)}, TIED)
    assert list(found.catalog.tensors) == tensors
    assert found.catalog.aliases == aliases
    assert set(references(found.catalog)) == set(tensors)
    assert set(found.origins) == {*tensors, *aliases}


def references(catalog: Catalog) -> Iterator[str]:
    """The tensors that a catalog's tree names."""

    def walk(node: Tree) -> Iterator[str]:
        if isinstance(node, dict):
            for item in node.values():
                yield from walk(item)
        elif isinstance(node, TensorRef):
            yield node.name

    return walk(catalog.tree)
