"""C: communication hooks of the wrapper class, and those that compress to low precision."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import sharding
from sharding import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from sharding.comm_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from tests.sharding.wrapper_models import (
    CPU,
    STRATEGIES,
    assert_equal,
    average_gradients,
    full_gradients,
    full_parameters,
    layers,
    loss_of,
    network,
    numbers,
    sgd,
    train,
    wrapped,
)

COMPRESSORS = {torch.float16: fp16_compress_hook, torch.bfloat16: bf16_compress_hook}


class Recorder:
    """A hook and its state: sums the gradients over the ranks and counts its calls."""

    def __init__(self) -> None:
        self.shapes: list[tuple[torch.Size, ...]] = []

    def __call__(
        self, state: object, grad: torch.Tensor, output: torch.Tensor | None = None
    ) -> None:
        assert state is self
        dist.all_reduce(grad)
        self.shapes.append((grad.shape,) if output is None else (grad.shape, output.shape))
        if output is not None:
            output.copy_(grad.chunk(dist.get_world_size())[dist.get_rank()])


def train_without_a_hook(strategy: str, use_orig_params: bool) -> None:
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    theirs = wrapped(fsdp, network(), strategy, use_orig_params=use_orig_params)
    replica = network()
    optimizers = [sgd(m) for m in (model, theirs, replica)]
    for step in range(4):
        for each, optimizer in zip((model, theirs, replica), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each, step).backward()
        average_gradients(replica)
        if use_orig_params:
            wanted = {n: p.grad for n, p in replica.named_parameters() if p.grad is not None}
            assert_equal(full_gradients(sharding, model), wanted)
        for optimizer in optimizers:
            optimizer.step()
        found = full_parameters(sharding, model)
        assert_equal(found, full_parameters(fsdp, theirs))
        assert_equal(found, dict(replica.named_parameters()))
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        assert unit._comm_hook is None


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c_01_without_a_hook_gradients_are_the_mean_over_the_ranks(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(train_without_a_hook, strategy, use_orig_params)


def train_with_a_hook(strategy: str, use_orig_params: bool) -> list[list[list[int]]]:
    recorder = Recorder()
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    model.register_comm_hook(recorder, recorder)
    assert all(u._comm_hook is recorder for u in FullyShardedDataParallel.fsdp_modules(model))
    replica = network()
    optimizer, plain = sgd(model), sgd(replica)
    for step in range(2):
        for each, its in ((model, optimizer), (replica, plain)):
            its.zero_grad()
            loss_of(each, step).backward()
        average_gradients(replica)
        for parameter in replica.parameters():
            if parameter.grad is not None:
                parameter.grad *= dist.get_world_size()
        optimizer.step()
        plain.step()
        assert_equal(full_parameters(sharding, model), dict(replica.named_parameters()))
    return [[list(shape) for shape in shapes] for shapes in recorder.shapes]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c_02_a_hook_of_the_root_makes_the_gradient_of_every_unit(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    for calls in clusters(2).run(train_with_a_hook, strategy, use_orig_params):
        assert len(calls) == 2 * 3  # the root and two blocks; the frozen layer has no gradient
        for shapes in calls:
            assert all(len(shape) == 1 for shape in shapes)
            if strategy == "NO_SHARD":
                assert len(shapes) == 1
            else:
                (whole,), (shard,) = shapes
                assert whole == 2 * shard


class Twice(nn.Module):
    """A layer that is used twice; the reentrant checkpoint has a backward of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, self.layer(x), use_reentrant=True)  # type: ignore[no-any-return]


def use_twice() -> int:
    recorder = Recorder()
    torch.manual_seed(0)
    layer = FullyShardedDataParallel(nn.Linear(6, 6), device_id=CPU)
    model = FullyShardedDataParallel(Twice(layer), device_id=CPU)
    model.register_comm_hook(recorder, recorder)
    model(torch.ones(3, 6, requires_grad=True)).sum().backward()
    return len(recorder.shapes)


def test_the_gradients_of_two_backwards_of_a_unit_are_reduced_once(
    clusters: Callable[..., Any],
) -> None:
    assert clusters(2).run(use_twice) == [1, 1]


def register_twice() -> None:
    model = wrapped(sharding, network())
    model.register_comm_hook(None, Recorder())
    model.register_comm_hook(None, Recorder())


