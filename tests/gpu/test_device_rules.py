"""What `device_id` does where there is a GPU, and the texts that only a GPU brings about.

tests/sharding/test_device_rules.py has what the CPU shows of the same rules.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sharding
from sharding import CPUOffload
from tests.sharding import models

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
FSDP = sharding.FullyShardedDataParallel


def moved_to_the_gpu() -> None:
    gpu = torch.device("cuda", 0)
    torch.cuda.set_device(gpu)
    for device_id in (0, gpu):
        for device in (CPU, gpu):
            model = FSDP(models.network().to(device), device_id=device_id, use_orig_params=True)
            assert {p.device for p in model.parameters()} == {gpu}
            assert model.compute_device == gpu
    with pytest.warns(UserWarning, match="does not have an explicit index"):
        FSDP(models.linears(1).to(gpu), device_id=torch.device("cuda"))


def test_m_01_device_id_moves_a_module_to_the_gpu_and_warns_without_an_index(
    clusters: Callable,
) -> None:
    clusters(1).run(moved_to_the_gpu)


def inputs_follow_the_module() -> None:
    torch.cuda.set_device(0)
    with pytest.warns(UserWarning, match="passed-in `module` is on CPU"):
        model = FSDP(models.linears(2))
    assert {p.device for p in model.parameters()} == {CPU}
    with pytest.raises(RuntimeError, match=r"has parameters on cpu\. Make sure to move .* cuda:0"):
        model(models.batch(0))
    model = FSDP(models.linears(2)).cuda()
    loss = model(models.batch(0)).sum()
    assert loss.device.type == "cuda"
    loss.backward()


def test_m_17_a_cpu_module_warns_where_a_gpu_will_be_used_and_inputs_are_moved(
    clusters: Callable,
) -> None:
    clusters(1).run(inputs_follow_the_module)


def wrong_gpu() -> None:
    torch.cuda.set_device(1)
    for module in (nn.ReLU(), nn.Linear(3, 3).cuda(1)):
        with pytest.raises(ValueError, match=r"Inconsistent.*cuda:1 vs cuda:0"):
            FSDP(module, device_id=0)
    module = nn.Sequential(nn.Linear(3, 3).cuda(0), nn.Linear(3, 3).cuda(1))
    with pytest.raises(RuntimeError, match="FSDP only supports single device modules"):
        FSDP(module)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_m_04_m_05_m_06_another_gpu_than_device_id_says_is_an_error(clusters: Callable) -> None:
    clusters(1).run(wrong_gpu)


def out_of_reach() -> None:
    with pytest.raises(
        ValueError, match="The module has CPU parameters or buffers when `sync_module_states=True`"
    ):
        FSDP(
            models.linears(1), sync_module_states=True, process_group=dist.new_group(backend="nccl")
        )


def test_m_19_sync_module_states_of_a_cpu_module_is_refused_where_only_gpus_communicate(
    clusters: Callable,
) -> None:
    clusters(1).run(out_of_reach)


def moved_away() -> None:
    torch.cuda.set_device(0)
    x = models.batch(0, device="cuda")
    for original in (False, True):
        model = FSDP(models.linears(2), device_id=0, use_orig_params=original).cpu()
        with pytest.raises(
            RuntimeError,
            match=r"An FSDP-managed module unexpectedly has parameters on cpu\. Make sure to move "
            r"the module to cuda:0 before training\.",
        ):
            model(x)
        offloaded = FSDP(
            models.linears(2),
            device_id=0,
            use_orig_params=original,
            cpu_offload=CPUOffload(offload_params=True),
        ).cuda()
        with pytest.raises(
            RuntimeError,
            match=r"An FSDP-managed module with parameter CPU offloading enabled has parameters on "
            r"cuda:0\. Make sure to not move the module from CPU when offloading parameters\.",
        ):
            offloaded(x)


def test_m_07_parameters_that_have_left_their_device_are_an_error_that_says_which(
    clusters: Callable,
) -> None:
    clusters(1).run(moved_away)


def mesh_of_the_device() -> None:
    torch.cuda.set_device(0)
    model = sharding.fully_shard(models.linears(2).cuda())
    assert {p.device_mesh.device_type for p in model.parameters()} == {"cuda"}
    assert {p.to_local().device.type for p in model.parameters()} == {"cuda"}


def test_without_a_mesh_parameters_are_sharded_over_the_accelerators(clusters: Callable) -> None:
    clusters(1).run(mesh_of_the_device)


def device_that_is_not_there() -> None:
    count = torch.cuda.device_count()
    for device_id in (count, torch.device("cuda", count)):
        with pytest.raises(RuntimeError, match=rf"does not exist: this machine has {count} device"):
            FSDP(models.linears(1), device_id=device_id)


def test_m_05_a_gpu_that_is_not_there_is_named_with_the_number_of_those_that_are(
    clusters: Callable,
) -> None:
    clusters(1).run(device_that_is_not_there)


def test_the_grad_scaler_is_enabled_by_default() -> None:
    assert sharding.sharded_grad_scaler.ShardedGradScaler().is_enabled()
