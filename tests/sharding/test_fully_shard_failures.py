"""What goes wrong ends with an error: on every rank that waits, and so that training can go on."""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parent))  # for the ranks too, which know this file alone

from replica import assert_equal, average_gradients, batch, pair, train

from sharding import fully_shard
from sharding.engine.unit import units_of
from tests.selection import thorough

WAIT_SECONDS = 4
"""How long the ranks of `one_leaves` wait for each other."""


class Block(nn.Module):
    """A residual block that fails when it is told to."""

    fails = ""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 11), nn.Linear(11, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(x)))
        if self.fails == "forward":
            raise ArithmeticError("forward failed")
        if self.fails == "backward":
            y.register_hook(failing)
        return x + y


def failing(gradient: torch.Tensor) -> None:
    raise ArithmeticError("backward failed")


def blocks() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(7, 5))


def sharded(model: nn.Sequential, **settings: object) -> Any:
    for block in model[:4]:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def steps(count: int = 2) -> list[torch.Tensor]:
    return [batch(step, 4, 7) for step in range(count)]


def live(model: nn.Module) -> int:
    """Bytes of whole parameters."""
    param_groups = [param_group for unit in units_of((model,)) for param_group in unit.param_groups]
    return sum(
        buffer.nbytes for param_group in param_groups for buffer in param_group._buffers.values()
    )


# Errors of the model's own, on all ranks alike.


def errors(where: str, reset: bool) -> None:
    for reshard in (True, False, None):
        model, replica = pair(blocks)
        sharded(model, reshard_after_forward=reshard)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, replica)]
        for turn in range(3):
            for each in (model, replica):
                each(batch(turn, 4, 7)).square().mean().backward()
            average_gradients(replica)
            assert_equal(model, replica)
            assert live(model) == 0
            for optimizer in optimizers:
                optimizer.step()
            model[turn].fails = where
            with pytest.raises(ArithmeticError, match=f"{where} failed"):
                model(batch(9, 4, 7)).square().mean().backward()
            model[turn].fails = ""
            if reset:
                model.reset_iter_state()
                assert live(model) == 0
                assert all(isinstance(p, DTensor) for p in model.parameters())
            for optimizer in optimizers:
                optimizer.zero_grad()


