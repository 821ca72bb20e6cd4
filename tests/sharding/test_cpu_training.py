"""Training on the CPU over gloo equals data parallelism, whatever is sharded over whom.

M-13 to M-16 of the behaviours asked of the wrapper class.
"""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import sharding
import sharding.wrap
from tests.sharding import models

CPU = torch.device("cpu")
PLAIN = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STEPS = 4


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(models.trainable(model), lr=0.01, foreach=False)


def ddp_losses() -> list[float]:
    model = DistributedDataParallel(models.network())
    return models.train(model, adam(model), range(STEPS))


def losses(
    api: ModuleType, strategy: str, shards: int, **keywords: object
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters after training; raises unless parameters are in this many shards."""
    module = models.network()
    total = sum(p.numel() for p in module.parameters())
    wrapper = api.FullyShardedDataParallel
    model = wrapper(module, sharding_strategy=api.ShardingStrategy[strategy], **keywords)
    instances = wrapper.fsdp_modules(model)
    assert {each.sharding_strategy for each in instances} == {api.ShardingStrategy[strategy]}
    held = sum(p.numel() for p in model.parameters())
    padding = shards * len(list(module.modules()))
    assert total // shards - padding <= held <= total // shards + padding
    found = models.train(model, adam(model), range(STEPS))
    assert sum(p.numel() for p in model.parameters()) == held
    return found, models.whole_states(wrapper, model)


def same_as_ddp(strategy: str, use_orig_params: bool) -> None:
    size = dist.get_world_size()
    results = []
    for api in (torch_fsdp, sharding):
        keywords = {"auto_wrap_policy": api.wrap.always_wrap_policy}
        if strategy in HYBRID:
            keywords["device_mesh"] = init_device_mesh("cpu", (1, size))
        shards = 1 if strategy == "NO_SHARD" else size
        results.append(
            losses(
                api,
                strategy,
                shards,
                device_id=CPU,
                use_orig_params=use_orig_params,
                **keywords,
            )
        )
    (torch_losses, torch_states), (our_losses, our_states) = results
    wanted = ddp_losses()
    assert wanted[-1] < wanted[0]
    assert torch_losses == pytest.approx(wanted, rel=1e-5)
    assert our_losses == pytest.approx(wanted, rel=1e-5)
    models.same(our_states, torch_states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", PLAIN + HYBRID)
def test_m_13_training_with_each_strategy_has_the_losses_of_ddp(
    clusters: Callable, strategy: str
) -> None:
    for use_orig_params in (False, True):
        clusters(2).run(same_as_ddp, strategy, use_orig_params)


def two_by_two() -> None:
    wanted = ddp_losses()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    inner, outer = mesh.get_group("shard"), mesh.get_group("replicate")
    for strategy in HYBRID:
        for groups in ({"device_mesh": mesh}, {"process_group": (inner, outer)}):
            states = []
            for api in (torch_fsdp, sharding):
                policy = api.wrap.ModuleWrapPolicy({models.Block, models.Tied, nn.Linear})
                found, state = losses(
                    api, strategy, 2, device_id=CPU, auto_wrap_policy=policy, **groups
                )
                assert found == pytest.approx(wanted, rel=1e-4)
                states.append(state)
            models.same(*states, rtol=1e-3, atol=1e-4)


@pytest.mark.thorough
def test_m_14_two_by_two_ranks_shard_within_rows_and_average_across_them(
    clusters: Callable,
) -> None:
    clusters(4).run(two_by_two)


def default_groups() -> None:
    """Every rank is on this machine: the machine is the node that parameters are sharded over."""
    replica = models.network()
    wanted = models.train_replica(replica, adam(replica), range(STEPS))
    assert wanted == pytest.approx(ddp_losses(), rel=1e-4)
    for strategy in HYBRID:
        policy = sharding.wrap.ModuleWrapPolicy({models.Block, models.Tied, nn.Linear})
        found, state = losses(
            sharding, strategy, dist.get_world_size(), device_id=CPU, auto_wrap_policy=policy
        )
        assert found == pytest.approx(wanted, rel=1e-4)
        models.same(state, models.states(replica), rtol=1e-3, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, 4])
def test_m_15_hybrid_sharding_over_default_groups_averages_over_all_ranks(
    clusters: Callable, world_size: int
) -> None:
    clusters(world_size).run(default_groups)


def hybrid_without_groups() -> None:
    for api in (torch_fsdp, sharding):
        for name in HYBRID:
            strategy = api.ShardingStrategy[name]
            with pytest.raises(
                ValueError,
                match=f"Manual wrapping with {strategy} requires explicit specification of "
                "process group or device_mesh",
            ):
                api.FullyShardedDataParallel(
                    models.linears(1), sharding_strategy=strategy, device_id=CPU
                )


def test_m_16_hybrid_sharding_by_hand_asks_for_groups(clusters: Callable) -> None:
    clusters(2).run(hybrid_without_groups)