def register_on_a_nested_unit() -> None:
    model = wrapped(sharding, network())
    assert model.check_is_root()
    nested = FullyShardedDataParallel.fsdp_modules(model)[1]
    assert not nested.check_is_root()
    nested.register_comm_hook(None, Recorder())


def register_over_a_hook_of_a_nested_unit() -> None:
    model = wrapped(sharding, network())
    FullyShardedDataParallel.fsdp_modules(model)[1]._comm_hook = Recorder()
    model.register_comm_hook(None, Recorder())


def register_something_else() -> None:
    wrapped(sharding, network()).register_comm_hook(None, 5)


@pytest.mark.parametrize(
    ("function", "name", "message"),
    [
        (register_twice, "TorchAssertionError", r"A communication hook is already registered$"),
        (
            register_on_a_nested_unit,
            "TorchAssertionError",
            r"register_comm_hook can only be called on a root instance\.$",
        ),
        (
            register_over_a_hook_of_a_nested_unit,
            "TorchAssertionError",
            r"A communication hook is already registered$",
        ),
        (register_something_else, "ArgumentError", r"The communication hook must be callable"),
    ],
    ids=["c_03 twice", "c_04 nested", "c_05 nested has one", "c_06 not callable"],
)
def test_c_03_to_c_06_a_hook_that_cannot_be_registered(
    clusters: Callable[..., Any], function: Callable[[], None], name: str, message: str
) -> None:
    with pytest.raises(Exception, match=message) as caught:
        clusters(2).run(function)
    assert sorted(caught.value.errors) == [0, 1]
    for found, text, _ in caught.value.errors.values():
        assert found == name
        assert re.match(message, text)


def compress(dtype: torch.dtype, strategy: str, nested: bool, use_orig_params: bool) -> None:
    policy = {} if nested else {"auto_wrap_policy": None}

    def built(runtime: Any, **arguments: Any) -> Any:
        model = network()
        model.frozen.requires_grad_(not nested and not use_orig_params)
        arguments = {**arguments, **policy, "use_orig_params": use_orig_params}
        return wrapped(runtime, model, strategy, **arguments)

    hooked = built(sharding)
    hooked.register_comm_hook(LowPrecisionState(dist.group.WORLD), COMPRESSORS[dtype])
    policied = built(sharding, mixed_precision=MixedPrecision(reduce_dtype=dtype))
    whole = built(sharding)
    theirs = built(fsdp, mixed_precision=fsdp.MixedPrecision(reduce_dtype=dtype))
    models = (hooked, policied, whole, theirs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
        rounded = differs = 0
        for one, two, full in zip(*(m.parameters() for m in models[:3]), strict=True):
            assert (one.grad is None) == (two.grad is None)
            if one.grad is not None:
                assert one.grad.dtype == torch.float32
                assert torch.equal(one.grad, two.grad)
                rounded += int((one.grad != one.grad.to(dtype).float()).sum())
                differs += 0 if step else int((one.grad != full.grad).sum())
        assert rounded == 0
        assert step or differs > 0
        for optimizer in optimizers:
            optimizer.step()
        found = full_parameters(sharding, hooked)
        for name, tensor in full_parameters(sharding, policied).items():
            assert torch.equal(found[name], tensor), name
        epsilon = torch.finfo(dtype).eps
        assert_equal(found, full_parameters(fsdp, theirs), rtol=epsilon, atol=epsilon / 10)


@pytest.mark.wide
@pytest.mark.thorough
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "one unit"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", list(COMPRESSORS))
def test_c_07_c_08_compressed_gradients_equal_those_of_reduce_dtype_and_are_low_precision(
    clusters: Callable[..., Any], dtype: torch.dtype, strategy: str, nested: bool
) -> None:
    for use_orig_params in (False, True):
        clusters(2).run(compress, dtype, strategy, nested, use_orig_params)


def hook_of(strategy: str) -> Callable[..., None]:
    return allreduce_hook if strategy == "NO_SHARD" else reduce_scatter_hook


def train_with_the_library_hook(strategy: str) -> None:
    plain, hooked = wrapped(sharding, network(), strategy), wrapped(sharding, network(), strategy)
    hooked.register_comm_hook(DefaultState(dist.group.WORLD), hook_of(strategy))
    train(hooked, 3)
    train(plain, 3)
    # Of more than two summands the order is free.
    bound = {"rtol": 0.0, "atol": 0.0} if dist.get_world_size() == 2 else {}
    found = full_parameters(sharding, hooked)
    assert_equal(found, full_parameters(sharding, plain), **bound)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [*((strategy, 2) for strategy in STRATEGIES), ("FULL_SHARD", 4), ("NO_SHARD", 4)],
)
def test_c_09_the_hooks_without_compression_equal_no_hook(
    clusters: Callable[..., Any], strategy: str, world_size: int
) -> None:
    clusters(world_size).run(train_with_the_library_hook, strategy)


