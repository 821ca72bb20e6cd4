"""Meshes of two and three dimensions: replicas of shards, shards of tensor-parallel parameters.

Torch's fully_shard is the oracle where it can be; where it cannot, the unsharded replica.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.append(str(Path(__file__).parent))  # for the ranks too, which know this file alone

from replica import average_gradients, batch, pair, train

import sharding
from sharding.describe.dtensor import describe
from sharding.layout import Mesh
from tests.old_torch import TORCH_TRAINS_ON_CPU
from tests.selection import slow

Library = SimpleNamespace
OURS: Library = sharding  # type: ignore[assignment]
TORCH: Library = fsdp  # type: ignore[assignment]
LIBRARIES = (OURS, TORCH) if TORCH_TRAINS_ON_CPU else (OURS,)


class Perceptron(nn.Module):
    """Two layers, as tensor parallelism cuts them: columns, then rows."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def perceptrons(width: int = 8, hidden: int = 16) -> nn.Sequential:
    return nn.Sequential(Perceptron(width, hidden), Perceptron(width, hidden))


def sharded(library: Library, model: nn.Module, **settings: object) -> nn.Module:
    """A unit for every child, one for the rest."""
    for child in model.children():
        library.fully_shard(child, **settings)
    return library.fully_shard(model, **settings)


