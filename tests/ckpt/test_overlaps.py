"""Targets that share memory are refused before anything is touched, where they cannot be filled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.matching.overlaps import Extent, overlapping, overlaps_itself


def refused(folder: Path, target: dict[str, Any]) -> list[str]:
    """What is said, of tensors of which each was saved with values of its own."""
    ckpt.save(
        folder,
        {
            name: torch.full(tuple(value.shape), float(number)) if torch.is_tensor(value) else value
            for number, (name, value) in enumerate(target.items(), 1)
        },
    )
    before = {name: value.clone() for name, value in target.items()}
    with pytest.raises(ckpt.MismatchError, match="which was not touched") as error:
        ckpt.load(folder, target)
    assert all(torch.equal(target[name], value) for name, value in before.items())
    return [str(difference) for difference in error.value.differences]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1, 8).expand(6, 8), torch.zeros(10).unfold(0, 4, 1)],
    ids=["expanded", "windows"],
)
def test_a_tensor_whose_elements_share_memory_is_refused(
    tmp_path: Path, tensor: torch.Tensor
) -> None:
    (said,) = refused(tmp_path, {"before": torch.zeros(3), "w": tensor, "z": torch.zeros(3)})
    assert said.startswith("w: several elements of the target share one place in memory")


def test_one_row_that_is_expanded_to_one_row_is_filled(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"w": torch.ones(1, 8)})
    target = {"w": torch.zeros(8).expand(1, 8)}
    assert (ckpt.load(tmp_path, target)["w"] == 1).all()


def shared(kind: str) -> dict[str, torch.Tensor]:
    y, grid = torch.zeros(10), torch.zeros(6, 6)
    return {
        "runs": {"a": y[:6], "b": y[4:]},
        "inside": {"a": y, "b": y[2:5]},
        "steps": {"a": y[::2], "b": y[1:6]},
        "steps that meet": {"a": y[::2], "b": y[1::3]},
        "columns": {"a": grid[:, :4], "b": grid[:, 3:]},
        "row and column": {"a": grid[2], "b": grid[:, 1]},
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["runs", "inside", "steps", "steps that meet", "columns", "row and column"],
)
def test_two_targets_that_share_some_memory_are_refused_by_both_names(
    tmp_path: Path, kind: str
) -> None:
    (said,) = refused(tmp_path, {"free": torch.zeros(4), **shared(kind)})
    assert "shares a part of its memory with" in said
    assert {said[0], said.partition(" with ")[2][0]} == {"a", "b"}
    assert "exclude=" in said


def test_leaving_one_of_them_out_is_a_way(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"a": torch.ones(6), "b": torch.full((6,), 2.0)})
    target = shared("runs")
    ckpt.load(tmp_path, target, exclude="b")
    assert (target["a"] == 1).all()


def test_views_that_share_a_buffer_and_no_element_are_filled(tmp_path: Path) -> None:
    y, grid, numbers = torch.zeros(10), torch.zeros(6, 6), np.zeros((4, 4), np.float32)
    target: dict[str, Any] = {
        "even": y[::2],
        "odd": y[1::2],
        "left": grid[:4, :2],
        "right": grid[:4, 2:],
        "below": grid[4:],
        "top": numbers[:2],
        "bottom": numbers[2:],
    }
    ckpt.save(
        tmp_path,
        {name: torch.full(tuple(v.shape), float(i)) for i, (name, v) in enumerate(target.items())},
    )
    ckpt.load(tmp_path, target)
    assert all((value == i).all() for i, value in enumerate(target.values()))


def test_ties_by_another_view_of_the_same_memory_are_filled(tmp_path: Path) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    ckpt.save(tmp_path, {"w": w, "flat": w.view(-1), "turned": w.T, "bits": w.view(torch.int32)})
    into = torch.zeros(3, 4)
    target = {"w": into, "flat": into.view(-1), "turned": into.T, "bits": into.view(torch.int32)}
    ckpt.load(tmp_path, target)
    assert torch.equal(into, w)


views = st.tuples(
    st.integers(0, 40), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=3)
)


@given(st.lists(views, min_size=2, max_size=4))
def test_whether_views_share_an_element_is_found_exactly(
    drawn: list[tuple[int, list[tuple[int, int]]]],
) -> None:
    extents: dict[tuple[int, int], Extent] = {}
    places: dict[str, set[int]] = {}
    for number, (offset, dims) in enumerate(drawn):
        view = torch.zeros(400).as_strided([n for n, _ in dims], [s for _, s in dims], offset)
        every = torch.arange(400).as_strided(view.shape, view.stride(), offset).reshape(-1)
        lo, hi = 4 * int(every.min()), 4 * int(every.max()) + 4
        dense = view.is_contiguous()
        shape = () if dense else tuple(view.shape)
        strides = () if dense else tuple(4 * step for step in view.stride())
        extent = Extent("cpu", lo, hi, str(number), 4, shape, strides)
        if overlaps_itself(extent):
            assert len(set(every.tolist())) < len(every)
        elif extents.setdefault((lo, hi), extent) is extent:
            places[extent.name] = set(every.tolist())
    found = list(overlapping(extents.values()))
    every_place = [place for held in places.values() for place in held]
    assert bool(found) == (len(set(every_place)) < len(every_place))
    assert all(places[one] & places[other] for one, other in found)