def factors() -> list[tuple[float, float]]:
    found = []
    for size in range(1, dist.get_world_size() + 1):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            state = LowPrecisionState(group)
            assert state.process_group is group
            assert state.parameter_type is torch.float32
            found.append((state.gradient_predivide_factor, state.gradient_postdivide_factor))
    return found


def test_c_09_the_two_divisions_of_a_state_make_the_mean(clusters: Callable[..., Any]) -> None:
    assert clusters(4).run(factors)[0] == [(1, 1), (2, 1), (2, 1.5), (2, 2)]


def register_on_a_hybrid(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        layers(5, 3),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=CPU,
    )
    model.register_comm_hook(None, Recorder())


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_c_10_a_hybrid_strategy_takes_no_hook(clusters: Callable[..., Any], strategy: str) -> None:
    with pytest.raises(Exception, match="not supported for hybrid") as caught:
        clusters(2).run(register_on_a_hybrid, strategy)
    for name, message, _ in caught.value.errors.values():
        assert name == "TorchAssertionError"
        assert message.startswith("Communication hook is not supported for hybrid strategies")


def accumulate(strategy: str, use_orig_params: bool, synchronized: bool) -> list[int]:
    recorder = Recorder()
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    model.register_comm_hook(recorder, recorder)
    replica = network()
    optimizer, plain = sgd(model), sgd(replica)
    calls = []
    for step in range(3):
        if synchronized or step == 2:
            loss_of(model, step).backward()
        else:
            with model.no_sync():
                loss_of(model, step).backward()
        loss_of(replica, step).backward()
        calls.append(len(recorder.shapes))
    average_gradients(replica)
    for parameter in replica.parameters():
        if parameter.grad is not None:
            parameter.grad *= dist.get_world_size()
    optimizer.step()
    plain.step()
    assert_equal(full_parameters(sharding, model), dict(replica.named_parameters()))
    return calls


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c_11_accumulation_reduces_with_the_hook_and_no_sync_does_not_run_it(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    assert clusters(2).run(accumulate, strategy, use_orig_params, False) == [[0, 0, 3]] * 2
    if strategy != "NO_SHARD":  # there the hook would sum what is summed already
        assert clusters(2).run(accumulate, strategy, use_orig_params, True) == [[3, 6, 9]] * 2


def compress_double(dtype: torch.dtype, strategy: str) -> None:
    model = wrapped(sharding, layers(5, 7, 3).double(), strategy, use_orig_params=True)
    replica = layers(5, 7, 3).double()
    state = LowPrecisionState(dist.group.WORLD, parameter_type=torch.float64)
    model.register_comm_hook(state, COMPRESSORS[dtype])
    optimizer, plain = sgd(model), sgd(replica)
    for step in range(2):
        x = numbers(step, 4, 5, dtype=torch.float64)
        for each, its in ((model, optimizer), (replica, plain)):
            its.zero_grad()
            each(x).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.dtype == torch.float64
            if parameter.grad is not None:
                assert parameter.grad.dtype == torch.float64
                assert torch.equal(parameter.grad, parameter.grad.to(dtype).double())
        average_gradients(replica)
        optimizer.step()
        plain.step()
    found = full_parameters(sharding, model)
    epsilon = torch.finfo(dtype).eps
    assert_equal(found, dict(replica.named_parameters()), rtol=epsilon, atol=epsilon)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", list(COMPRESSORS))
def test_c_12_compressed_gradients_return_to_the_type_in_the_state(
    clusters: Callable[..., Any], dtype: torch.dtype, strategy: str
) -> None:
    clusters(2).run(compress_double, dtype, strategy)
