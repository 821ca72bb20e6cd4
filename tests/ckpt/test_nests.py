"""The nests of several ranks as one: every key is there, and what is not there is named."""

import math
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import StateError
from ckpt.state.state_spec import conflicting_values, merge_trees, outline
from formats.catalog import TensorRef, Tree
from formats.dtypes import BY_NAME


def test_nests_are_united_and_the_lowest_rank_counts() -> None:
    first: Tree = {"a": {"x": 1, "y": [1, None]}, "t": (1, 2), "kept": None, "l": [{"a": 1}]}
    second: Tree = {"a": {"x": 9, "z": 3}, "t": (7, 8, 9), "b": [4], "kept": {}, "l": [{"b": 2}, 3]}
    whole = merge_trees(first, second, (0, 1))
    assert whole == {
        "a": {"x": 1, "y": [1, None], "z": 3},
        "t": (1, 2),
        "kept": {},
        "l": [{"a": 1, "b": 2}, 3],
        "b": [4],
    }
    assert list(conflicting_values(first, whole)) == ["l"]
    assert list(conflicting_values(second, whole)) == ["a.x", "t"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (math.nan, math.nan, True),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (-0.0, -0.0, True),
        (1j, 1j, True),
        (complex(0, -0.0), 0j, False),
        ([1, (2, 3)], [1, (2, 3)], True),
        ([1, (2, 3)], [1, [2, 3]], False),
        ([1], [1, 2], False),
        ("a", b"a", False),
        (None, 0, False),
        (BY_NAME["F32"], BY_NAME["F32"], True),
    ],
)
def test_a_value_is_overruled_by_any_other_but_not_by_the_same(
    one: Tree, other: Tree, same: bool
) -> None:
    assert list(conflicting_values({"v": one}, {"v": other})) == ([] if same else ["v"])


NESTS = st.recursive(
    st.sampled_from([None, 1, 2.5, "text", (), [1, 2], TensorRef("w")]),
    lambda inner: (
        st.dictionaries(st.sampled_from(["a", "b", 3]), inner, max_size=3)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


def keys_in(tree: Tree, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """The key paths of all entries of dicts and of the tensors in lists."""
    if isinstance(tree, dict | list):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(tree, dict) or isinstance(item, TensorRef):
                yield *path, key
            yield from keys_in(item, (*path, key))


@given(first=NESTS, second=NESTS)
def test_every_key_and_tensor_of_either_nest_is_in_the_merged_one_or_it_is_an_error(
    first: Tree, second: Tree
) -> None:
    try:
        whole = merge_trees(first, second, (0, 1))
    except StateError:
        return
    assert set(keys_in(whole)) == {*keys_in(first), *keys_in(second)}
    assert list(conflicting_values(first, first)) == []
    found: list[list[object]] = [[], []]
    assert (outline(first, found[0]) == outline(second, found[1])) or first != second


@pytest.mark.parametrize("inner", [lambda ref: ref, lambda ref: {"k": ref}, lambda ref: [ref]])
def test_a_tensor_is_merged_with_none_and_never_left_out_for_anything_else(
    inner: Callable,
) -> None:
    one: Tree = inner(TensorRef("w"))
    assert merge_trees({"w": None}, {"w": one}, (0, 1)) == {"w": one}
    assert merge_trees({"w": one}, {"w": None}, (0, 1)) == {"w": one}
    assert list(conflicting_values({"w": None}, {"w": one})) == []
    for other in (0, "text", (), (TensorRef("w"),)):
        for first, second in ((one, other), (other, one)):
            with pytest.raises(StateError, match=r"w: .* on rank 0, .* on rank 3; give values"):
                merge_trees({"w": first}, {"w": second}, (0, 3))


def test_parameter_groups_of_ranks_unite_by_their_parameters() -> None:
    def groups(*pairs: tuple[float, list[str]]) -> Tree:
        return {"param_groups": [{"lr": lr, "params": [*names]} for lr, names in pairs]}

    first = groups((0.1, ["a", "b"]), (0.2, ["c"]))
    second = groups((0.2, ["d"]), (0.3, ["e", "a"]), (0.1, ["f"]), (0.4, ["c"]))
    whole = merge_trees(first, second, (0, 1))
    assert whole == groups((0.1, ["a", "b", "f"]), (0.2, ["c", "d"]), (0.3, ["e"]))
    assert list(conflicting_values(first, whole)) == []
    assert list(conflicting_values(second, whole)) == ["param_groups.1.lr", "param_groups.3.lr"]


def test_groups_with_other_parameters_have_other_outlines() -> None:
    one: Tree = [{"lr": 0.1, "params": ["a"]}]
    assert outline(one, []) == outline([{"lr": 0.2, "params": ["a"]}], [])
    assert outline(one, []) != outline([{"lr": 0.1, "params": ["b"]}], [])
    assert outline([{"params": [1]}], []) == outline([{"params": [2]}], [])


def test_a_parameter_group_has_the_options_that_any_rank_has_for_its_parameters() -> None:
    def groups(**options: Tree) -> Tree:
        return [{"lr": 0.1, **options, "params": ["a", "b"]}]

    whole = merge_trees(groups(seed_0=1), groups(seed_1=2, lr=0.3), (0, 1))
    assert whole == groups(seed_0=1, seed_1=2)
    assert list(conflicting_values(groups(seed_1=2, lr=0.3), whole, "optim")) == ["optim.0.lr"]
    both: Tree = [{"k": 1, "params": ["b"]}, {"j": 2, "params": ["a", "new"]}]
    assert merge_trees(groups(), both, (0, 1)) == [
        {"lr": 0.1, "k": 1, "j": 2, "params": ["a", "b"]},
        {"j": 2, "params": ["new"]},
    ]
