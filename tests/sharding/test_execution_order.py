"""O: under the DETAIL debug level a wrapped model watches the order of its forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sharding
from sharding import FullyShardedDataParallel, ShardingStrategy
from tests.sharding.wrapper_models import CPU, numbers

WARNING = "Forward order differs from that of the first iteration on rank {}. "
SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP")


class Fork(nn.Module):
    """Layers of equal sizes that run in the order of `path`, and only those named there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5)
        self.path = ["first", "left", "right"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.path:
            x = torch.tanh(getattr(self, name)(x))
        return x


@contextmanager
def debug_level(level: dist.DebugLevel) -> Iterator[None]:
    """This debug level for a while."""
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def fork(
    strategy: str,
    use_orig_params: bool,
    level: dist.DebugLevel = dist.DebugLevel.DETAIL,
) -> FullyShardedDataParallel:
    """A `Fork` built under a debug level, every layer a unit."""
    torch.manual_seed(0)
    model = Fork()
    with debug_level(level):
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=sharding.wrap.ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
            device_id=CPU,
        )


def walk(model: FullyShardedDataParallel, *path: str) -> None:
    """The model's path becomes this one, and only the layers on it are trained."""
    model.module.path = list(path)
    for name in ("left", "right"):
        getattr(model.module, name).requires_grad_(name in path)


