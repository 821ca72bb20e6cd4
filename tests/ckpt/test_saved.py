"""The leaves of a saved state, under the names a target knows them by."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ArgumentError, StateError
from ckpt.state.patterns import renamer
from ckpt.state.saved import MISSING, Missing, Saved, holds_tensor, leaves
from formats.catalog import Catalog, TensorRef, Tree, join
from formats.native.tree import ROOT


def catalog(tree: Tree) -> Catalog:
    return Catalog("ckpt", {}, tree, ())


W, B, M = TensorRef("model.w"), TensorRef("model.b"), TensorRef("optimizer.state.0")
TREE: Tree = {
    "model": {"w": W, "b": B, "config": {"width": 4, "names": ["a", "b"]}},
    "optimizer": {"state": [M, {"step": 3}], "groups": []},
    "step": 7,
    3: {},
}


@pytest.mark.parametrize(
    ("rename", "name", "expected"),
    [
        (None, "a.b", "a.b"),
        ({}, "a.b", "a.b"),
        ({"a": "x"}, "a.b", "x.b"),
        ({"a": "x"}, "a", "x"),
        ({"a": "x"}, "ab.c", "ab.c"),  # a prefix ends at a dot
        ({"b": "x"}, "a.b", "a.b"),  # and begins at the start
        ({"a.b": "x.y.z"}, "a.b.c.d", "x.y.z.c.d"),
        ({"a": "x", "a.b": "y"}, "a.b.c", "y.c"),  # the longest counts, in any order
        ({"a.b": "y", "a": "x"}, "a.b.c", "y.c"),
        ({"a": "b", "b": "c"}, "a.w", "b.w"),  # once, not in a chain
        ({"a": "b", "b": "a"}, "b.w", "a.w"),
        ({"module.": "model."}, "module.w", "model.w"),  # dots at the ends are no matter
        ({"module": ""}, "module.w", "w"),  # a prefix can go
        ({"": "model"}, "w", "model.w"),  # or come
        ({"": "model.", "step": "step"}, "step", "step"),
        ({"": "model", "a": "x"}, "a.b", "x.b"),
        ({"": "model"}, "", "model"),
        ({"a": "x"}, "a..b", "x..b"),  # an empty key is a key
        ({"a": "x"}, "a.", "x."),
        ({"": "model"}, ".w", "model..w"),
    ],
)
def test_a_mapping_renames_the_longest_prefix(
    rename: dict[str, str] | None, name: str, expected: str
) -> None:
    assert renamer(rename)(name) == expected


def test_a_function_renames_what_it_likes() -> None:
    rename: Callable[[str], str] = lambda name: name.replace("w", "weight")  # noqa: E731
    saved = Saved(catalog(TREE), rename)
    assert saved.leaves["model.weight"] == W
    assert "model.w" not in saved.leaves


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join)


@given(rename=st.dictionaries(NAMES | st.just(""), NAMES | st.just("")), name=NAMES)
def test_what_is_renamed_ends_as_it_did(rename: dict[str, str], name: str) -> None:
    parts = name.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), -1, -1)]
    longest = next((prefix for prefix in prefixes if prefix in rename), None)
    expected = name
    if longest is not None:
        rest = name[len(longest) :].strip(".")
        expected = ".".join(part for part in (rename[longest], rest) if part)
    assert renamer(rename)(name) == expected


def test_two_entries_with_one_new_name_are_an_error_that_says_it() -> None:
    with pytest.raises(StateError, match=r"get the name 'model\.b'"):
        Saved(catalog(TREE), {"model.w": "model.b"})
    with pytest.raises(StateError, match=r"'a\.b'"):
        Saved(catalog({"a": {"b": W}, "a.b": B}))


def test_leaves_are_tensors_values_and_containers_without_tensors() -> None:
    assert dict(leaves(TREE)) == {
        "model.w": W,
        "model.b": B,
        "model.config.width": 4,
        "model.config.names": ["a", "b"],
        "optimizer.state.0": M,
        "optimizer.state.1.step": 3,
        "optimizer.groups": [],
        "step": 7,
        "3": {},
    }


def test_a_checkpoint_that_is_one_tensor_or_value_has_one_leaf() -> None:
    assert dict(leaves(W)) == {ROOT: W}
    assert dict(leaves(5)) == {"": 5}
    assert dict(leaves({})) == {"": {}}
    assert dict(leaves((W, 1))) == {"0": W, "1": 1}


def test_a_tensor_is_found_at_any_depth() -> None:
    assert holds_tensor([1, {"a": (2, W)}])
    assert not holds_tensor([1, {"a": (2, "W")}])


def test_names_are_joined_with_dots() -> None:
    assert join("", 0) == "0"
    assert join("a.b", 3) == "a.b.3"


def test_a_node_is_what_was_saved_there_in_its_nest() -> None:
    saved = Saved(catalog(TREE))
    assert saved.node("") == TREE
    assert saved.node("model") == TREE["model"]  # type: ignore[index, call-overload]
    assert saved.node("model.config.width") == 4
    assert saved.node("optimizer.state.0") == M
    assert saved.node("optimizer.groups") == []
    assert saved.node("3") == {}


def test_a_node_of_a_list_is_flat_below_the_list() -> None:
    assert Saved(catalog(TREE)).node("optimizer.state.1") == {"step": 3}


@pytest.mark.parametrize("name", ["mod", "model.", "model.w.x", "absent", "model.config.names.0"])
def test_what_is_not_there_is_missing(name: str) -> None:
    for saved in (Saved(catalog(TREE)), Saved(catalog(TREE), {})):
        found: Any = saved.node(name)
        assert found is MISSING
        assert isinstance(found, Missing)


def test_a_nest_that_is_renamed_alike_stays_a_nest() -> None:
    config = {"width": 4, "names": ["a", "b"]}
    saved = Saved(catalog(TREE), {"model": "net"})
    assert saved.node("model") is MISSING
    assert saved.node("net.w") == W
    assert saved.node("net") == {"w": W, "b": B, "config": config}
    assert saved.node("net.config") == config


def test_a_node_is_flat_where_its_leaves_were_renamed_differently() -> None:
    saved = Saved(catalog(TREE), {"model": "net", "model.b": "net.config.b"})
    assert saved.node("net") == {
        "w": W,
        "config.b": B,
        "config.width": 4,
        "config.names": ["a", "b"],
    }
    assert saved.node("net.config") == {"b": B, "width": 4, "names": ["a", "b"]}
    swapped = Saved(catalog({"a": {"x": 1}, "b": {"y": 2}}), {"a": "net", "b": "net"})
    assert swapped.node("net") == {"x": 1, "y": 2}


def test_none_that_was_saved_is_not_missing() -> None:
    for rename in (None, {"x": "y"}):
        saved = Saved(catalog({"a": None, "x": {"b": None}}), rename)
        assert saved.node("a") is None
        assert saved.leaves["a"] is None


def test_under_a_name_are_the_leaves_at_and_below_it_sorted() -> None:
    tree: Tree = {"a": {"z": 1, "b": {"c": 2}}, "ab": 3, "a-b": 4, "a!": 5}
    saved = Saved(catalog(tree))
    assert saved.under("a") == ["a.b.c", "a.z"]
    assert saved.under("a.b") == ["a.b.c"]
    assert saved.under("a.z") == ["a.z"]
    assert saved.under("absent") == []
    assert saved.under("") == sorted(["a.z", "a.b.c", "ab", "a-b", "a!"])


@given(names=st.lists(NAMES, unique=True, max_size=12), path=NAMES)
def test_under_finds_what_a_search_through_all_names_finds(names: list[str], path: str) -> None:
    saved = Saved(catalog(dict.fromkeys(names, W)))
    expected = [name for name in names if name == path or name.startswith(path + ".")]
    assert saved.under(path) == sorted(expected)


@pytest.mark.parametrize(
    ("rename", "name", "expected"),
    [
        ({"layers.*.w": "blocks.*.weight"}, "layers.3.w", "blocks.3.weight"),
        ({r"/layers\.(\d+)\.(?P<rest>.*)/": r"h.\1.\g<rest>"}, "layers.3.a.b", "h.3.a.b"),
        ({r"/layers\.(\d+)/": r"h.\1"}, "layers.3.a", "layers.3.a"),  # the whole name
        ({"layers": "h", "layers.*": "x.*"}, "layers.3", "x.3"),  # patterns before prefixes
        ({"*": "a.*", "b": "c"}, "b", "a.b"),
    ],
)
def test_a_pattern_renames_the_whole_name_once(
    rename: dict[str, str], name: str, expected: str
) -> None:
    assert renamer(rename)(name) == expected


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        ({"a.*": "b"}, "'a.*' cannot become 'b'"),
        ({"*.w?": "?.*"}, "'*.w?' cannot become '?.*'"),
        ({"/a(/": "b"}, "'/a(/' is no regular expression"),
        ({"/a{9999999999999}/": "b"}, "is no regular expression: the repetition number is too"),
        ({"a": "x", "a.": "y"}, "two new names for 'a'"),
        ({"/a/": r"\1"}, r"is no new name for '/a/': invalid group reference 1"),
        ({"/a/": r"\g<x>"}, r"is no new name for '/a/': unknown group name 'x'"),
    ],
)
def test_a_rename_without_a_meaning_is_an_error(rename: dict[str, str], said: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        renamer(rename)
    assert said in str(raised.value)


def test_an_expression_that_matches_no_name_is_idle() -> None:
    saved = Saved(
        catalog({"a": {"b": 1}, "c": 2}), {r"/a\.(.)/": r"\1", "/x/": "y", "a.?": "z.?", "q*": "r*"}
    )
    assert set(saved.idle_keys()) == {"/x/", "q*"}
