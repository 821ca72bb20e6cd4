"""Renamed leaves lie in nests as a reader of the result expects."""

from __future__ import annotations

import pytest

from ckpt.mapping.apply import rename_tree
from ckpt.state.patterns import renamer
from ckpt.state.saved import leaves
from formats.catalog import TensorRef, Tree
from sharding.errors import ArgumentError

W, B = TensorRef("w"), TensorRef("b")


@pytest.mark.parametrize(
    ("tree", "rename", "expected"),
    [
        ({"w": W, "b": B}, {"": "model"}, {"model.w": W, "model.b": B}),
        ({"model": {"w": W}, "step": 1}, {"": "run"}, {"run": {"model": {"w": W}, "step": 1}}),
        ({"model": {"w": W}, "step": 1}, {"model": ""}, {"w": W, "step": 1}),
        (
            {"model": {"w": W, 3: B}, "step": 1},
            {"model": "net"},
            {"net": {"w": W, 3: B}, "step": 1},
        ),
        ({"a": {"l.w": W, "l.b": B}}, {"a.l": "a.m"}, {"a": {"m.w": W, "m.b": B}}),
        ({"a": {"w": W}, "b": {"w": B}}, {"a.w": "b.v"}, {"b": {"w": B, "v": W}}),
        ({"a": [W, B], "s": 1}, {"a": "c"}, {"c": [W, B], "s": 1}),
        ({"a": (W, 3), "s": 1}, {"a.0": "c"}, {"c": W, "a.1": 3, "s": 1}),
        (
            {"o": {"state": {0: {"m": W}}, "n": [1]}},
            {"o.n": "o.k"},
            {"o": {"state": {0: {"m": W}}, "k": [1]}},
        ),
        ({"a": {"w": W}, "e": {}}, {"a": "x.y"}, {"x.y": {"w": W}, "e": {}}),
    ],
)
def test_a_rename_keeps_nests_where_it_can(
    tree: Tree, rename: dict[str, str], expected: Tree
) -> None:
    rename_one = renamer(rename)
    found = rename_tree(tree, lambda name, leaf: [(rename_one(name), leaf)])
    assert found == expected
    assert [name for name, _ in leaves(found)] == [name for name, _ in leaves(expected)]


def test_nothing_changes_without_a_new_name() -> None:
    tree: Tree = {"a": [W, {"b": (B, None)}], "c": {}, 4: {"x.y": W}}
    assert repr(rename_tree(tree, lambda name, leaf: [(name, leaf)])) == repr(tree)


def test_a_leaf_cannot_have_the_name_of_a_nest() -> None:
    tree: Tree = {"a": {"w": W}, "b": B}
    with pytest.raises(ArgumentError, match="a would be both a value and a dict of values"):
        rename_tree(tree, lambda name, leaf: [("a" if name == "b" else name, leaf)])
