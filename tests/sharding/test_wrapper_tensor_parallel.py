"""The wrapper over parameters that tensor parallelism has divided already: 2 x 2 ranks."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from sharding import FullyShardedDataParallel, ShardingStrategy, StateDictType


class Block(nn.Module):
    """Two layers to divide, one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(strategy: str, use_orig_params: bool) -> None:
    torch.manual_seed(0)
    replica = nn.Sequential(Block(), Block())
    model = copy.deepcopy(replica)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for index, block in enumerate(model):
        parallelize_module(
            block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        model[index] = FullyShardedDataParallel(
            block,
            process_group=mesh["data"].get_group(),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )
    model = FullyShardedDataParallel(
        model,
        process_group=mesh["data"].get_group(),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
    )
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh["data"].get_local_rank())
        x = torch.randn(4, 6, generator=generator)
        for each in (model, replica):
            each(x).square().sum().backward()
        for parameter in replica.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        norm = model.clip_grad_norm_(1.0)
        wanted = nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        torch.testing.assert_close(norm, wanted)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    assert list(state) == list(replica.state_dict())
    for name, value in replica.state_dict().items():
        torch.testing.assert_close(state[name], value)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = model.state_dict()
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_state_dict(sharded)
    for loaded in (None, replica.state_dict()):
        if loaded is not None:
            for parameter in model.parameters():
                parameter.data.zero_()
            model.load_state_dict(loaded)
        with FullyShardedDataParallel.summon_full_params(model):
            for mine, other in zip(model.parameters(), replica.parameters(), strict=True):
                torch.testing.assert_close(whole(mine.detach()), other.detach())


@pytest.mark.thorough
@pytest.mark.wide
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_it_trains_clips_saves_and_loads_as_the_replica(
    clusters: Callable, strategy: str, use_orig_params: bool
) -> None:
    clusters(4).run(train, strategy, use_orig_params)


def parallel(use_orig_params: bool, seed: int, sync: bool) -> tuple[nn.Module, nn.Module, int]:
    """A wrapped block over 2 x 2 ranks, its replica, and the rank among those that share data."""
    torch.manual_seed(seed)
    model = Block()
    replica = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for name, local in model.named_parameters():
        replica.get_parameter(name).data = whole(local.detach()).clone()
    model = FullyShardedDataParallel(
        model,
        device_mesh=mesh["data"],
        use_orig_params=use_orig_params,
        sync_module_states=sync,
    )
    return model, replica, mesh["data"].get_local_rank()


def summon_gradients(use_orig_params: bool) -> None:
    model, replica, rank = parallel(use_orig_params, 0, False)
    x = torch.linspace(-1, 1, 12).reshape(2, 6) + rank
    for each in (model, replica):
        each(x).square().sum().backward()
    for parameter in replica.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    for factor in (1, 2):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            for mine, other in zip(model.parameters(), replica.parameters(), strict=True):
                assert type(mine.grad) is type(mine.data)
                torch.testing.assert_close(whole(mine.grad), factor * other.grad)
                mine.grad.mul_(2)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_are_summoned_and_written_back_in_the_form_of_their_parameters(
    clusters: Callable, use_orig_params: bool
) -> None:
    clusters(4).run(summon_gradients, use_orig_params)


def synchronize(use_orig_params: bool) -> None:
    rank = dist.get_rank() // 2
    model, replica, _ = parallel(use_orig_params, 10 * (1 + rank), True)
    for parameter in replica.parameters():
        dist.broadcast(parameter.data, 0)
    with FullyShardedDataParallel.summon_full_params(model):
        for mine, other in zip(model.parameters(), replica.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.detach()), other.detach())


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_states_are_synchronized_over_the_ranks_of_each_part(
    clusters: Callable, use_orig_params: bool
) -> None:
    clusters(4).run(synchronize, use_orig_params)
