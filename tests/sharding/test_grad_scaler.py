"""The sharded gradient scaler: one rank overflows, all skip, and all keep the same scale."""

import inspect
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler
from torch.distributed.tensor import DTensor, Shard

from sharding.sharded_grad_scaler import ShardedGradScaler


def scaler(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 2, **options})


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    return {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
        # Looks for overflow of its own, in the middle of the step.
        "sgd fused": lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
        "adam foreach": lambda p: torch.optim.Adam(p, lr=0.5, foreach=True),
    }


def train(optimizer_name: str, bad: float, unscale_first: bool) -> list[Any]:
    """Four steps, in the second of which rank 1 alone has a bad gradient, and what they did."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = optimizers()[optimizer_name]([parameter])
    scaling = scaler()
    history = []
    for step in range(4):
        optimizer.zero_grad()
        before = parameter.detach().clone()
        scaling.scale(parameter.sum()).backward()
        if step == 1 and dist.get_rank() == 1:
            parameter.grad[2] = bad
        if unscale_first:
            scaling.unscale_(optimizer)
        scaling.step(optimizer)
        scaling.update()
        history.append((not torch.equal(before, parameter), scaling.get_scale()))
    return history


def train_where_one_rank_has_no_gradient() -> list[Any]:
    """Rank 0's shard is empty and has no gradient; rank 1's overflows in the first step."""
    parameter = nn.Parameter(torch.ones(3 * dist.get_rank()))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaling = scaler()
    seen = []
    for step in range(2):
        scaling.scale(torch.ones(()))
        if dist.get_rank() == 1:
            parameter.grad = torch.full((3,), 8.0 if step else math.inf)
        scaling.step(optimizer)
        scaling.update()
        seen.append((scaling.get_scale(), parameter.tolist()))
    return seen


def train_with_gradients_of_many_kinds() -> list[Any]:
    """Unscaled gradients: four dtypes, a sparse one whose entries overflow only in sum."""
    parameters = [
        nn.Parameter(torch.ones(2, dtype=dtype))
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 24.0)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaling = scaler()
    scaling.scale(torch.ones(()))
    scaling.unscale_(optimizer)
    unscaled = [parameter.grad.tolist() for parameter in parameters]
    scaling.step(optimizer)
    scaling.update()

    embedding = nn.Parameter(torch.ones(2, 1, dtype=torch.float16))
    places = torch.tensor([[0, 0]])
    entry = 40_000.0 if dist.get_rank() else 1.0
    embedding.grad = torch.sparse_coo_tensor(
        places, torch.full((2, 1), entry, dtype=torch.float16), (2, 1), check_invariants=True
    )
    optimizer = torch.optim.SGD([embedding], lr=1.0)
    scaling.step(optimizer)
    scaling.update()
    return [unscaled, parameters[2].tolist(), embedding.tolist(), scaling.get_scale()]


def train_on_a_mesh(group_of_user: bool) -> list[Any]:
    """DTensors sharded over a 2 x 2 mesh; rank 3 alone overflows; the user names a row's group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    local = torch.ones(1)
    whole = DTensor.from_local(local, mesh, [Shard(0), Shard(0)], run_check=False)
    parameter = nn.Parameter(whole)
    gradient = torch.full((1,), math.inf if dist.get_rank() == 3 else 8.0)
    parameter.grad = DTensor.from_local(gradient, mesh, [Shard(0), Shard(0)], run_check=False)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaling = scaler(process_group=mesh.get_group("shard") if group_of_user else None)
    scaling.scale(torch.ones(()))
    scaling.step(optimizer)
    scaling.update()
    return [scaling.get_scale(), parameter.to_local().tolist()]


