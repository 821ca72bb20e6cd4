"""A mesh maps coordinates to ranks one to one, in both directions, whatever its order."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.layout import Mesh

seeded = settings(derandomize=True, deadline=None)


@seeded
@given(data=st.data())
def test_rank_and_coordinate_are_each_other_s_inverse(
    meshes: st.SearchStrategy[Mesh], data: st.DataObject
) -> None:
    mesh = data.draw(meshes)
    members = {}
    for coordinate in np.ndindex(*mesh.sizes):
        members[mesh.rank(coordinate)] = coordinate
    assert len(members) == mesh.size
    for rank in range(-2, max(members) + 3):
        assert mesh.coordinate(rank) == members.get(rank)
    assert list(mesh.ranks()) == list(members)


@seeded
@given(data=st.data())
def test_a_mesh_is_the_same_however_it_was_made(
    meshes: st.SearchStrategy[Mesh], data: st.DataObject
) -> None:
    mesh = data.draw(meshes)
    again = Mesh.of_ranks(mesh.names, mesh.sizes, tuple(mesh.ranks()))
    assert again == mesh
    assert hash(again) == hash(mesh)
    assert pickle.loads(pickle.dumps(mesh)).coordinate(mesh.offset) == (0,) * len(mesh.sizes)
    fields = Mesh(mesh.names, mesh.sizes, mesh.offset, mesh.strides, mesh.table)
    assert fields == mesh


@seeded
@given(data=st.data())
def test_a_transposed_mesh_has_the_same_ranks_at_transposed_coordinates(
    meshes: st.SearchStrategy[Mesh], data: st.DataObject
) -> None:
    mesh = data.draw(meshes)
    axes = data.draw(st.permutations(range(len(mesh.sizes))))
    turned = mesh.transposed(axes)
    ranks = np.array(list(mesh.ranks())).reshape(mesh.sizes)
    assert list(turned.ranks()) == ranks.transpose(axes).reshape(-1).tolist()
    assert turned.names == tuple(mesh.names[axis] for axis in axes)


@seeded
@given(data=st.data())
def test_a_sorted_mesh_ascends_along_an_axis_and_has_the_same_lines(
    meshes: st.SearchStrategy[Mesh], data: st.DataObject
) -> None:
    mesh = data.draw(meshes)
    axis = data.draw(st.integers(0, len(mesh.sizes) - 1)) if mesh.sizes else None
    found = mesh.ascending([] if axis is None else [axis])
    assert found is not None
    ranks = np.array(list(mesh.ranks())).reshape(mesh.sizes)
    expected = ranks if axis is None else np.sort(ranks, axis)
    assert list(found.ranks()) == expected.reshape(-1).tolist()
    assert (found is mesh) == np.array_equal(ranks, expected)
    assert found.names == mesh.names


@seeded
@given(ranks=st.permutations(range(8)), axes=st.sampled_from([(0, 1), (0, 2), (1, 2), (0, 1, 2)]))
def test_a_mesh_is_sorted_along_several_axes_if_gathers_by_sorted_groups_agree(
    ranks: list[int], axes: tuple[int, ...]
) -> None:
    mesh = Mesh.of_ranks(("a", "b", "c"), (2, 2, 2), ranks)
    found = mesh.ascending(axes)
    held = {rank: {(): rank} for rank in ranks}
    grid = np.array(ranks).reshape(2, 2, 2)
    for axis in reversed(axes):  # the last cut is undone first
        gathered = {}
        for line in np.moveaxis(grid, axis, -1).reshape(-1, 2).tolist():
            whole = {
                (place, *inner): owner
                for place, rank in enumerate(sorted(line))
                for inner, owner in held[rank].items()
            }
            gathered.update(dict.fromkeys(line, whole))
        held = gathered
    if len(axes) == 3:
        agree = all(whole == held[0] for whole in held.values())
        assert (found is not None) == agree
    if found is not None:
        for whole in held.values():
            for place, owner in whole.items():
                at = found.coordinate(owner)
                assert at is not None
                assert tuple(at[axis] for axis in axes) == place


@pytest.mark.parametrize(
    "ranks",
    [
        (0, 3, 2, 5, 4, 7),  # affine, but steps of 3 and 2 interleave
        (0, 2, 1, 3, 5, 4),
    ],
)
def test_a_mesh_that_is_not_nested_keeps_its_ranks(ranks: tuple[int, ...]) -> None:
    mesh = Mesh.of_ranks(("a", "b"), (3, 2), ranks)
    assert mesh.table == ranks
    assert [mesh.coordinate(rank) for rank in ranks] == list(np.ndindex(3, 2))


def test_ranks_that_descend_along_one_axis_need_no_table() -> None:
    mesh = Mesh.of_ranks(("a", "b"), (2, 2), (1, 0, 3, 2))
    assert (mesh.table, mesh.strides) == ((), (2, -1))
    assert [mesh.coordinate(rank) for rank in range(4)] == [(0, 1), (0, 0), (1, 1), (1, 0)]


def test_the_description_of_a_regular_mesh_does_not_grow_with_its_world() -> None:
    small = Mesh.of_ranks(("dp", "tp"), (2, 2), range(4))
    large = Mesh.of_ranks(("dp", "tp"), (2048, 8), range(16384))
    assert len(repr(large)) < len(repr(small)) + 16


def test_a_mesh_without_axes_has_one_rank() -> None:
    mesh = Mesh.grid((), (), offset=3)
    assert (mesh.size, mesh.coordinate(3), mesh.coordinate(0)) == (1, (), None)


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        ((2, 2), (0, 1, 2), "3 ranks do not fill a mesh of (2, 2)"),
        ((2,), (4, 4), "names a rank twice: (4, 4)"),
        ((0,), (), "0 ranks do not fill"),
        ((2, 0), (), "0 ranks do not fill"),
    ],
)
def test_ranks_that_make_no_mesh_are_refused(
    sizes: tuple[int, ...], ranks: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Mesh.of_ranks(("a", "b")[: len(sizes)], sizes, ranks)
    assert message in str(caught.value)


def test_strides_with_which_ranks_would_meet_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\) with strides \(1, 1\) is not nested"):
        Mesh(("a", "b"), (2, 2), 0, (1, 1))


def test_axes_without_names_or_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="1 names, 2 sizes and 2 strides"):
        Mesh(("a",), (2, 2), 0, (2, 1))
    with pytest.raises(ValueError, match="at least one rank"):
        Mesh.grid(("a",), (0,))
    with pytest.raises(ValueError, match=r"\(0, 0\) is not an order of the 2 axes"):
        Mesh.grid(("a", "b"), (2, 2)).transposed((0, 0))