@pytest.mark.thorough
@pytest.mark.parametrize("reset", [False, True], ids=["by itself", "by hand"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_error(clusters: Callable, where: str, reset: bool) -> None:
    clusters(2).run(errors, where, reset)


class Two(nn.Module):
    """Two layers in one unit; backward fails between them when it is told to."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.fails:
            x.register_hook(failing)
        return self.second(x)


def gather_by_hooks(local: torch.Tensor) -> None:
    """The two hooks of an extension, which gather the tensor as it is."""

    def gathered(outputs: Any, metadata: Any, dtype: Any, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    local.fsdp_pre_all_gather = lambda mesh: ((local,), None)  # type: ignore[attr-defined]
    local.fsdp_post_all_gather = gathered  # type: ignore[attr-defined]


def drop_gradients(held_by: str) -> None:
    model, replica = pair(Two)
    size = dist.get_world_size()
    names = ("replicate", "shard")
    fully_shard(model, mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=names))
    if held_by == "extensions":
        for parameter in model.parameters():
            gather_by_hooks(parameter._local_tensor)
    else:
        model.set_requires_all_reduce(False)
        model(batch(0, 4, 7)).sum().backward()
        model.set_requires_all_reduce(True)
    model.fails = True
    with pytest.raises(ArithmeticError):
        model(batch(1, 4, 7)).square().sum().backward()
    model.fails = False
    model.reset_iter_state()
    for each in (model, replica):
        each(batch(2, 4, 7)).square().mean().backward()
    average_gradients(replica)
    assert_equal(model, replica)


@pytest.mark.thorough
@pytest.mark.parametrize("held_by", ["extensions", "replicas"])
def test_an_error_in_backward_drops_all_gradients_outside_the_shards(
    clusters: Callable, held_by: str
) -> None:
    clusters(2).run(drop_gradients, held_by)


def convert_a_part() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16())
    model[1].float()
    with pytest.raises(RuntimeError, match=r"1.weight has become torch.float32, and 0.weight of"):
        model(torch.ones(2, 4, dtype=torch.bfloat16))
    model.float()
    assert model(torch.ones(2, 4)).dtype == torch.float32


@pytest.mark.thorough
def test_a_unit_of_which_a_part_was_cast_is_an_error_and_not_cast_back(clusters: Callable) -> None:
    clusters(2).run(convert_a_part)


class Skipping(Two):
    """Does not run the second layer when it is told so; or fails before."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.fails:
            raise ArithmeticError
        return self.last(x if self.skips else self.second(x))


def run_part_of_a_list() -> None:
    model, replica = pair(Skipping)
    fully_shard([model.first, model.second])
    fully_shard(model)
    for turn in range(2):
        x = batch(turn, 4, 7)
        model.skips = replica.skips = True
        with torch.no_grad():
            assert torch.equal(model(x), replica(x))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert live(model) == 0
        model.fails = True
        with pytest.raises(ArithmeticError), torch.no_grad():
            model(x)
        model.fails = False
        assert all(isinstance(p, DTensor) for p in model.parameters())
        train(model, replica, [x])
        model.skips = replica.skips = False
        train(model, replica, [x])


def test_a_list_of_modules_of_which_not_all_run_is_resharded_when_the_root_ends(
    clusters: Callable,
) -> None:
    clusters(2).run(run_part_of_a_list)


def error_in_a_part() -> None:
    """What failed is called by itself, without gradients, and then as a part of the whole."""
    model, replica = pair(blocks)
    sharded(model)
    model[1].fails = "forward"
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            model(steps()[0])
        with pytest.raises(ArithmeticError), torch.no_grad():
            model[1](steps()[0])
    model[1].fails = ""
    assert all(isinstance(p, DTensor) for p in model[1].parameters())
    with torch.no_grad():
        assert torch.equal(model[1](steps()[0]), replica[1](steps()[0]))
    train(model, replica, steps())


def test_a_part_that_failed_can_be_called_by_itself(clusters: Callable) -> None:
    clusters(2).run(error_in_a_part)


def graph_gone() -> None:
    """A second backward through a freed graph is torch's error; then training goes on."""
    model, replica = pair(blocks)
    sharded(model)
    loss = model(steps()[0]).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    model.zero_grad()
    train(model, replica, steps())


def test_a_second_backward_through_a_freed_graph_is_torchs_error(clusters: Callable) -> None:
    clusters(2).run(graph_gone)


def forward_only() -> None:
    """Forwards whose backward never comes cost nothing later."""
    model, replica = pair(blocks)
    sharded(model)
    for x in steps():
        model(x)
    losses = [model(x).square().mean() for x in steps(3)]
    del losses[1]
    for loss in losses:
        loss.backward()
    for step in (0, 2):
        replica(steps(3)[step]).square().mean().backward()
    average_gradients(replica)
    assert_equal(model, replica, exact=False)
    assert live(model) == 0


def test_forwards_may_have_no_backward(clusters: Callable) -> None:
    clusters(2).run(forward_only)


# Ranks that do not come.


def one_leaves(where: str) -> float:
    """One rank ends, or does not take part; how long the others waited for it."""
    group = dist.new_group(timeout=timedelta(seconds=WAIT_SECONDS))
    model = sharded(blocks(), mesh=DeviceMesh.from_group(group, "cpu"))
    model(steps()[0]).square().mean().backward()
    leaves = dist.get_rank() == 1
    if leaves and where == "dies before forward":
        os._exit(1)
    if leaves and where == "skips the forward":
        return 0.0
    started = time.monotonic()
    try:
        loss = model(steps()[1]).square().mean()
        if leaves and where == "dies before backward":
            os._exit(1)
        if leaves and where == "skips the backward":
            return 0.0
        loss.backward()
    except RuntimeError:
        return time.monotonic() - started
    raise AssertionError("nobody was missed")


@pytest.mark.thorough
@pytest.mark.parametrize("where", [thorough("dies before forward"), "dies before backward"])
def test_a_rank_that_dies_ends_the_others_with_an_error(
    doomed_cluster: Callable, where: str
) -> None:
    with pytest.raises(Exception, match=r"ranks \[1\] died; \{\}"):  # the others returned
        doomed_cluster(3).run(one_leaves, where)


@pytest.mark.parametrize(
    "where",
    [
        thorough("skips the forward"),
        pytest.param("skips the backward", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_skips_a_collective_ends_the_others_within_the_time_out(
    doomed_cluster: Callable, where: str
) -> None:
    waited = doomed_cluster(2).run(one_leaves, where)
    assert waited[1] == 0
    assert 0 < waited[0] < 5 * WAIT_SECONDS


def other_model() -> str:
    """Ranks that shard different models fail; none goes on with the other's bytes."""
    group = dist.new_group(timeout=timedelta(seconds=WAIT_SECONDS))
    model = blocks()
    if dist.get_rank() == 1:
        model[1].up = nn.Linear(7, 7)
        model[1].down = nn.Linear(7, 7)
    sharded(model, mesh=DeviceMesh.from_group(group, "cpu"))
    try:
        model(steps()[0]).square().mean().backward()
    except RuntimeError as error:
        return type(error).__name__
    return "went on"


@pytest.mark.thorough
def test_ranks_with_different_models_do_not_go_on(doomed_cluster: Callable) -> None:
    try:
        ended = doomed_cluster(2).run(other_model)
    except Exception as error:  # gloo ends the process that gets more than it expects
        assert "died" in str(error)  # noqa: PT017 - either way is right
    else:
        assert "went on" not in ended


def sparse() -> None:
    model = fully_shard(nn.Embedding(9, 4, sparse=True))
    with pytest.raises(TypeError, match=r"weight has a gradient of layout torch.sparse_coo"):
        model(torch.tensor([1, 2])).sum().backward()


def test_a_sparse_gradient_is_refused_by_name(clusters: Callable) -> None:
    clusters(2).run(sparse)
