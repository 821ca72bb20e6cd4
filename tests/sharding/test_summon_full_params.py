"""summon_full_params, apply, and what the wrapper class passes on to the module inside it."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import sharding
from sharding import FullyShardedDataParallel, MisuseError
from tests.old_torch import needs
from tests.sharding.wrapper_models import (
    CPU,
    STRATEGIES,
    Block,
    Frozen,
    assert_equal,
    average_gradients,
    copies,
    full_gradients,
    full_parameters,
    gradients,
    layers,
    loss_of,
    network,
    numbers,
    sgd,
    train,
    wrapped,
)

summon_full_params = FullyShardedDataParallel.summon_full_params


class Summoning(nn.Module):
    """Two layers; a hook on the model runs in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(7)
        self.second = Block(9)
        self.own = nn.Parameter(torch.ones(6))
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.own
        self.between()
        return self.second(x)


def names_and_shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


def see(runtime: ModuleType, strategy: str, use_orig_params: bool) -> list[Any]:
    """Every name inside and after each way to summon, with its shape where it is whole."""
    seen: list[Any] = []
    model = wrapped(runtime, network(), strategy, use_orig_params=use_orig_params)
    container = nn.ModuleDict({"wrapped": model})
    summon = runtime.FullyShardedDataParallel.summon_full_params
    for part, recurse in itertools.product((container, model, model.blocks[1]), (True, False)):
        with summon(part, recurse=recurse):
            seen.append([name for name, _ in model.named_parameters()])
            seen.append([name for name, _ in model.named_buffers()])
            if recurse or part is not container:
                seen.append(
                    [(name, tuple(p.shape)) for name, p in part.named_parameters(recurse=recurse)]
                )
            if part is not container:
                seen.append([tuple(p.shape) for p in part.module.parameters(recurse=False)])
        seen.append([name for name, _ in container.named_parameters()])
    return seen