def train_in_a_group_of_one() -> tuple[float, list[float]]:
    """Each rank agrees with itself only; rank 1 overflows."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), math.nan if dist.get_rank() == 1 else 8.0)
    scaling = scaler(process_group=groups[dist.get_rank()])
    scaling.scale(torch.ones(()))
    scaling.step(torch.optim.SGD([parameter], lr=0.5))
    scaling.update()
    return scaling.get_scale(), parameter.tolist()


@pytest.mark.parametrize("unscale_first", [False, True], ids=["in step", "before step"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", optimizers())
def test_all_ranks_skip_the_step_in_which_one_overflows(
    clusters: Callable[[int], Any], name: str, bad: float, unscale_first: bool
) -> None:
    # Two good steps in a row double the scale, a bad one halves it.
    expected = [(True, 8.0), (False, 4.0), (True, 4.0), (True, 8.0)]
    assert clusters(2).run(train, name, bad, unscale_first) == [expected] * 2


def test_a_rank_without_gradients_goes_along(clusters: Callable[[int], Any]) -> None:
    first, second = clusters(2).run(train_where_one_rank_has_no_gradient)
    assert first == [(4.0, []), (4.0, [])]
    assert second == [(4.0, [1.0] * 3), (4.0, [0.0] * 3)]


def test_gradients_of_every_dtype_are_unscaled_and_sparse_ones_are_summed_first(
    clusters: Callable[[int], Any],
) -> None:
    for unscaled, stepped, embedding, scale in clusters(2).run(train_with_gradients_of_many_kinds):
        assert unscaled == [[3.0, 3.0]] * 4
        assert stepped == [-2.0, -2.0]
        assert embedding == [[1.0], [1.0]]
        assert scale == 4.0


@pytest.mark.parametrize("group_of_user", [False, True])
def test_parameters_sharded_over_a_mesh_agree_over_all_of_it(
    clusters: Callable[[int], Any], group_of_user: bool
) -> None:
    assert clusters(4).run(train_on_a_mesh, group_of_user) == [[4.0, [1.0]]] * 4


def test_only_the_ranks_of_the_given_group_agree(clusters: Callable[[int], Any]) -> None:
    assert clusters(2).run(train_in_a_group_of_one) == [(8.0, [0.5]), (4.0, [1.0])]


# --- What needs no ranks -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scaled_outputs_keep_their_dtype_and_their_nesting(dtype: torch.dtype) -> None:
    scaling, one = scaler(), torch.ones((), dtype=dtype)
    assert scaling.scale(one).dtype is dtype
    assert scaling.scale(one) == 8
    pair, rest = scaling.scale([(one, one * 2), one * 3])
    assert (pair, rest) == ((8, 16), 24)
    assert isinstance(pair, tuple)
    assert rest.dtype is dtype
    assert list(scaling.scale(x for x in (one, one))) == [8, 8]


def test_what_is_no_tensor_cannot_be_scaled() -> None:
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler().scale(3.0)


def test_without_a_process_group_it_scales_as_torchs_own_scaler_does() -> None:
    history = []
    for scaling in (scaler(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.25)
        for step in range(5):
            optimizer.zero_grad()
            scaling.scale(parameter.square().sum()).backward()
            if step == 3:
                parameter.grad[0] = math.inf
            scaling.step(optimizer)
            scaling.update()
            history.append((scaling.get_scale(), parameter.tolist()))
    assert history[:5] == history[5:]


def test_when_disabled_it_does_nothing() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), math.inf)
    scaling, outputs = scaler(enabled=False), [torch.ones(1)]
    assert scaling.scale(outputs) is outputs
    scaling.step(torch.optim.SGD([parameter], lr=1.0))
    scaling.update()
    assert parameter.item() == -math.inf
    assert scaling.get_scale() == 1.0


def test_its_state_can_be_saved_loaded_and_pickled() -> None:
    scaling = scaler()
    scaling.scale(torch.ones(()))
    scaling.update(32.0)
    other = scaler()
    other.load_state_dict(scaling.state_dict())
    assert other.scale(torch.ones(())) == 32
    assert pickle.loads(pickle.dumps(scaling)).get_scale() == 32


def test_arguments_stand_in_torchs_order_with_torchs_defaults() -> None:
    ours, theirs = (inspect.signature(cls).parameters for cls in (ShardedGradScaler, TorchScaler))
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def test_without_cuda_the_default_device_disables_it_with_a_warning() -> None:
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ShardedGradScaler().is_enabled()
    else:
        with pytest.warns(UserWarning, match="CUDA is not available"):
            assert not ShardedGradScaler().is_enabled()
