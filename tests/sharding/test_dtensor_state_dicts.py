"""State dicts of `fully_shard` modules, of the kind that is set for them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
from sharding import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from sharding.describe.own_members import local_parts
from tests.conftest import RankFailed
from tests.sharding.replica import Block

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
state_dict_type = FullyShardedDataParallel.state_dict_type


class Network(nn.Module):
    """Two blocks of odd sizes, a tied weight, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.first = nn.Linear(7, 5, bias=False)
        self.second = nn.Linear(7, 5, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.arange(3))


def plain(seed: int) -> Network:
    torch.manual_seed(seed)
    return Network()


def sharded(seed: int) -> nn.Module:
    model = plain(seed)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def without_a_kind() -> None:
    model = sharded(0)
    settings = FullyShardedDataParallel.get_state_dict_type(model)
    assert settings.state_dict_type is SHARDED
    with state_dict_type(model, FULL):
        pass
    assert FullyShardedDataParallel.get_state_dict_type(model) == settings
    state = model.state_dict()
    assert isinstance(state["first.weight"], DTensor)
    same(whole(state), plain(0).state_dict())


def test_without_a_kind_a_state_dict_has_dtensors(clusters: Any) -> None:
    clusters(2).run(without_a_kind)


def full() -> None:
    model = sharded(0)
    with state_dict_type(model, FULL):
        state = model.state_dict()
        assert not any(isinstance(value, DTensor) for value in state.values())
        assert state["first.weight"] is state["second.weight"]
        same(state, plain(0).state_dict())
        taking = sharded(1)
    with state_dict_type(taking, FULL):
        taking.load_state_dict(plain(0).state_dict())
    same(whole(taking.state_dict()), plain(0).state_dict())
    with state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        state = model.state_dict()
    assert bool(state) == (dist.get_rank() == 0)


def test_a_full_one_has_whole_tensors_and_loads_them(clusters: Any) -> None:
    clusters(2).run(full)
    clusters(3).run(full)


def of_another_mesh() -> None:
    """DTensors of other placements, into a module over a grid."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("other",))
    given = {
        name: distribute_tensor(value, mesh, [Shard(value.ndim - 1)])
        for name, value in plain(0).state_dict().items()
        if name != "calls"
    }
    given["calls"] = plain(0).calls
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    taking = plain(1)
    for part in (*taking.blocks, taking):
        fully_shard(part, mesh=grid)
    with state_dict_type(taking, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
        taking.load_state_dict(given)
        state = taking.state_dict()
    assert state["first.weight"].device_mesh == grid
    same(whole(state), plain(0).state_dict())


def test_a_sharded_one_of_another_mesh_and_placement_loads(clusters: Any) -> None:
    clusters(4).run(of_another_mesh)


def local() -> None:
    model = sharded(0)
    with state_dict_type(model, LOCAL):
        if dist.get_rank() == 1:  # nobody waits for anybody
            state = model.state_dict()
            stored = io.BytesIO()
            torch.save(state, stored)
            stored.seek(0)
            read = torch.load(stored, weights_only=True)
            taking = sharded_alone = model
            with torch.no_grad():
                for parameter in sharded_alone.parameters():
                    parameter.to_local().zero_()
            taking.load_state_dict(read)
            assert state["first.weight"].abs().sum() > 0
        dist.barrier()
        state = model.state_dict()
    mine = model.first.weight.to_local()
    assert state["first.weight"].data_ptr() == mine.data_ptr()
    assert type(state["first.weight"]) is torch.Tensor
    parts = local_parts(state)
    assert parts["first.weight"].shape == (5, 7)
    same(ckpt.state_dict.convert(state, to="full"), plain(0).state_dict())


def test_a_local_one_is_memory_that_is_there_and_says_what_it_is(clusters: Any) -> None:
    clusters(2).run(local)


def cut_short() -> None:
    model = sharded(0)
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    with state_dict_type(model, LOCAL):
        state = model.state_dict()
        state["first.weight"] = state["first.weight"][:-1]
        try:
            model.load_state_dict(state)
        finally:
            assert all(torch.equal(p.to_local(), before[n]) for n, p in model.named_parameters())


def test_a_truncated_local_tensor_is_an_error_and_nothing_is_changed(clusters: Any) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(cut_short)
    for rank, (name, message, _) in failed.value.errors.items():
        assert name == "LocalShapeError"
        assert f"first.weight: rank {rank} has a local tensor of shape" in message


def of_another_rank() -> None:
    model = sharded(0)
    with state_dict_type(model, LOCAL):
        state = model.state_dict()
        for record in state._metadata[""]["flat_parameters"]:
            record["rank"] = 5
        model.load_state_dict(state)


def test_a_local_one_of_another_rank_is_an_error(clusters: Any) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(of_another_rank)
    assert {error[0] for error in failed.value.errors.values()} == {"WorldMismatchError"}


def misfit() -> None:
    model, other = sharded(0), plain(1).state_dict()
    other["first.weight"] = torch.zeros(4, 7)
    del other["blocks.0.norm.weight"]
    with state_dict_type(model, FULL):
        model.load_state_dict(other)


def test_what_does_not_fit_is_load_state_dict_s_complaint_with_whole_shapes(
    clusters: Any,
) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(misfit)
    for name, message, _ in failed.value.errors.values():
        assert name == "RuntimeError"
        assert "size mismatch for first.weight" in message
        assert 'Missing key(s) in state_dict: "blocks.0.norm.weight"' in message


def saved_as_they_lie(folder: str) -> None:
    model = sharded(0)
    with state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
        ckpt.save(folder, {"model": model})
        taking = sharded(1)
        with state_dict_type(taking, LOCAL):
            ckpt.load(folder, {"model": taking})
    same(whole(taking.state_dict()), plain(0).state_dict())


def test_a_checkpoint_takes_shards_as_they_lie_whatever_kind_is_set(
    clusters: Any, tmp_path: Any
) -> None:
    clusters(2).run(saved_as_they_lie, str(tmp_path))
