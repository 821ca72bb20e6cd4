"""Tensors between the kinds, over real process groups: bit for bit, and only what has to move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from sharding.describe.members import LocalPart
from sharding.errors import ShardingError
from sharding.kind import Kind
from sharding.layout import FlatShard, Layout, Mesh
from sharding.layout.copies import copies_to
from sharding.reshard import kinds
from sharding.reshard.kinds import convert_kind
from tests.conftest import RankFailed
from tests.selection import slow
from tests.traffic import received_while

SHAPES = {"a": (7, 5), "b": (1,), "c": (), "d": (2, 3, 4), "e": (0, 3), "f": (13,)}
DTYPES = {"a": "float32", "b": "bfloat16", "c": "int64", "d": "complex64", "e": "bool", "f": "int8"}
KINDS = list(Kind)


def whole() -> dict[str, torch.Tensor]:
    """The same on every rank: every element another, of all widths."""
    tensors = {}
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        dtype = getattr(torch, DTYPES[name])
        tensors[name] = torch.arange(numel).add(3).to(dtype).reshape(shape)
    return tensors


def same(found: dict[str, Any]) -> bool:
    """Whether plain tensors are those of `whole`, bit for bit."""
    expected = whole()
    return list(found) == list(expected) and all(
        type(found[name]) is torch.Tensor
        and found[name].dtype == tensor.dtype
        and torch.equal(found[name], tensor)
        for name, tensor in expected.items()
    )


def there_and_back(first: Kind, second: Kind, budget: int) -> bool:
    """Full, to one kind, to another, and full again."""
    tensors: Any = whole()
    for kind in (first, second, Kind.FULL):
        tensors = convert_kind(tensors, kind, budget=budget)
    return same(tensors)


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [1, slow(2), 3])
def test_every_pair_of_kinds_round_trips_to_the_bit_whatever_the_budget(
    clusters: Any, world_size: int
) -> None:
    for first in KINDS:
        for second in KINDS:
            for budget in (1, 64, 1 << 20):
                assert all(clusters(world_size).run(there_and_back, first, second, budget))


def forms() -> dict[str, str]:
    """What each kind is made of."""
    found = {}
    for kind in KINDS:
        made = convert_kind(whole(), kind)
        found[kind.value] = {name: type(tensor).__name__ for name, tensor in made.items()}
    rows = convert_kind(whole(), Kind.SHARDED)
    assert isinstance(rows["a"], DTensor)
    assert tuple(rows["a"].placements) == (Shard(0),)
    assert rows["a"].to_local().shape[0] <= -(-7 // dist.get_world_size())
    return found


def test_full_is_plain_sharded_is_dtensors_and_local_is_parts(clusters: Any) -> None:
    for found in clusters(2).run(forms):
        assert set(found["full"].values()) == {"Tensor"}
        assert {n: t for n, t in found["sharded"].items() if t != "DTensor"} == {"c": "Tensor"}
        assert set(found["local"].values()) == {"LocalPart"}


def counted(make: Any, kind: Kind) -> int:
    """Bytes that this rank receives while tensors become another kind."""
    return received_while(lambda: convert_kind(make, kind))[1]


def traffic() -> dict[str, int]:
    tensors = {"w": torch.arange(60.0).reshape(12, 5)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = {"w": distribute_tensor(tensors["w"], mesh, [Shard(0)])}
    return {
        "full to full": counted(tensors, Kind.FULL),
        "full to sharded": counted(tensors, Kind.SHARDED),
        "full to local": counted(tensors, Kind.LOCAL),
        "sharded to sharded": counted(rows, Kind.SHARDED),
        "sharded to local": counted(rows, Kind.LOCAL),
        "sharded to full": counted(rows, Kind.FULL),
    }


def test_only_what_a_rank_lacks_travels(clusters: Any) -> None:
    for found in clusters(3).run(traffic):
        assert found.pop("sharded to full") == 60 * 4 * 2 // 3
        assert set(found.values()) == {0}


def shared() -> bool:
    tensors = whole()
    local = convert_kind(tensors, Kind.LOCAL)
    ends = []
    for name, part in local.items():
        tensor = tensors[name]
        first = tensor.data_ptr()
        ends.append(part.local.numel() == 0 or first <= part.local.data_ptr())
        ends.append(part.local.data_ptr() <= first + tensor.nbytes)
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(tensors["a"], mesh, [Shard(0)])
    kept = convert_kind({"a": rows}, Kind.LOCAL)["a"].local
    return all(ends) and kept.data_ptr() == rows.to_local().data_ptr()


def test_a_local_state_shares_the_memory_of_what_it_was_made_of(clusters: Any) -> None:
    assert all(clusters(2).run(shared))


def on_the_first() -> list[str]:
    return list(convert_kind(convert_kind(whole(), Kind.LOCAL), Kind.FULL, rank0_only=True))


def test_rank_0_only_gives_the_others_no_names(clusters: Any) -> None:
    assert clusters(3).run(on_the_first) == [list(SHAPES), [], []]


def from_the_first() -> bool:
    """What one rank alone has, to all."""
    given = whole()
    layouts = {name: Layout.single(tuple(t.shape), 1) for name, t in given.items()}
    mine = dist.get_rank() == 1
    parts = {
        name: LocalPart(t if mine else t.new_empty(0), layouts[name]) for name, t in given.items()
    }
    rows = convert_kind(parts, Kind.SHARDED)
    return same(convert_kind(parts, Kind.FULL)) and same(convert_kind(rows, Kind.FULL))


def test_what_one_rank_has_reaches_all(clusters: Any) -> None:
    assert all(clusters(3).run(from_the_first))


def over_a_grid() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rows = convert_kind(whole(), Kind.SHARDED, mesh=mesh)
    assert tuple(rows["a"].placements) == (Replicate(), Shard(0))
    flat = convert_kind(rows, Kind.LOCAL, mesh=mesh)
    assert flat["a"].layout.placements[-1] == FlatShard(0, 18)
    both = distribute_tensor(whole()["d"], mesh, [Shard(2), Shard(0)])
    assert torch.equal(convert_kind({"d": both}, Kind.FULL)["d"], whole()["d"])
    return same(convert_kind(rows, Kind.FULL)) and same(convert_kind(flat, Kind.FULL))


def test_a_mesh_of_two_dimensions_replicates_along_the_first(clusters: Any) -> None:
    assert all(clusters(4).run(over_a_grid))


def over_a_slice() -> bool:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for name in ("rows", "columns"):
        rows = convert_kind(whole(), Kind.SHARDED, mesh=grid[name])
        assert rows["a"].device_mesh == grid[name]
        assert rows["a"].to_local().shape[0] in (3, 4)
        assert same(ckpt.state_dict.convert(rows, to="full"))
        flat = convert_kind(whole(), Kind.LOCAL, mesh=grid[name])
        assert same(convert_kind(flat, Kind.FULL))
    return True


def test_a_slice_of_a_mesh_is_replicated_along_the_rest_of_it(clusters: Any) -> None:
    assert all(clusters(4).run(over_a_slice))


def truncated() -> None:
    layout = Layout((10,), Mesh.grid(("dp",), (2,)), (FlatShard(0, 5),))
    short = 4 if dist.get_rank() == 1 else 5
    convert_kind({"w": LocalPart(torch.zeros(short), layout)}, Kind.FULL)


def test_a_truncated_local_shard_is_an_error_on_all_ranks_that_names_it(clusters: Any) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(truncated)
    errors = failed.value.errors
    assert errors[1][0] == "LocalShapeError"
    assert "w: rank 1 has a local tensor of 4 elements" in errors[1][1]
    assert errors[0][0] == "RankError"
    assert "w: rank 1 has a local tensor of 4 elements" in errors[0][1]


def differing() -> None:
    convert_kind({"a" if dist.get_rank() == 0 else "b": torch.zeros(2)}, Kind.FULL)


def test_ranks_that_give_different_names_are_told_so(clusters: Any) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(differing)
    assert {error[0] for error in failed.value.errors.values()} == {"ShardingError"}


STEPPED = {
    "every other column": lambda: torch.arange(24.0).reshape(4, 6)[:, ::2],
    "one column": lambda: torch.arange(24.0).reshape(4, 6)[:, 1],
    "one element for all": lambda: torch.tensor(3.0).expand(5),
    "transposed": lambda: torch.arange(24.0).reshape(4, 6).t(),
}
"""Tensors whose elements do not lie end to end."""


def stepped_through(how: str, kind: Kind, budget: int) -> bool:
    made = convert_kind({"w": STEPPED[how]()}, kind, budget=budget)
    back = convert_kind(made, Kind.FULL, budget=budget)["w"]
    return isinstance(back, torch.Tensor) and torch.equal(back, STEPPED[how]())


@pytest.mark.parametrize("kind", [Kind.SHARDED, Kind.LOCAL])
@pytest.mark.parametrize("how", STEPPED)
def test_elements_that_do_not_lie_end_to_end_are_those_that_travel(
    clusters: Any, how: str, kind: Kind
) -> None:
    for budget in (1, 64 << 20):
        assert all(clusters(2).run(stepped_through, how, kind, budget))


def test_sharded_tensors_need_a_process_group() -> None:
    with pytest.raises(ShardingError, match="init_process_group"):
        convert_kind({"w": torch.zeros(3)}, Kind.SHARDED)
    assert convert_kind({"w": torch.zeros(3)}, Kind.FULL)["w"].shape == (3,)


def test_local_storage_has_the_shape_that_a_layout_gives_it() -> None:
    flat = Layout((3, 4), Mesh.grid(("dp",), (2,)), (FlatShard(0, 6),))
    assert kinds.storage_shape(flat, 0) == (6,)
    assert kinds.storage_shape(Layout.single((3, 4)), 0) == (3, 4)
    assert kinds.storage_shape(Layout.single((3, 4)), 1) is None
    assert list(copies_to(flat, Layout.single((3, 4)), 0))
