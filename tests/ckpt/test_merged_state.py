"""What ranks compare of their states: equal exactly where the states are, whoever says so."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckpt.plan.save_plan import choose_layouts
from ckpt.state.flatten import FlatState, flatten
from ckpt.state.merged_state import spec_of, state_hashes
from ckpt.state.state_spec import StateSpec
from formats.catalog import TensorRef, Tree
from formats.dtypes import BY_NAME
from formats.native.manifest import StoredTensor
from sharding.layout import Layout, Mesh, Replicate, Shard

WORLD = Mesh.grid(("world",), (4,))
DESCRIPTIONS = st.builds(
    lambda shape, dtype, placement: StoredTensor(
        shape, BY_NAME[dtype], Layout(shape, WORLD, (placement,))
    ),
    st.sampled_from([(4,), (2, 2), (8, 3), (300, 300)]),
    st.sampled_from(["F32", "BF16"]),
    st.sampled_from([Replicate(), Shard(0)]),
)
NAMED = st.dictionaries(st.sampled_from(["a", "b", "a.b", "c"]), DESCRIPTIONS, max_size=4)
TIES = st.dictionaries(st.sampled_from(["x", "y"]), st.sampled_from(["a", "b"]), max_size=2)


def described(tensors: dict[str, StoredTensor], aliases: dict[str, str]) -> StateSpec:
    return StateSpec(tensors, aliases, {})


@given(first=NAMED, second=NAMED, ties=TIES, other_ties=TIES)
def test_marks_are_equal_exactly_where_names_types_layouts_and_ties_are(
    first: dict[str, StoredTensor],
    second: dict[str, StoredTensor],
    ties: dict[str, str],
    other_ties: dict[str, str],
) -> None:
    same = list(first.items()) == list(second.items()) and ties == other_ties
    found = [
        state_hashes(described(first, ties))[0],
        state_hashes(described(second, other_ties))[0],
    ]
    assert (found[0] == found[1]) == same


@given(names=st.lists(DESCRIPTIONS, max_size=12))
def test_descriptions_that_are_one_object_or_many_make_the_same_plan(
    names: list[StoredTensor],
) -> None:
    each = {str(i): deepcopy(tensor) for i, tensor in enumerate(names)}
    shared = {name: names[names.index(tensor)] for name, tensor in each.items()}
    assert choose_layouts(each) == choose_layouts(shared)
    assert state_hashes(described(each, {}))[0] == state_hashes(described(shared, {}))[0]


def values_mark(tree: Tree) -> int:
    return state_hashes(StateSpec({}, {}, tree))[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ("1", 1),
        (b"a", "a"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (None, "None"),
        (BY_NAME["F32"], "F32"),
        (BY_NAME["F32"], BY_NAME["F16"]),
        (TensorRef("a"), None),
        ([], [TensorRef("a")]),
    ],
)
def test_values_that_only_python_takes_for_equal_are_told_apart(one: Tree, other: Tree) -> None:
    assert values_mark({"v": one}) != values_mark({"v": other})


def test_equal_values_are_equal_whoever_made_them() -> None:
    tree: Any = {"nan": float("nan"), "long": 1 << 80, "text": "é", 3: (None, 1j)}
    other = {"nan": -float("-nan"), "long": int("1" + "0" * 80, 2), "text": "é"[:1], 3: (None, 1j)}
    assert values_mark(tree) == values_mark(deepcopy(tree))
    assert values_mark({**tree, "nan": 0.0}) != values_mark(tree)
    assert values_mark(other) == values_mark({**tree, "nan": other["nan"]})


def flat(state: object) -> FlatState:
    return flatten(state, WORLD)


def test_a_parameter_whose_data_is_replaced_is_described_as_it_is_now() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    state = {"w": parameter, "v": torch.zeros(4)}
    before = spec_of(flat(state))
    assert before.tensors["w"].shape == (2, 3)
    parameter.data = torch.ones(5, dtype=torch.bfloat16)
    after = spec_of(flat(state))
    assert (after.tensors["w"].shape, after.tensors["w"].dtype.name) == ((5,), "BF16")
    assert torch.equal(flat(state).leaves["w"].local.float(), torch.ones(5))
    assert state_hashes(before)[0] != state_hashes(after)[0]


def test_ties_that_come_and_go_between_two_saves_are_seen() -> None:
    whole = torch.arange(6.0)
    state = {"a": whole, "b": whole[:3], "c": whole[:3], "d": whole.view(2, 3), "e": whole[1:]}
    assert flat(state).aliases == {"c": "b"}
    state["c"] = whole[:3].clone()
    state["e"] = whole.view(2, 3)
    assert flat(state).aliases == {"e": "d"}


def test_empty_tensors_are_tied_by_identity_alone() -> None:
    empty = torch.empty(0)
    assert flat({"a": empty, "b": torch.empty(0), "c": empty}).aliases == {"c": "a"}


def test_a_tensor_of_a_class_of_its_own_is_tied_to_a_plain_one_over_the_same_memory() -> None:
    class Marked(torch.Tensor):
        pass

    plain = torch.zeros(3)
    marked = plain.as_subclass(Marked)
    assert flat({"a": plain, "b": marked}).aliases == {"b": "a"}
    assert flat({"b": marked, "a": plain}).aliases == {"a": "b"}