def step(model: nn.Module, number: int = 0) -> tuple[float, list[str]]:
    """The loss of one training step, and the warnings of the runtime about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = model(numbers(number, 4, 5)).square().sum()
        loss.backward()
    return loss.item(), order_warnings(caught)


def order_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    """Those of the warnings that are about the order, all of them of one class."""
    found = [w for w in caught if "orward order" in str(w.message)]
    assert all(w.category is UserWarning for w in found)
    return [str(w.message) for w in found]


def diverge_at_once(strategy: str, use_orig_params: bool) -> None:
    model = fork(strategy, use_orig_params)
    if dist.get_rank() == 1:
        model.module.path = ["first", "right", "left"]
    model(numbers(0, 4, 5))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", SHARDED)
def test_o_01_o_02_orders_that_differ_in_the_first_forward_are_an_error_with_both_names(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    with pytest.raises(Exception, match="Forward order differs") as caught:
        clusters(2).run(diverge_at_once, strategy, use_orig_params)
    assert sorted(caught.value.errors) == [0, 1]
    for name, message, _ in caught.value.errors.values():
        assert name == "MisuseError"
        assert message.startswith("Forward order differs across ranks")
        for part in ("rank 0", "rank 1", "left.weight", "left.bias", "right.weight", "right.bias"):
            assert part in message


def agree(strategy: str, use_orig_params: bool) -> list[list[str]]:
    model = fork(strategy, use_orig_params)
    return [step(model, number)[1] for number in range(3)]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", SHARDED)
def test_o_01_orders_that_agree_say_nothing(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    assert clusters(2).run(agree, strategy, use_orig_params) == [[[], [], []]] * 2


def diverge_later(
    strategy: str, use_orig_params: bool, iterations: int, ranks: tuple[int, ...]
) -> list[list[str]]:
    model = fork(strategy, use_orig_params)
    walk(model, "first", "left")
    found = [step(model, number)[1] for number in range(iterations)]
    if dist.get_rank() in ranks:
        walk(model, "first", "right")
    found += [step(model, number)[1] for number in range(3)]
    if dist.get_rank() in ranks:
        walk(model, "first", "left")
    return [*found, step(model)[1]]


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("strategy", SHARDED)
def test_o_03_an_order_that_changes_later_is_one_warning_on_that_rank(
    clusters: Callable[..., Any], strategy: str, iterations: int, ranks: tuple[int, ...]
) -> None:
    for use_orig_params in (False, True):
        found = clusters(2).run(diverge_later, strategy, use_orig_params, iterations, ranks)
        for rank, warned in enumerate(found):
            assert warned[:iterations] == [[]] * iterations
            assert [len(texts) for texts in warned[iterations:]] == [int(rank in ranks), 0, 0, 0]
            for text in warned[iterations]:
                assert text.startswith(WARNING.format(rank))
                assert "Collectives are unchecked and may give incorrect results or hang" in text


def compute_on_diverging_paths(strategy: str, use_orig_params: bool) -> None:
    model = fork(strategy, use_orig_params)
    torch.manual_seed(0)
    replica = Fork()
    for number, turn in enumerate(("left", "left", "right", "right")):
        turn = turn if dist.get_rank() == 1 else "left"
        walk(model, "first", turn)
        replica.path = ["first", turn]
        x = numbers(number, 4, 5)
        output = model(x)
        torch.testing.assert_close(output, replica(x))
        output.sum().backward()
    with FullyShardedDataParallel.summon_full_params(model):
        for name in ("first", "left", "right"):
            wanted = getattr(replica, name).weight
            torch.testing.assert_close(getattr(model, name).weight, wanted)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", SHARDED)
def test_o_03_ranks_that_diverge_neither_hang_nor_compute_with_parameters_of_another_layer(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(compute_on_diverging_paths, strategy, use_orig_params)


def evaluate_between(strategy: str, use_orig_params: bool) -> list[str]:
    model = fork(strategy, use_orig_params)
    found = []
    for epoch in range(3):
        model.train()
        model.module.path = ["first", "left", "right"]
        for number in range(2):
            found += step(model, number)[1]
        model.eval()
        model.module.path = ["right", "first"] if epoch else ["first", "left", "right"]
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            model(numbers(epoch, 4, 5))
        found += order_warnings(caught)
    return found


@pytest.mark.parametrize("strategy", SHARDED)
def test_o_04_epochs_of_evaluation_are_not_checked(
    clusters: Callable[..., Any], strategy: str
) -> None:
    for use_orig_params in (False, True):
        assert clusters(2).run(evaluate_between, strategy, use_orig_params) == [[], []]


def change_path_under(at_construction: str, later: str) -> int:
    model = fork("FULL_SHARD", False, getattr(dist.DebugLevel, at_construction))
    with debug_level(getattr(dist.DebugLevel, later)):
        walk(model, "first", "left")
        step(model)
        walk(model, "first", "right")
        return len(step(model)[1])


@pytest.mark.parametrize(
    ("at_construction", "later", "warned"),
    [("OFF", "OFF", 0), ("INFO", "INFO", 0), ("OFF", "DETAIL", 0), ("DETAIL", "OFF", 1)],
)
def test_o_05_the_level_at_construction_says_whether_there_is_a_check(
    clusters: Callable[..., Any], at_construction: str, later: str, warned: int
) -> None:
    assert clusters(2).run(change_path_under, at_construction, later) == [warned] * 2


def use_another_layer(path: tuple[str, ...]) -> list[list[str]]:
    model = fork("FULL_SHARD", False)
    walk(model, "first", "left")
    found = [step(model)[1]]
    walk(model, *path)
    return [*found, step(model)[1], step(model)[1]]


@pytest.mark.parametrize("path", [("first", "left", "right"), ("first", "right", "left")])
def test_o_06_a_layer_not_seen_in_the_first_iteration_is_named_in_the_warning(
    clusters: Callable[..., Any], path: tuple[str, ...]
) -> None:
    for rank, (first, second, third) in enumerate(clusters(2).run(use_another_layer, path)):
        assert first == []
        assert third == []
        assert {text.partition("Collectives")[0] for text in second} == {WARNING.format(rank)}
        assert "right.weight" in "".join(second)


def diverge_per_parameter(at_once: bool) -> list[float]:
    torch.manual_seed(0)
    model = Fork()
    with debug_level(dist.DebugLevel.DETAIL):
        for layer in (model.first, model.left, model.right):
            sharding.fully_shard(layer)
        sharding.fully_shard(model)
    model.path = ["first", "left"]
    losses = [] if at_once else [step(model)[0]]
    if dist.get_rank() == 1:
        model.path = ["first", "right"]
    loss, found = step(model, 1)
    assert len(found) == (dist.get_rank() == 1)
    torch.manual_seed(0)
    alone = Fork()
    alone.path = model.path
    torch.testing.assert_close(loss, step(alone, 1)[0])
    assert all(p.grad is not None for p in (model.left.weight, model.right.weight))
    return [*losses, loss]


def test_o_01_the_per_parameter_form_refuses_orders_that_differ_at_once(
    clusters: Callable[..., Any],
) -> None:
    with pytest.raises(Exception, match="Forward order differs across ranks") as caught:
        clusters(2).run(diverge_per_parameter, True)
    assert sorted(caught.value.errors) == [0, 1]


def test_o_03_the_per_parameter_form_is_right_on_ranks_whose_order_differs_later(
    clusters: Callable[..., Any],
) -> None:
    clusters(2).run(diverge_per_parameter, False)
