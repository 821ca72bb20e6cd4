"""A group ends with `destroy_process_group`, whatever still lives; a process ends with code 0."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW

import ckpt
from sharding import (
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    composable,
    fully_shard,
)
from sharding.comm_hooks import DefaultState
from sharding.engine.composition import ShardGroup
from sharding.errors import DestroyedGroupError
from sharding.sharded_grad_scaler import ShardedGradScaler
from tests.old_torch import runs_fsdp2

NO_IDLE = not hasattr(os, "SCHED_IDLE")


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 7))


def per_parameter(mesh: DeviceMesh | None) -> nn.Module:
    model = sequential()
    for part in model:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def flat(strategy: ShardingStrategy, mesh: DeviceMesh | None) -> nn.Module:
    return FullyShardedDataParallel(
        sequential(), sharding_strategy=strategy, device_mesh=mesh, use_orig_params=True
    )


def hooked() -> nn.Module:
    model = flat(ShardingStrategy.NO_SHARD, None)
    state = DefaultState(dist.group.WORLD)
    model.register_comm_hook(state, lambda s, g: dist.all_reduce(g, group=s.process_group))
    return model


WAYS: dict[str, Callable[[], nn.Module]] = {
    "fully_shard": lambda: per_parameter(None),
    "fully_shard, mesh": lambda: per_parameter(init_device_mesh("cpu", (2,))),
    "fully_shard, two axes": lambda: per_parameter(init_device_mesh("cpu", (1, 2))),
    "wrapper": lambda: flat(ShardingStrategy.FULL_SHARD, None),
    "wrapper, mesh": lambda: flat(ShardingStrategy.FULL_SHARD, init_device_mesh("cpu", (2,))),
    "wrapper, hybrid": lambda: flat(ShardingStrategy.HYBRID_SHARD, init_device_mesh("cpu", (1, 2))),
    "composable": lambda: composable.fully_shard(sequential()),
    "comm hook": hooked,
}


def worked(way: str, folder: str) -> list[Any]:
    """Everything that a job has when it has trained, saved and loaded."""
    model = WAYS[way]()
    optimizer = AdamW(model.parameters())
    scaler = ShardedGradScaler("cpu", process_group=dist.group.WORLD)
    for _ in range(2):
        scaler.scale(model(torch.ones(2, 7)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    kept: list[Any] = [model, optimizer, scaler]
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            kept.append(model.state_dict())
        kept.append(FullyShardedDataParallel.optim_state_dict(model, optimizer))
    state = {"model": model, "optimizer": optimizer}
    ckpt.save(f"{folder}/1", state)
    handle = ckpt.save(f"{folder}/2", state, blocking=False)
    handle.wait()
    ckpt.load(f"{folder}/1", state)
    return [*kept, handle]


def loops() -> int:
    """Threads of gloo's process groups in this process."""
    names = [Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")]
    return sum(name.read_text().startswith("pt_gloo_runloop") for name in names)


def groups_that_live(folder: str) -> list[str]:
    """The ways after which a group lives on, though torch was told to destroy it."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    before, found = loops(), []
    for number, way in enumerate(WAYS):
        store = f"file://{folder}/store{number}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        kept = worked(way, f"{folder}/{number}")
        groups = [ref(group) for group in dist.distributed_c10d._world.pg_map]
        dist.barrier()
        dist.destroy_process_group()
        if any(group() is not None for group in groups) or loops() > before:
            found.append(way)
        del kept
    return found


@pytest.mark.thorough
def test_no_group_outlives_its_end_though_model_optimizer_and_states_do(
    doomed_cluster: Callable[[int], Any], tmp_path: Path
) -> None:
    assert doomed_cluster(2).run(groups_that_live, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("is_of_fsdp2", [False, pytest.param(True, marks=runs_fsdp2)])
def test_the_mesh_of_saved_tensors_drops_its_group(tmp_path: Path, is_of_fsdp2: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, mesh = ref(dist.group.WORLD), init_device_mesh("cpu", (1,))
    if is_of_fsdp2:
        model = torch_fully_shard(sequential(), mesh=mesh)
        ckpt.save(str(tmp_path / "1"), {"model": model})
        del model
    else:
        ckpt.save(str(tmp_path / "1"), {"x": distribute_tensor(torch.ones(4), mesh, [Shard(0)])})
    dist.destroy_process_group()
    gc.collect()  # a module of torch's FSDP2 keeps the group and is in cycles
    assert group() is None
    assert mesh.ndim == 1, "the mesh is still there"


def test_the_ranks_of_a_destroyed_group_are_an_error_that_says_so() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shard_group, state = ShardGroup.of(dist.group.WORLD), DefaultState(dist.group.WORLD)
    assert shard_group.group is state.process_group is dist.group.WORLD
    dist.destroy_process_group()
    for of in (lambda: shard_group.group, lambda: state.process_group):
        with pytest.raises(DestroyedGroupError, match=r"has been destroyed.*shard the modules"):
            of()


RANK = """
import os, sys
import torch, torch.distributed as dist
from sharding import fully_shard
import ckpt

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
try:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != os.getpid():
            os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Linear(33, 7))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 7)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    ckpt.save(f"{folder}/1", state)
    ckpt.load(f"{folder}/1", state)
    for _ in range(20):
        dist.all_reduce(torch.ones(3))
finally:
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(NO_IDLE, reason="the system has no SCHED_IDLE, which delays gloo's threads")
def test_ranks_that_destroy_the_group_end_well_though_gloos_threads_are_late(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    codes = []
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [sys.executable, "-W", "ignore", "-c", RANK]
        ranks = [
            subprocess.Popen([*command, str(rank), str(folder)], env=environment)
            for rank in range(2)
        ]
        try:
            codes += [rank.wait(120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert codes == [0] * 8
