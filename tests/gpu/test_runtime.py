"""The runtime on a device: one rank with NCCL, several ranks on one GPU with gloo."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import ckpt
import sharding
import sharding.composable
from sharding import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
from sharding.sharded_grad_scaler import ShardedGradScaler
from tests.conftest import RankFailed
from tests.gpu.states import differing
from tests.sharding import models

Ranks = Callable[[str, int], Any]

FSDP = sharding.FullyShardedDataParallel
WAYS = ("fully_shard", "flat", "original", "composable")
COUNTS = (1, 2)
SLOW_ON_CPU = True
"""There the other tests of the runtime say the same, and more."""


def wrapped(way: str, model: nn.Module, device: str, **options: Any) -> nn.Module:
    """The network with its blocks as units of their own, under one of the entry points."""
    if way == "fully_shard":
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for unit in (*getattr(model, "blocks", model), model):
            sharding.fully_shard(unit, mesh=mesh, **options)
        return model
    policy = sharding.wrap.ModuleWrapPolicy({models.Block, nn.Linear})
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    options |= {"device_id": place}
    if way == "composable":
        return sharding.composable.fully_shard(model, policy=policy, **options)
    original = way == "original"
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=original, **options)


def network(device: str, seed: int = 0) -> models.Network:
    """`models.network` on a device, the current one where it is a GPU."""
    if device == "cuda":
        torch.cuda.set_device(0)
    return models.network(seed).to(device)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(models.trainable(model), lr=1e-2)


def data(device: str) -> Callable[[int], tuple[torch.Tensor]]:
    return lambda step: (models.batch(step, device=device),)


def full_states(way: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers by their plain names, in host memory."""
    if way == "fully_shard":
        found = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in states(model)}
    else:
        found = models.whole_states(FSDP, model)
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def states(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def trains(device: str, way: str) -> None:
    replica = network(device)
    model = wrapped(way, network(device), device)
    options = {"data": data(device)}
    wanted = models.train_replica(replica, adam(replica), range(3), **options)
    assert models.train(model, adam(model), range(3), **options) == pytest.approx(wanted, rel=1e-4)
    expected = {name: tensor.detach().cpu() for name, tensor in states(replica)}
    models.same(full_states(way, model), expected, rtol=1e-4, atol=1e-5)
    assert {p.device.type for p in model.parameters()} == {device}


def trains_from_host_memory(device: str, way: str) -> None:
    """The model, its buffers and the inputs of each step are in host memory at first."""
    network(device)  # chooses the device
    model = wrapped(way, models.network(0), device)
    models.train(model, adam(model), range(2), data=data("cpu"))
    assert {tensor.device.type for _, tensor in states(model)} == {device}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_and_inputs_in_host_memory_are_moved(ranks: Ranks, device: str, way: str) -> None:
    ranks(device, 1).run(trains_from_host_memory, device, way)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_network_trains_as_its_replica(ranks: Ranks, device: str, way: str, count: int) -> None:
    ranks(device, count).run(trains, device, way)


def clips(device: str) -> None:
    model, replica = wrapped("original", network(device), device), network(device)
    x = models.batch(0, device=device)
    for each in (model, replica):
        each(x).square().sum().backward()
    models.average_gradients(replica)
    wanted = nn.utils.clip_grad_norm_(replica.parameters(), 0.1)
    found = model.clip_grad_norm_(0.1)
    torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", COUNTS)
def test_gradients_are_clipped_by_the_norm_over_all_ranks(
    ranks: Ranks, device: str, count: int
) -> None:
    ranks(device, count).run(clips, device)


def low_precision(device: str, way: str) -> None:
    plain = models.linears(3).to(device)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    if way == "fully_shard":
        model = wrapped(way, plain, device, mp_policy=MixedPrecisionPolicy(**dtypes))
    else:
        model = wrapped(way, plain, device, mixed_precision=MixedPrecision(**dtypes))
    losses = models.train(
        model, adam(model), range(3), data=lambda step: (models.batch(step, device=device),)
    )
    assert all(loss == loss and loss < 1e3 for loss in losses)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("way", ["fully_shard", "original"])
@pytest.mark.parametrize("count", COUNTS)
def test_mixed_precision_trains(ranks: Ranks, device: str, way: str, count: int) -> None:
    ranks(device, count).run(low_precision, device, way)


def offloaded(device: str, way: str) -> None:
    replica = network(device)
    options: dict[str, Any] = (
        {"offload_policy": CPUOffloadPolicy()}
        if way == "fully_shard"
        else {"cpu_offload": CPUOffload(offload_params=True)}
    )
    model = wrapped(way, network(device), device, **options)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    wanted = models.train_replica(replica, adam(replica), range(2), data=data(device))
    found = models.train(model, adam(model), range(2), data=data(device))
    assert found == pytest.approx(wanted, rel=1e-4)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert {grad.device.type for grad in grads} <= {"cpu"}


@pytest.mark.parametrize("way", ["fully_shard", "original"])
@pytest.mark.parametrize("count", COUNTS)
def test_offloaded_shards_stay_on_the_host_and_train(
    ranks: Ranks, device: str, way: str, count: int
) -> None:
    ranks(device, count).run(offloaded, device, way)


def saves_and_loads(device: str, way: str, folder: str, blocking: bool) -> list[str]:
    model = wrapped(way, network(device), device)
    optimizer = adam(model)
    models.train(model, optimizer, range(2), data=data(device))
    wanted = full_states(way, model)
    state = {"model": model, "optim": optimizer, "step": 2}
    handle = ckpt.save(folder, state, blocking=blocking)
    losses = models.train(model, optimizer, range(2, 4), data=data(device))
    if not blocking:
        handle.wait(60)
    other = wrapped(way, network(device, seed=1), device)
    its_optimizer = adam(other)
    found = ckpt.load(folder, {"model": other, "optim": its_optimizer, "step": 0})
    assert found["step"] == 2
    assert differing(full_states(way, other), wanted) == []
    again = models.train(other, its_optimizer, range(2, 4), data=data(device))
    assert again == pytest.approx(losses, rel=1e-5)
    return sorted(wanted)


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "in the background"])
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_save_and_load_and_one_process_goes_on(
    ranks: Ranks, device: str, tmp_path: Path, way: str, blocking: bool
) -> None:
    folder = str(tmp_path / "c")
    ranks(device, 2).run(saves_and_loads, device, way, folder, blocking)
    target = models.network(seed=2).to(device)
    ckpt.load(folder, {"model": target, "optim": adam(target), "step": 0})
    stored = ckpt.read(folder, include="model.*")["model"]
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor.cpu(), stored[name]), name


