"""Targets that share memory are refused before anything is touched, where they cannot be filled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
from ckpt.match.overlaps import Extent, overlapping, overlaps_itself


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
    assert said.startswith("w: several elements of the target have one address")


def test_one_row_that_is_expanded_to_one_row_is_filled(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"w": torch.ones(1, 8)})
    target = {"w": torch.zeros(8).expand(1, 8)}
    assert (ckpt.load(tmp_path, target)["w"] == 1).all()


def test_an_array_of_negative_strides_that_is_left_out_leaves_what_its_memory_gets(
    tmp_path: Path,
) -> None:
    ckpt.save(tmp_path, {"a": np.arange(1.0, 5), "b": np.zeros(4)})
    memory = np.zeros(4)
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    state = {"a": memory, "b": memory[::-1], "frozen": frozen}
    assert ckpt.load(tmp_path, state, exclude=["b", "frozen"])["frozen"] is frozen
    assert memory.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["reversed", "columns", "tensor", "part", "odd", "windows"])
def test_an_array_of_negative_strides_that_shares_memory_is_refused(
    tmp_path: Path, kind: str
) -> None:
    y, grid, raw = np.zeros(6), np.zeros((4, 6)), np.zeros(25, np.uint8)
    target: dict[str, Any] = {
        "reversed": {"a": y, "b": y[::-1]},
        "columns": {"a": grid[:, 2], "b": grid[::-1, ::-1]},
        "tensor": {"b": y[::-1], "a": torch.from_numpy(y[::2])},
        "part": {"b": y[::-1], "a": y[3::-1]},
        "odd": {"a": raw, "b": np.ndarray((8,), np.int16, raw.data, 1, (3,))},
        "windows": {"b": np.lib.stride_tricks.as_strided(y[3:], (3, 2), (-8, -8))},
    }[kind]
    ckpt.save(
        tmp_path,
        {
            name: np.asarray(value) + number
            for number, (name, value) in enumerate(target.items(), 1)
        },
    )
    with pytest.raises(ckpt.MismatchError, match="which was not touched") as error:
        ckpt.load(tmp_path, target)
    (said,) = map(str, error.value.differences)
    assert said.startswith(
        "b: several elements" if kind == "windows" else "b: shares memory with a in the target"
    )
    assert not any(np.asarray(value).any() for value in target.values())
    name = next(iter(target))
    if kind != "windows":
        ckpt.load(tmp_path, target, include=name)
        assert (np.asarray(target[name]) == 1).all()


def test_arrays_of_negative_strides_are_filled_where_no_other_target_has_their_bytes(
    tmp_path: Path,
) -> None:
    memory, records = np.zeros((4, 6)), np.zeros(3, [("x", "u1"), ("y", "<f4")])
    mirrored = memory[2:, ::-1]
    target = {"a": memory[:2], "b": mirrored, "again": mirrored, "x": records["x"]}
    target["y"] = records["y"][::-1]
    ckpt.save(tmp_path / "equal", {name: value + 1 for name, value in target.items()})
    assert all((value == 1).all() for value in ckpt.load(tmp_path / "equal", target).values())
    ckpt.save(tmp_path / "unequal", {**target, "again": mirrored + 1})
    with pytest.raises(ckpt.MismatchError, match="again: shares 96 bytes of memory with b"):
        ckpt.load(tmp_path / "unequal", target)
    mirrored.flags.writeable = False  # an array of its own takes the place of each
    assert (ckpt.load(tmp_path / "unequal", target)["again"] == 2).all()
    assert (target["b"] == 1).all()


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


def test_read_only_arrays_of_one_name_are_each_compared_with_the_checkpoint(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"a": {"b": np.arange(6.0)}})
    flat, grid = np.zeros(6), np.zeros((2, 3))
    for array in (flat, grid):
        array.setflags(write=False)
    with pytest.raises(ckpt.MismatchError, match=r"a\.b: .* shape \(6,\), the target has \(2, 3\)"):
        ckpt.load(tmp_path, {"a.b": flat, "a": {"b": grid}})
    loaded = ckpt.load(tmp_path, {"a.b": flat, "a": {"b": flat.copy()}})
    assert np.array_equal(loaded["a.b"], np.arange(6.0))
    assert np.array_equal(loaded["a"]["b"], np.arange(6.0))


@pytest.mark.parametrize(
    "kind",
    ["runs", "inside", "steps", "steps that meet", "columns", "row and column"],
)
def test_two_targets_that_share_some_memory_are_refused_by_both_names(
    tmp_path: Path, kind: str
) -> None:
    (said,) = refused(tmp_path, {"free": torch.zeros(4), **shared(kind)})
    assert {said[0], said.partition(" with ")[2][0]} == {"a", "b"}
    assert "bytes of memory with" in said
    assert "exclude=" in said


def test_leaving_one_of_them_out_is_a_way(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"a": torch.ones(6), "b": torch.full((6,), 2.0)})
    target = shared("runs")
    ckpt.load(tmp_path, target, exclude="b")
    assert (target["a"] == 1).all()


def test_a_tensor_with_two_names_is_read_once(tmp_path: Path) -> None:
    saved, target = torch.arange(1000.0), torch.zeros(1000)
    ckpt.save(tmp_path, {"a": saved, "b": saved})
    told: list[int] = []
    ckpt.load(tmp_path, {"a": target, "b": target}, progress=told.append)
    assert torch.equal(target, saved)
    assert sum(told) == saved.nbytes


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


def test_two_targets_that_share_some_memory_are_filled_where_the_values_agree(
    tmp_path: Path,
) -> None:
    state = shared("columns")
    state["a"].copy_(torch.arange(24.0).reshape(6, 4))
    state["b"].copy_(torch.arange(18.0).reshape(6, 3))
    ckpt.save(tmp_path, state)
    target = shared("columns")
    ckpt.load(tmp_path, target)
    assert all(torch.equal(target[name], value) for name, value in state.items())
    ckpt.state_dict.load(state, target := shared("columns"))
    assert all(torch.equal(target[name], value) for name, value in state.items())


class Tied(nn.Module):
    """An embedding and a head, of one tensor or of two."""

    def __init__(self, is_tied: bool, embed: float, head: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 40, bias=False)
        with torch.no_grad():
            self.embed.weight.copy_(torch.arange(320.0).reshape(40, 8) + embed)
            self.head.weight.copy_(torch.arange(320.0).reshape(40, 8) + head)
        if is_tied:
            self.head.weight = self.embed.weight


def as_native(folder: Path, model: Tied) -> Path:
    ckpt.save(folder / "native", model)
    return folder / "native"


def as_compressed(folder: Path, model: Tied) -> Path:
    ckpt.save(folder / "small", model, compress=True)
    return folder / "small"


def as_huggingface(folder: Path, model: Tied) -> Path:
    ckpt.convert(as_native(folder, model), folder / "hf", to="hf")
    return folder / "hf"


def as_torch(folder: Path, model: Tied) -> Path:
    torch.save(model.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def as_dcp(folder: Path, model: Tied) -> Path:
    ckpt.convert(as_native(folder, model), folder / "dcp", to="dcp")
    return folder / "dcp"


SOURCES = [as_native, as_compressed, as_huggingface, as_torch, as_dcp]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize("dtype", [None, "target"])
def test_an_untied_checkpoint_is_loaded_into_a_tied_target_where_its_values_are_equal(
    tmp_path: Path, source: Any, dtype: str | None
) -> None:
    into = Tied(True, 5.0, 5.0)
    into = into.to(torch.float64) if dtype else into
    for is_tied in (True, False):
        folder = tmp_path / str(is_tied)
        folder.mkdir()
        value = float(is_tied)
        ckpt.load(source(folder, Tied(is_tied, value, value)), into, dtype=dtype)
        assert torch.equal(into.head.weight, torch.arange(320.0).reshape(40, 8) + value)
        assert into.head.weight is into.embed.weight


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize("strict", [True, False])
def test_records_that_differ_are_refused_by_the_names_of_a_tied_target(
    tmp_path: Path, source: Any, strict: bool
) -> None:
    model = Tied(False, 1.0, 1.0)
    with torch.no_grad():
        model.head.weight[39, 7] += 1
    into = Tied(True, 5.0, 5.0)
    before = into.head.weight.clone()
    place = source(tmp_path, model)
    with pytest.raises(ckpt.MismatchError) as error:
        ckpt.load(place, into, strict=strict, fallback=[place])
    (said,) = error.value.differences
    assert "head.weight" in str(said)
    assert "shares 1280 bytes of memory with embed.weight in the target" in str(said)
    assert torch.equal(into.head.weight, before)
    ckpt.load(place, into, exclude="embed.weight")
    assert torch.equal(into.head.weight, model.head.weight)
    ckpt.load(place, Tied(False, 5.0, 5.0))


def test_a_tied_target_is_refused_in_memory_too(tmp_path: Path) -> None:
    into = Tied(True, 5.0, 5.0)
    ckpt.state_dict.load(Tied(False, 1.0, 1.0), into)
    assert into.head.weight[0, 0] == 1
    with pytest.raises(ckpt.MismatchError, match=r"head\.weight: shares 1280 bytes of memory"):
        ckpt.state_dict.load(Tied(False, 2.0, 3.0), into)
    assert into.head.weight[0, 0] == 1


VIEWS: dict[str, Any] = {
    "turned": lambda t: t.t(),
    "flat": lambda t: t.view(-1),
    "bits": lambda t: t.view(torch.int32),
    "rows": lambda t: t[1:],
    "bytes": lambda t: t.view(torch.uint8).view(-1),
    "negated": torch._neg_view,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("compress", [False, True])
def test_views_of_another_shape_are_filled_only_where_the_values_agree(
    tmp_path: Path, view: str, compress: bool
) -> None:
    saved = {"t": torch.arange(1.0, 26.0).reshape(5, 5)}
    saved["v"] = VIEWS[view](saved["t"])
    other = {"t": saved["t"], "v": saved["v"].clone()}
    other["v"][(-1,) * other["v"].ndim] = 0
    ckpt.save(tmp_path / "same", saved, compress=compress)
    ckpt.save(tmp_path / "other", other, compress=compress)
    for load in (ckpt.load, ckpt.state_dict.load):
        into = torch.zeros(5, 5)
        target = {"t": into, "v": VIEWS[view](into)}
        with pytest.raises(ckpt.MismatchError, match=r"v: shares \d+ bytes of memory with t"):
            load(tmp_path / "other" if load is ckpt.load else other, target)  # type: ignore[operator]
        assert (into == 0).all()
        load(tmp_path / "same" if load is ckpt.load else saved, target)  # type: ignore[operator]
        assert torch.equal(into, saved["t"])


def test_views_that_are_too_large_to_compare_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = torch.zeros(1 << 22)
    ckpt.save(tmp_path, {"t": t, "v": t.view(2, -1)})
    monkeypatch.setenv("CKPT_MEMORY_BUDGET", "64MiB")
    with pytest.raises(ckpt.MismatchError, match="and the budget is"):
        ckpt.load(tmp_path, {"t": t, "v": t.view(2, -1)})


def load_sharded_ties(folder: str, differ: bool) -> tuple[str, bool]:
    """What becomes of two DTensors over one memory, and whether that was touched."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).reshape(6, 4)
    other = whole.clone()
    other[5, 3] += differ  # which the last rank has
    ckpt.save(folder, {"a": whole, "b": other}, compress=True)  # so that it is read
    one = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)], src_data_rank=None)
    two = DTensor.from_local(one.to_local(), mesh, [Shard(0)], shape=one.shape, stride=one.stride())
    said = ""
    try:
        ckpt.load(folder, {"a": one, "b": two})
    except (ckpt.MismatchError, ckpt.RankError) as error:
        said = str(error)
    return said, bool((one.to_local() != 0).any())


def test_one_rank_that_holds_a_difference_ends_the_load_of_all(
    clusters: Callable, tmp_path: Path
) -> None:
    (said, touched), (other, also) = clusters(2).run(load_sharded_ties, str(tmp_path), True)
    assert "b: shares 48 bytes of memory with a" in other
    assert "rank 1" in said
    assert not touched
    assert not also
    found = clusters(2).run(load_sharded_ties, str(tmp_path / "same"), False)
    assert found == [("", True), ("", True)]


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