def values(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The whole values of DTensors, put together from what the layout algebra says of them."""
    world = dist.get_world_size()
    mesh = Mesh.grid(("world",), (world,))
    described = [describe(tensor.detach(), "value", mesh) for tensor in tensors]
    ranks: list[list[torch.Tensor]] = [[]] * world
    dist.all_gather_object(ranks, [local.flatten().clone() for local, _ in described])
    results = []
    for number, (tensor, (_, layout)) in enumerate(zip(tensors, described, strict=True)):
        result = torch.full(tuple(tensor.shape), float("nan"), dtype=tensor.dtype)
        for rank, parts in enumerate(ranks):
            for piece in layout.pieces(rank):
                bounds = zip(piece.box.lo, piece.box.hi, strict=True)
                box = tuple(slice(lo, hi) for lo, hi in bounds)
                part = parts[number].as_strided(piece.box.shape, piece.strides, piece.at)
                result[box] = part
        results.append(result)
    return results


def assert_values(model: nn.Module, replica: nn.Module) -> None:
    """Names, parameters and gradients are the replica's."""
    sharded, plain = dict(model.named_parameters()), dict(replica.named_parameters())
    assert list(sharded) == list(plain)
    compared: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for name, parameter in sharded.items():
        compared.append((name, parameter, plain[name].detach()))
        assert (parameter.grad is None) == (plain[name].grad is None), name
        if parameter.grad is not None:
            assert parameter.grad.placements == parameter.placements, name
            compared.append((name, parameter.grad, plain[name].grad))
    found = values([tensor for _, tensor, _ in compared])
    for value, (name, _, wanted) in zip(found, compared, strict=True):
        torch.testing.assert_close(value, wanted, msg=lambda text, name=name: f"{name}: {text}")


def assert_as_torchs(ours: nn.Module, torchs: nn.Module) -> None:
    """Placements, local tensors and gradients are those that torch has."""
    for (name, mine), (other_name, other) in zip(
        ours.named_parameters(), torchs.named_parameters(), strict=True
    ):
        assert name == other_name
        assert mine.placements == other.placements, name
        assert mine.device_mesh == other.device_mesh, name
        torch.testing.assert_close(
            mine.to_local(), other.to_local(), msg=lambda text, name=name: f"{name}: {text}"
        )
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(
                mine.grad.to_local(),
                other.grad.to_local(),
                msg=lambda text, name=name: f"{name}: {text}",
            )


# Replicas of shards.


def hybrid_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def three_levels(low: bool) -> None:
    """Nothing is sent, then shards are summed, then replicas too."""
    mesh = hybrid_mesh()
    levels = ["none", "shards", "none", "shards", "all"]
    trained = []
    settings: dict[str, object] = {}
    for library in LIBRARIES:
        if low:
            settings = {"mp_policy": library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        torch.manual_seed(0)
        model = sharded(library, perceptrons(7, 5), mesh=mesh, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for micro, level in enumerate(levels):
                model.set_requires_gradient_sync(level != "none")
                model.set_requires_all_reduce(level == "all")
                model(batch(10 * step + micro, 4, 7)).square().mean().backward()
                present = [p.grad is not None for p in model.parameters()]
                if library is OURS:
                    assert all(has == (level == "all") for has in present), (micro, present)
            trained.append([p.grad.to_local().clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(trained[:2], trained[-2:], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_gradients_add_up_on_three_levels(clusters: Callable, low: bool) -> None:
    clusters(4).run(three_levels, low)


def clipped_and_saved() -> None:
    mesh = hybrid_mesh()
    model, replica = pair(partial(perceptrons, 7, 5))
    other = copy.deepcopy(replica)
    sharded(OURS, model, mesh=mesh)
    sharded(TORCH, other, mesh=mesh)
    for each in (model, other, replica):
        each(batch(0, 4, 7)).square().sum().backward()
    average_gradients(replica)
    assert_as_torchs(model, other)
    for parameter in model.parameters():
        assert parameter.placements == (Replicate(), Shard(0))
    for norm in (1.0, 2.0):
        results = [
            nn.utils.clip_grad_norm_(each.parameters(), 0.1 / norm, norm)
            for each in (model, replica)
        ]
        torch.testing.assert_close(results[0].full_tensor(), results[1])
        assert_values(model, replica)
    state = model.state_dict()
    for name, tensor in state.items():
        assert torch.equal(values([tensor])[0], replica.state_dict()[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict({name: torch.zeros_like(tensor) + 1 for name, tensor in state.items()})
    assert torch.equal(values([model[0].up.weight])[0], torch.ones(5, 7))


@pytest.mark.thorough
@pytest.mark.skipif(
    not TORCH_TRAINS_ON_CPU,
    reason="torch's FSDP2, the oracle, trains right on a CPU from torch 2.10 on",
)
def test_replicated_shards_clip_and_save_as_the_replica(clusters: Callable) -> None:
    clusters(4).run(clipped_and_saved)


def tall_mesh() -> None:
    """All ranks replicate, or all of them shard, in a mesh of two dimensions."""
    for sizes in ((4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        model, replica = pair(partial(perceptrons, 7, 5))
        sharded(OURS, model, mesh=mesh)
        train(model, replica, [batch(step, 4, 7) for step in range(2)], exact=False)


@pytest.mark.thorough
def test_a_mesh_may_have_one_rank_along_a_dimension(clusters: Callable) -> None:
    clusters(4).run(tall_mesh)


def kept_on_two_ranks() -> None:
    """A number of ranks: the whole parameters are gathered from so many in backward."""
    for library in LIBRARIES:
        model, replica = pair(partial(perceptrons, 7, 5))
        for child in model:
            library.fully_shard(child, reshard_after_forward=2)
        library.fully_shard(model)
        train(model, replica, [batch(step, 4, 7) for step in range(2)], exact=False)
    model, replica = pair(partial(perceptrons, 7, 5))
    sharded(OURS, model, reshard_after_forward=2, mesh=init_device_mesh("cpu", (4,)))

    def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first = model(x).square().mean()
        return first + model(2 * x).mean()

    train(model, replica, [batch(step, 4, 7) for step in range(2)], twice, exact=False)
    model.set_reshard_after_forward(True)
    train(model, replica, [batch(9, 4, 7)], exact=False)
    for bad in (3, 0, -2):
        with pytest.raises(ValueError, match=f"reshard_after_forward={bad} does not divide the 4"):
            OURS.fully_shard(nn.Linear(3, 3), reshard_after_forward=bad)


@pytest.mark.thorough
def test_parameters_may_stay_whole_on_every_few_ranks(clusters: Callable) -> None:
    clusters(4).run(kept_on_two_ranks)


# Tensor parallelism.


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """Columns of `up` and rows of `down` on each rank of a mesh; norms too where asked."""
    for part in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            part.norm.register_forward_pre_hook(partial(cut_rows, mesh))
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(),
            }
        parallelize_module(part, mesh, plan)
    return model


def cut_rows(mesh: DeviceMesh, module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
    """The input as a DTensor, a part of its rows on each rank."""
    return DTensor.from_local(args[0], mesh, [Replicate()]).redistribute(mesh, [Shard(0)])


def two_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """To shard over, and to cut layers over."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh["dp"], mesh["tp"]


def data(step: int, rank: int, width: int) -> torch.Tensor:
    """Ranks that cut layers between them have one batch."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


def tensor_parallel_units(width: int, hidden: int, sequence: bool) -> None:
    dp, tp = two_meshes()
    model, replica = pair(partial(perceptrons, width, hidden))
    models = []
    for library in LIBRARIES:
        copied = tensor_parallel(copy.deepcopy(model), tp, sequence)
        models.append(sharded(library, copied, mesh=dp))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (*models, replica)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = []
        for each in models:
            loss = each(data(step, dp.get_local_rank(), width)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        results = [replica(data(step, rank, width)).square().mean() for rank in range(2)]
        (sum(results) / 2).backward()
        torch.testing.assert_close(losses[0], results[dp.get_local_rank()].detach())
        for each in models:
            assert_values(each, replica)
        assert_as_torchs(models[0], models[-1])
        if sequence:  # torch computes no norm of tensors on different meshes
            norms = []
            for each in (*models, replica):
                norm = nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            torch.testing.assert_close(norms[0], norms[-1])
        for optimizer in optimizers:
            optimizer.step()
    for each in models:
        assert_values(each, replica)
        state = each.state_dict()
        for name, value in zip(state, values(list(state.values())), strict=True):
            torch.testing.assert_close(value, replica.state_dict()[name])


@pytest.mark.thorough
@pytest.mark.parametrize("sequence", [slow(False), True], ids=["plain", "sequence"])
def test_tensor_parallel_layers_are_sharded_further_as_torchs(
    clusters: Callable, sequence: bool
) -> None:
    clusters(4).run(tensor_parallel_units, 8, 16, sequence)


@pytest.mark.thorough
def test_tensor_parallel_layers_of_odd_sizes_are_sharded_further_as_torchs(
    clusters: Callable,
) -> None:
    clusters(4).run(tensor_parallel_units, 7, 10, False)


def tensor_parallel_precision() -> None:
    """Gathered and reduced in other dtypes, accumulated, frozen, and kept whole on few ranks."""
    dp, tp = two_meshes()
    trained = []
    for library in LIBRARIES:
        torch.manual_seed(0)
        model = tensor_parallel(perceptrons(), tp, sequence=False)
        policy = library.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        model[0].requires_grad_(False)
        sharded(library, model, mesh=dp, mp_policy=policy)
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model(data(micro, dp.get_local_rank(), 8)).float().square().mean().backward()
        assert all(p.grad is None for p in model[0].parameters())
        trained.append([p.grad.to_local() for p in model[1].parameters()])
        assert all(grad.dtype == torch.float32 for grad in trained[-1])
    torch.testing.assert_close(trained[0], trained[-1])


@pytest.mark.thorough
def test_tensor_parallel_layers_in_mixed_precision_as_torchs(clusters: Callable) -> None:
    clusters(4).run(tensor_parallel_precision)


def tensor_parallel_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model, replica = pair(perceptrons)
    tensor_parallel(model, mesh["tp"], sequence=False)
    sharded(OURS, model, mesh=mesh["replicate", "shard"])
    assert model[0].up.weight.placements[0] == Replicate()
    assert model[0].up.weight.device_mesh.shape == (2, 1, 2)
    model(data(0, mesh["replicate"].get_local_rank(), 8)).square().mean().backward()
    results = [replica(data(0, rank, 8)).square().mean() for rank in range(2)]
    (sum(results) / 2).backward()
    assert_values(model, replica)


@pytest.mark.thorough
def test_tensor_parallel_layers_have_replicas_of_shards(clusters: Callable) -> None:
    clusters(4).run(tensor_parallel_replicas)


def tensor_parallel_checkpoint() -> None:
    """What is saved of one model fills another, built and cut alike."""
    dp, tp = two_meshes()
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = tensor_parallel(perceptrons(), tp, sequence=False)
        models.append(sharded(OURS, model, mesh=dp))
    x = data(0, dp.get_local_rank(), 8)
    wanted = models[0](x).detach()
    assert not torch.equal(models[1](x), wanted)
    models[1].load_state_dict(models[0].state_dict())
    assert torch.equal(models[1](x), wanted)
    states = models[0].state_dict()
    torch.manual_seed(2)
    with torch.device("meta"):
        late = tensor_parallel(perceptrons(), tp, sequence=False)
    sharded(OURS, late, mesh=dp)
    late.load_state_dict(states, assign=True)
    assert torch.equal(late(x), wanted)
    late(x).sum().backward()


@pytest.mark.thorough
def test_the_state_of_tensor_parallel_layers_can_be_loaded(clusters: Callable) -> None:
    clusters(4).run(tensor_parallel_checkpoint)


def on_both_dimensions() -> None:
    """A parameter that tensor parallelism and sharding cut along different dimensions, or one."""
    dp, tp = two_meshes()
    torch.manual_seed(0)
    whole = torch.randn(6, 4)
    for cut in (0, 1):
        for dim in (0, 1):
            trained = []
            for library in LIBRARIES:
                model = nn.Module()
                model.weight = nn.Parameter(distribute_tensor(whole, tp, [Shard(cut)]))
                model.forward = lambda x, model=model: (
                    (x @ model.weight.redistribute(tp, [Replicate()]).to_local()).square().sum()
                )
                library.fully_shard(model, mesh=dp, shard_placement_fn=lambda p, d=dim: Shard(d))
                model(data(0, dp.get_local_rank(), 6)).backward()
                assert torch.equal(values([model.weight])[0], whole)
                trained.append(model)
            assert_as_torchs(trained[0], trained[-1])


@pytest.mark.thorough
def test_a_parameter_is_cut_twice_along_one_dimension_or_two(clusters: Callable) -> None:
    clusters(4).run(on_both_dimensions)


def refused() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"one or two dimensions.*not of 3"):
        OURS.fully_shard(nn.Linear(3, 3), mesh=mesh)


def test_a_mesh_of_three_dimensions_is_refused(clusters: Callable) -> None:
    clusters(4).run(refused)