@pytest.mark.gpu
def test_one_rank_with_nccl_saves_and_loads(ranks: Ranks, tmp_path: Path) -> None:
    for way in WAYS:
        ranks("cuda", 1).run(saves_and_loads, "cuda", way, str(tmp_path / way), False)


def full_and_sharded(device: str, way: str) -> None:
    model = wrapped(way, network(device), device)
    wanted = full_states(way, model)
    full = dict(ckpt.state_dict.convert(model, to="full"))
    assert differing({k: full[k] for k in wanted}, wanted) == []
    sharded = ckpt.state_dict.convert(model, to="sharded")
    parts = {k: v for k, v in sharded.items() if isinstance(v, DTensor) and k in wanted}
    assert parts
    assert {v.to_local().device.type for v in parts.values()} == {device}
    gathered = {name: part.full_tensor() for name, part in parts.items()}
    assert differing(gathered, {name: wanted[name] for name in parts}) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", COUNTS)
def test_state_dicts_are_converted_where_their_tensors_are(
    ranks: Ranks, device: str, way: str, count: int
) -> None:
    ranks(device, count).run(full_and_sharded, device, way)


def scaled(device: str) -> None:
    model = wrapped("original", network(device), device)
    optimizer, scaler = adam(model), ShardedGradScaler(device=device, init_scale=8.0)
    before = full_states("original", model)
    loss = model(models.batch(0, device=device)).square().mean()
    scaler.scale(loss).backward()
    if dist.get_rank() == 0:
        next(p.grad for p in model.parameters() if p.grad is not None and p.numel()).fill_(
            float("inf")
        )
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert differing(full_states("original", model), before) == []


@pytest.mark.parametrize("count", COUNTS)
def test_an_overflow_on_one_rank_is_a_step_that_all_leave_out(
    ranks: Ranks, device: str, count: int
) -> None:
    ranks(device, count).run(scaled, device)


def unscaled(device: str) -> None:
    parameter = nn.Parameter(torch.ones(8))
    scaler = ShardedGradScaler(device=device, init_scale=65536.0)
    scaler.scale(torch.ones((), device=device))
    for _ in range(50):
        parameter.grad = torch.full((8,), 65536.0)
        if device == "cuda":
            torch.cuda._sleep(20_000_000)  # the scale waits behind this in its stream
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler._unscale_grads_(
            optimizer,
            scaler._scale.double().reciprocal().float(),
            torch.zeros((), device=device),
        )
        assert torch.equal(parameter.grad, torch.ones(8))


def test_gradients_in_host_memory_are_divided_by_the_scale_once_it_has_arrived(
    ranks: Ranks, device: str
) -> None:
    ranks(device, 1).run(unscaled, device)


def waits_in_backward(device: str, way: str) -> list[str]:
    """The warnings of waits for the device in a backward in which all parameters have gradients."""
    model = wrapped(way, nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(device), device)
    batch = torch.ones(2, 8, device=device)
    for _ in range(2):  # the first makes connections and buffers
        model(batch).sum().backward()
    loss = model(batch).sum()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [str(one.message) for one in caught if "synchroniz" in str(one.message)]


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_the_host_waits_for_no_reduction_of_a_backward_with_all_gradients(
    ranks: Ranks, way: str
) -> None:
    assert ranks("cuda", 1).run(waits_in_backward, "cuda", way) == [[]]


def differing_ranks(folder: str, device: str) -> None:
    rows = 5 if dist.get_rank() else 4
    ckpt.save(folder, {"w": torch.ones(rows, 2, device=device)})


def test_an_error_of_one_rank_reaches_the_others(ranks: Ranks, device: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        ranks(device, 2).run(differing_ranks, str(tmp_path / "c"), device)
    assert sorted(failed.value.errors) == [0, 1]
    assert not (tmp_path / "c" / "manifest.json").exists()