def see_alike(strategy: str, use_orig_params: bool) -> None:
    ours = see(sharding, strategy, use_orig_params)
    theirs = see(fsdp, strategy, use_orig_params)
    for one, other in zip(ours, theirs, strict=True):
        assert one == other


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_names_and_shapes_in_and_after_each_way_to_summon_are_those_of_torch(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(see_alike, strategy, use_orig_params)


def summon_values(strategy: str, use_orig_params: bool) -> None:
    original = network()
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    before = copies(model)
    with summon_full_params(model):
        assert names_and_shapes(model) == names_and_shapes(original)
        assert_equal(dict(model.named_parameters()), copies(original), rtol=0, atol=0)
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        assert [p.requires_grad for p in model.parameters()] == [
            p.requires_grad for p in original.parameters()
        ]
        assert model.head.weight is model.embedding.weight
    assert_equal(copies(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_summoned_parameters_are_the_original_ones_and_the_shards_return(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(summon_values, strategy, use_orig_params)


def write(strategy: str, use_orig_params: bool, writeback: bool) -> bool:
    original = network()
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    with summon_full_params(model, writeback=writeback), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
        model.blocks[0].up.weight.data = torch.full_like(model.blocks[0].up.weight, 3)
    found = full_parameters(sharding, model)
    kept = torch.equal(found["norm.weight"], original.norm.weight + 1)
    for name, parameter in original.named_parameters():
        if name != "blocks.0.up.weight":
            assert torch.equal(found[name], parameter + 1 if kept else parameter)
        elif strategy != "NO_SHARD" and not writeback:
            assert torch.equal(found[name], parameter)
    return kept


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_changes_are_written_back_where_asked_and_always_where_nothing_is_sharded(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    for writeback in (True, False):
        kept = writeback or strategy == "NO_SHARD"
        assert clusters(2).run(write, strategy, use_orig_params, writeback) == [kept] * 2


def write_own_numbers(use_orig_params: bool) -> None:
    world = dist.get_world_size()
    model = wrapped(
        sharding, layers(5, 7, 3), use_orig_params=use_orig_params, auto_wrap_policy=None
    )
    with summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(dist.get_rank())
    found = torch.cat([p.flatten() for p in full_parameters(sharding, model).values()])
    assert set(found.tolist()) == set(range(world))
    held = torch.cat([p.detach().flatten() for p in model.parameters()])
    if use_orig_params:
        assert torch.equal(held, torch.full_like(held, dist.get_rank()))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_of_different_changes_each_rank_keeps_those_in_its_own_shard(
    clusters: Callable[..., Any], use_orig_params: bool
) -> None:
    clusters(2).run(write_own_numbers, use_orig_params)


def summon_on_rank_0(
    use_orig_params: bool, offload: bool
) -> tuple[list[tuple[str, tuple[int, ...]]], bool]:
    model = wrapped(sharding, network(), use_orig_params=use_orig_params)
    local = copies(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=offload):
            found = names_and_shapes(model)
            inside = copies(model)
    if dist.get_rank() == 0:
        assert_equal(inside, copies(network()), rtol=0, atol=0)
    assert_equal(copies(model), local, rtol=0, atol=0)
    loss_of(model, 0).backward()
    return found, all(torch.equal(inside[name], local[name]) for name in inside if name in local)


@pytest.mark.parametrize("offload", [False, True], ids=["kept", "offloaded"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_with_rank0_only_the_others_keep_their_shards(
    clusters: Callable[..., Any], use_orig_params: bool, offload: bool
) -> None:
    first, second = clusters(2).run(summon_on_rank_0, use_orig_params, offload)
    assert first[0] == names_and_shapes(network())
    assert first[0] != second[0]
    assert second[1]


def write_from_rank_0(strategy: str, use_orig_params: bool) -> None:
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    with summon_full_params(model, rank0_only=True, writeback=True), torch.no_grad():
        if dist.get_rank() == 0:
            for parameter in model.parameters():
                parameter.fill_(5.0)
    with summon_full_params(model):
        assert all(bool((parameter == 5).all()) for parameter in model.parameters())


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_first_rank_alone_writes_back_is_on_all_ranks(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(write_from_rank_0, strategy, use_orig_params)


def offload(strategy: str, use_orig_params: bool) -> list[str]:
    original = network()
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with summon_full_params(model, offload_to_cpu=True), torch.no_grad():
            kept = dict(model.named_parameters())
            assert_equal(kept, copies(original), rtol=0, atol=0)
            assert all(p.device == CPU for p in model.parameters())
            for parameter in model.parameters():
                parameter.mul_(2)
    found = full_parameters(sharding, model)
    assert_equal(found, {n: 2 * p.detach() for n, p in original.named_parameters()})
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.mul_(2)
    replica_loss = loss_of(original, 0)
    torch.testing.assert_close(loss_of(model, 0), replica_loss)
    return [str(w.message) for w in caught if w.category is UserWarning]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_offload_to_cpu_gives_whole_parameters_writes_back_and_warns_of_copies_on_each_rank(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    for texts in clusters(2).run(offload, strategy, use_orig_params):
        assert texts
        assert {t.partition(" may result in")[0] for t in texts} == {
            "offload_to_cpu=True and rank0_only=False"
        }


def summon_gradients(strategy: str) -> None:
    replica = network()
    model = wrapped(sharding, network(), strategy, use_orig_params=True)
    with summon_full_params(model, with_grads=True):
        assert all(p.grad is None for p in model.parameters())
    loss_of(model, 0).backward()
    loss_of(replica, 0).backward()
    average_gradients(replica)
    with summon_full_params(model, with_grads=True):
        for (name, ours), theirs in zip(
            model.named_parameters(), replica.parameters(), strict=True
        ):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
                ours.grad.mul_(2)
                theirs.grad.mul_(2)
    wanted = {n: p.grad for n, p in replica.named_parameters() if p.grad is not None}
    assert_equal(full_gradients(sharding, model), wanted)
    with summon_full_params(model, with_grads=True, writeback=False):
        for parameter in model.parameters():
            if parameter.grad is not None and strategy != "NO_SHARD":
                parameter.grad.zero_()
    sgd(model).step()
    sgd(replica).step()
    assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_grads_shows_whole_gradients_and_writes_their_changes_back(
    clusters: Callable[..., Any], strategy: str
) -> None:
    clusters(2).run(summon_gradients, strategy)


def summon_between_steps(strategy: str, use_orig_params: bool) -> None:
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    replica = network()
    optimizer, plain = sgd(model), sgd(replica)
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        for each in (model, replica):
            loss = loss_of(each, step)
            if each is model:
                with summon_full_params(model, writeback=False):
                    assert_equal(copies(model), copies(replica))
            loss.backward()
            if each is model:
                with summon_full_params(model):
                    assert_equal(copies(model), copies(replica))
        average_gradients(replica)
        optimizer.step()
        plain.step()
    assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_summoning_between_forward_backward_and_step_leaves_training_as_it_is(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(summon_between_steps, strategy, use_orig_params)


def summon_a_neighbour_in_forward(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    replica = Summoning()
    torch.manual_seed(0)
    model = wrapped(sharding, Summoning(), use_orig_params=use_orig_params)
    seen = []

    def between() -> None:
        with summon_full_params(model.second, writeback=False):
            seen.append(model.second.up.weight.detach().clone())

    model.module.between = between
    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    model(x).sum().backward()
    replica(x).sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], replica.second.up.weight)
    sgd(model).step()
    sgd(replica).step()
    assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_unit_that_is_not_running_can_be_summoned_inside_forward(
    clusters: Callable[..., Any], use_orig_params: bool
) -> None:
    clusters(2).run(summon_a_neighbour_in_forward, use_orig_params)


def summon_itself_in_forward() -> None:
    model = wrapped(sharding, Summoning())

    def between() -> None:
        with summon_full_params(model):
            pass

    model.module.between = between
    model(torch.ones(2, 6))


def summon_itself_in_backward() -> None:
    model = wrapped(sharding, layers(6, 3), auto_wrap_policy=None)
    output = model(torch.ones(2, 6))

    def summon(_: torch.Tensor) -> None:
        with summon_full_params(model):
            pass

    output.register_hook(summon)
    output.sum().backward()


def summon_twice() -> None:
    model = wrapped(sharding, network())
    with summon_full_params(model), summon_full_params(model):
        pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (summon_itself_in_forward, "Cannot manually unshard parameters during forward/backward"),
        (summon_itself_in_backward, "Cannot manually unshard parameters during forward/backward"),
        (
            summon_twice,
            "Cannot manually unshard parameters when already unsharding parameters",
        ),
    ],
    ids=["forward", "backward", "twice"],
)
def test_a_unit_in_use_is_not_summoned(
    clusters: Callable[..., Any], function: Callable[[], None], message: str
) -> None:
    with pytest.raises(Exception, match=message) as caught:
        clusters(2).run(function)
    assert {name for name, _, _ in caught.value.errors.values()} == {"TorchAssertionError"}


class Recurrent(nn.Module):
    """A recurrent layer, which keeps a list of its parameters, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(6, 6)
        self.block = Block(9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.memory(x)[0])


def summoned_forward(
    strategy: str, use_orig_params: bool, way: str, recurse: bool, changed: bool
) -> None:
    torch.manual_seed(0)
    replica = Recurrent()
    torch.manual_seed(0)
    model = wrapped(sharding, Recurrent(), strategy, use_orig_params=use_orig_params)
    ours, theirs = sgd(model), sgd(replica)
    known = {id(p) for p in model.parameters()}
    x = numbers(0, 2, 3, 6)
    for _ in range(2):
        with summon_full_params(model, recurse=recurse, writeback=changed), torch.no_grad():
            whole = list(model.parameters())
            if changed:
                for each in (model.module, replica):
                    for parameter in each.memory.parameters():
                        parameter.mul_(1.5)
                    if recurse:
                        each.block.up.weight.data = torch.full_like(each.block.up.weight, 0.1)
            forward = model if way == "wrapper" else model.module
            for _ in range(2):  # the second one finds what the first one has left
                torch.testing.assert_close(forward(x), replica(x))
            assert len(whole) == len(list(model.parameters()))
            assert all(a is b for a, b in zip(whole, model.parameters(), strict=True)) or changed
        assert {id(p) for p in model.parameters()} == known
        assert_equal(full_parameters(sharding, model), copies(replica))
        for each in (model, replica):
            each(x).square().sum().backward()
        average_gradients(replica)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("changed", [False, True], ids=["as they are", "changed"])
@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("way", ["wrapper", "module"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_inside_computes_with_the_summoned_values_and_training_goes_on_after_it(
    clusters: Callable[..., Any],
    strategy: str,
    use_orig_params: bool,
    way: str,
    recurse: bool,
    changed: bool,
) -> None:
    clusters(2).run(summoned_forward, strategy, use_orig_params, way, recurse, changed)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("way", ["wrapper", "module"])
def test_on_one_rank_a_forward_inside_leaves_the_optimizer_its_parameters(
    clusters: Callable[..., Any], use_orig_params: bool, way: str
) -> None:
    clusters(1).run(summoned_forward, "NO_SHARD", use_orig_params, way, True, True)


def summoned_backward(strategy: str, use_orig_params: bool, when: str) -> None:
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    replica = network()
    ours, theirs = sgd(model), sgd(replica)
    for step in range(2):
        with summon_full_params(model, writeback=False):
            loss = loss_of(model, step)
            if when == "inside":
                loss.backward()
        if when == "after":
            loss.backward()
        loss_of(replica, step).backward()
        average_gradients(replica)
        if use_orig_params:
            assert_equal(full_gradients(sharding, model), gradients(replica))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("when", ["inside", "after"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_backward_of_a_forward_inside_reduces_its_gradients(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool, when: str
) -> None:
    clusters(2).run(summoned_backward, strategy, use_orig_params, when)


def lose_gradients(use_orig_params: bool, when: str) -> None:
    model = wrapped(
        sharding, layers(5, 7, 3), use_orig_params=use_orig_params, auto_wrap_policy=None
    )
    replica = layers(5, 7, 3)
    before = copies(model)
    x = numbers(0, 2, 5)
    if when == "inside":
        with (
            pytest.raises(MisuseError, match=r"gave gradients to 0.weight, .* no rank reduces"),
            summon_full_params(model),
        ):
            model.module(x).sum().backward()
        with (  # the shards have no gradients, in whose places these could be written
            pytest.raises(MisuseError, match=r"gave gradients to 0.weight, .* no rank reduces"),
            summon_full_params(model, with_grads=True),
        ):
            model.module(x).sum().backward()
        with summon_full_params(model):  # read inside, and dropped on purpose
            model.module(x).sum().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = None
    else:
        with summon_full_params(model):
            loss = model.module(x).sum()
        with pytest.raises(Exception, match=r"as it was inside summon_full_params|size"):
            loss.backward()
        del loss
    with (
        pytest.raises(MisuseError, match="with_grads=True"),
        summon_full_params(model, with_grads=True),
    ):
        model(x)
    assert_equal(copies(model), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    for each in (model, replica):
        each(x).sum().backward()
    average_gradients(replica)
    sgd(model).step()
    sgd(replica).step()
    assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("when", ["inside", "after"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_of_summoned_parameters_that_no_rank_reduces_are_an_error(
    clusters: Callable[..., Any], use_orig_params: bool, when: str
) -> None:
    clusters(2).run(lose_gradients, use_orig_params, when)


def forward_on_the_first_rank(use_orig_params: bool) -> None:
    model = wrapped(sharding, network(), use_orig_params=use_orig_params)
    replica = network()
    losses = train(model, 1), train(replica, 1, replica=True)
    assert losses[0] == pytest.approx(losses[1])
    with summon_full_params(model, rank0_only=True, writeback=False):
        if dist.get_rank() == 0:
            with torch.no_grad():
                for _ in range(2):
                    torch.testing.assert_close(loss_of(model, 1), loss_of(replica, 1))
            with pytest.raises(MisuseError, match="only the first rank has the parameters"):
                loss_of(model, 1)
        else:
            with torch.no_grad(), pytest.raises(MisuseError, match="only the first rank"):
                loss_of(model, 1)
    train(model, 2)
    train(replica, 2, replica=True)
    assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_with_rank0_only_the_first_rank_runs_a_forward_that_needs_no_other_rank(
    clusters: Callable[..., Any], use_orig_params: bool
) -> None:
    clusters(2).run(forward_on_the_first_rank, use_orig_params)


def load_inside(strategy: str, use_orig_params: bool) -> None:
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    optimizer = sgd(model)
    other = network(seed=1)
    with summon_full_params(model):
        assert list(model.state_dict()) == list(other.state_dict())
        model.load_state_dict(other.state_dict())
    assert [id(p) for p in model.parameters()] == [
        id(p) for group in optimizer.param_groups for p in group["params"]
    ]
    assert_equal(full_parameters(sharding, model), copies(other))
    loss_of(model, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_dict_that_is_loaded_inside_leaves_the_optimizer_its_parameters(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(load_inside, strategy, use_orig_params)


def replace_outside(runtime: ModuleType, strategy: str, how: str) -> list[Any]:
    seen: list[Any] = []
    for name in ("0", "2"):
        model = wrapped(
            runtime, layers(5, 5, 7), strategy, use_orig_params=True, auto_wrap_policy=None
        )
        layer = model.module.get_submodule(name)
        two = torch.full_like(layer.weight, 2)
        if how == "data":
            layer.weight.data = two
        elif how == "parameter":
            layer.weight = nn.Parameter(two)
        else:
            layer.weight.data.copy_(two)
        seen.append(full_parameters(runtime, model))
        with runtime.FullyShardedDataParallel.summon_full_params(model):
            layer.bias.data.zero_()
        seen.append(full_parameters(runtime, model))
    return seen


def replace_alike(strategy: str, how: str) -> None:
    ours = replace_outside(sharding, strategy, how)
    for found, wanted in zip(ours, replace_outside(fsdp, strategy, how), strict=True):
        assert_equal(found, wanted, rtol=0, atol=0)
    assert bool((ours[0]["0.weight"] == 2).all())


WRITES_BACK_UNSHARDED = needs(
    (2, 8), "torch 2.6 refuses other memory of a parameter without shards"
)


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        pytest.param(
            strategy,
            how,
            marks=[WRITES_BACK_UNSHARDED] if strategy == "NO_SHARD" and how != "in place" else [],
        )
        for strategy in STRATEGIES
        for how in ("data", "parameter", "in place")
    ],
)
def test_original_parameters_that_a_user_has_replaced_are_summoned_as_in_torch(
    clusters: Callable[..., Any], strategy: str, how: str
) -> None:
    clusters(2).run(replace_alike, strategy, how)


def replace_by_another_shape() -> None:
    model = wrapped(sharding, layers(5, 7), use_orig_params=True, auto_wrap_policy=None)
    kept = model.module[0].weight.data
    model.module[0].weight.data = torch.ones(3, 4)
    with (
        pytest.raises(MisuseError, match=r"0.weight has 12 elements, but this rank's shard"),
        summon_full_params(model),
    ):
        pass
    model.module[0].weight.data = kept
    assert_equal(full_parameters(sharding, model), copies(layers(5, 7)), rtol=0, atol=0)


def test_a_parameter_replaced_by_one_of_another_shape_is_not_summoned(
    clusters: Callable[..., Any],
) -> None:
    clusters(2).run(replace_by_another_shape)


def replace_before_backward(runtime: ModuleType, how: str) -> None:
    model = wrapped(
        runtime, layers(5, 7), "SHARD_GRAD_OP", use_orig_params=True, auto_wrap_policy=None
    )
    x = torch.ones(2, 5, requires_grad=True)
    loss = model(x).sum()
    layer = model.module[0]
    if how == "data":
        layer.weight.data = layer.weight.data.clone()
    else:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    with pytest.raises(AssertionError, match="changing the parameters between forward and back"):
        loss.backward()
    if runtime is sharding:  # the next forward forgets the failed backward
        model(x).sum().backward()


def replace_before_both_backwards(how: str) -> None:
    for runtime in (fsdp, sharding):
        replace_before_backward(runtime, how)


@pytest.mark.parametrize("how", ["data", "parameter"])
def test_parameters_replaced_between_forward_and_backward_are_an_error_where_they_stay_gathered(
    clusters: Callable[..., Any], how: str
) -> None:
    clusters(2).run(replace_before_both_backwards, how)


def freeze_inside(runtime: ModuleType) -> list[bool]:
    model = wrapped(runtime, layers(5, 7, 3), use_orig_params=True, auto_wrap_policy=None)
    with runtime.FullyShardedDataParallel.summon_full_params(model):
        model.module[0].weight.requires_grad_(False)
    model(torch.ones(2, 5)).sum().backward()
    return [p.requires_grad for p in model.parameters()] + [
        p.grad is not None and p.numel() > 0 for p in model.parameters()
    ]


def freeze_alike() -> None:
    assert freeze_inside(sharding) == freeze_inside(fsdp)


def test_an_original_parameter_that_is_frozen_inside_stays_frozen(
    clusters: Callable[..., Any],
) -> None:
    clusters(2).run(freeze_alike)


def summon_at_step(use_orig_params: bool) -> None:
    model = wrapped(sharding, network(), use_orig_params=use_orig_params)
    whole = sum(p.numel() for p in network().parameters())
    with summon_full_params(model):
        pass
    assert sum(p.numel() for p in model.parameters()) < whole
    loss_of(model, 0).backward()
    assert sum(p.numel() for p in model.parameters()) < whole


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_after_summoning_and_after_a_step_a_rank_holds_less_than_the_whole(
    clusters: Callable[..., Any], use_orig_params: bool
) -> None:
    clusters(2).run(summon_at_step, use_orig_params)


def apply_inside() -> None:
    for runtime in (fsdp, sharding):
        model = wrapped(runtime, layers(5, 7), auto_wrap_policy=None)
        with (
            runtime.FullyShardedDataParallel.summon_full_params(model),
            pytest.raises(ValueError, match="expected to be in states"),
        ):
            model.apply(fill)


def test_apply_inside_summon_full_params_is_an_error(clusters: Callable[..., Any]) -> None:
    clusters(2).run(apply_inside)


def fill(module: nn.Module) -> None:
    """Distinct numbers by the shape of the whole parameter."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            count = parameter.numel()
            parameter.copy_(torch.arange(count).reshape(parameter.shape) / math.sqrt(count))


def apply(strategy: str, use_orig_params: bool) -> None:
    order: list[tuple[str, Any]] = []

    def visit(module: nn.Module) -> None:
        shapes = sorted(tuple(p.shape) for p in module.parameters(recurse=False))
        if not isinstance(module, FullyShardedDataParallel | fsdp.FullyShardedDataParallel):
            order.append((type(module).__name__, shapes))
        fill(module)

    replica = network()
    assert replica.apply(visit) is replica
    wanted, order[:] = list(order), []
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    assert model.apply(visit) is model
    assert order == wanted
    assert_equal(full_parameters(sharding, model), copies(replica), rtol=0, atol=0)
    loss_of(model, 0).backward()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_apply_visits_the_modules_with_their_whole_parameters_and_keeps_what_it_wrote(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(apply, strategy, use_orig_params)


def named(units: Iterable[FullyShardedDataParallel]) -> list[str]:
    return [type(unit.module).__name__ for unit in units]


def look_through(runtime: ModuleType) -> list[Any]:
    module = network()
    model = wrapped(runtime, module)
    sequence = wrapped(runtime, layers(5, 7, 3), auto_wrap_policy=None)
    wrapper = runtime.FullyShardedDataParallel
    container = nn.Sequential(model, sequence)
    assert model.module is module
    assert model.blocks is module.blocks
    assert sequence[0] is sequence.module[0]
    module.later = 5
    missing = ""
    try:
        model.nothing  # noqa: B018
    except AttributeError as error:
        missing = str(error)
    return [
        model.word,
        model.later,
        hasattr(model, "nothing"),
        "'nothing'" in missing,
        type(sequence[-1]).__name__,
        [type(part).__name__ for part in sequence[:2]],
        named(wrapper.fsdp_modules(model)),
        named(wrapper.fsdp_modules(container)),
        named(wrapper.fsdp_modules(container, root_only=True)),
        [name for name, _ in model.named_modules()],
        [model.check_is_root(), model.blocks[0].check_is_root()],
        [unit.compute_device for unit in wrapper.fsdp_modules(container)],
        [unit.sharding_strategy.name for unit in wrapper.fsdp_modules(container)],
    ]


def look_alike() -> None:
    for one, other in zip(look_through(sharding), look_through(fsdp), strict=True):
        assert one == other


def test_the_wrapper_passes_attributes_and_items_on_as_that_of_torch(
    clusters: Callable[..., Any],
) -> None:
    clusters(2).run(look_alike)


def count_flat_parameters() -> list[list[int]]:
    found = []
    for use_orig_params in (False, True):
        model = wrapped(sharding, network(), use_orig_params=use_orig_params)
        units = FullyShardedDataParallel.fsdp_modules(model)
        assert {type(unit.module) for unit in units[1:]} == {Block, Frozen}
        found.append([len(unit.params) for unit in units])
        for unit in units:
            assert all(isinstance(flat, sharding.FlatParameter) for flat in unit.params)
    return found


def test_every_unit_has_one_flat_parameter(clusters: Callable[..., Any]) -> None:
    assert clusters(2).run(count_flat_parameters)[0] == [[1, 1, 1, 1]] * 2
