"""Gradients of the wrapper class: accumulated, clipped, computed twice, or had on one rank only."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import sharding
from sharding import FullyShardedDataParallel, ShardingStrategy
from sharding.wrap import ModuleWrapPolicy
from tests.old_torch import needs
from tests.sharding.wrapper_models import (
    CPU,
    STRATEGIES,
    Block,
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
    wrapped,
)


class Partly(nn.Module):
    """Two blocks in the root's own unit, of which `ranks` alone use the second."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.always = Block(7)
        self.sometimes = Block(9)
        self.ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if dist.get_rank() in self.ranks else x


def accumulate(strategy: str, use_orig_params: bool, pattern: tuple[bool, ...]) -> None:
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    theirs = wrapped(fsdp, network(), strategy, use_orig_params=use_orig_params)
    replica = network()
    models = (model, theirs, replica)
    optimizers = [sgd(each) for each in models]
    for round_ in range(2):
        for number, synchronized in enumerate(pattern):
            for each in models:
                silent = not synchronized and each is not replica
                with each.no_sync() if silent else nullcontext():
                    loss_of(each, 10 * round_ + number).backward()
        average_gradients(replica)
        if use_orig_params:
            assert_equal(full_gradients(sharding, model), gradients(replica))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found = full_parameters(sharding, model)
        assert_equal(found, copies(replica))
        assert_equal(found, full_parameters(fsdp, theirs))


@pytest.mark.thorough
@pytest.mark.wide
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulated_gradients_are_the_mean_of_the_sums_however_no_sync_is_mixed_in(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    patterns = [(False, False, True), (True, True), (False, True, False, True)]
    for pattern in patterns:
        clusters(2).run(accumulate, strategy, use_orig_params, pattern)


def refuse_no_sync() -> None:
    model = wrapped(sharding, network())
    assert model.check_is_root()
    with model.blocks[0].no_sync():
        pass


def refuse_clipping() -> None:
    model = wrapped(sharding, network())
    loss_of(model, 0).backward()
    model.blocks[0].clip_grad_norm_(1.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (refuse_no_sync, "`no_sync()` on inner FSDP instances is not supported"),
        (refuse_clipping, "`clip_grad_norm_()` should only be called on the root FSDP instance"),
    ],
)
def test_what_only_the_root_can_do_is_refused_on_a_nested_unit(
    clusters: Callable[..., Any], function: Callable[[], None], message: str
) -> None:
    with pytest.raises(Exception, match="FSDP instance") as caught:
        clusters(2).run(function)
    for name, text, _ in caught.value.errors.values():
        assert name == "MisuseError"
        assert message in text


def clip(strategy: str, use_orig_params: bool, norm_type: float, max_norm: float) -> None:
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    theirs = wrapped(fsdp, network(), strategy, use_orig_params=use_orig_params)
    replica = network()
    models = (model, theirs, replica)
    optimizers = [sgd(each) for each in models]
    for step in range(2):
        for each in models:
            each.zero_grad()
            loss_of(each, step).backward()
        average_gradients(replica)
        total = model.clip_grad_norm_(max_norm, norm_type)
        torch.testing.assert_close(total, theirs.clip_grad_norm_(max_norm, norm_type))
        wanted = torch.nn.utils.clip_grad_norm_(replica.parameters(), max_norm, norm_type)
        torch.testing.assert_close(total, wanted)
        if use_orig_params:
            assert_equal(full_gradients(sharding, model), gradients(replica))
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.wide
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm_type", [1, 2, 2.5, math.inf])
def test_clipping_is_that_of_the_whole_gradients(
    clusters: Callable[..., Any], norm_type: float, strategy: str, use_orig_params: bool
) -> None:
    for max_norm in (0.2, 1000):
        clusters(2).run(clip, strategy, use_orig_params, norm_type, max_norm)


def clip_a_mixture(norm_type: float) -> None:
    """One nested unit sharded, one replicated, one part ignored; the root sharded."""
    found = []
    for runtime in (sharding, fsdp):
        torch.manual_seed(0)
        model = nn.Sequential(Block(7), Block(9), nn.Linear(6, 6), nn.Linear(6, 5))
        wrapper, strategies = runtime.FullyShardedDataParallel, runtime.ShardingStrategy
        model[0] = wrapper(model[0], sharding_strategy=strategies.NO_SHARD, device_id=CPU)
        model[1] = wrapper(model[1], sharding_strategy=strategies.SHARD_GRAD_OP, device_id=CPU)
        outer = wrapper(model, ignored_modules=[model[2]], device_id=CPU)
        outer(torch.linspace(-1, 1, 18).reshape(3, 6)).square().sum().backward()
        total = outer.clip_grad_norm_(0.5, norm_type)
        ignored = model[2].weight.grad.clone()
        sgd(outer).step()
        found.append((total, ignored, full_parameters(runtime, outer)))
    ours, theirs = found
    torch.testing.assert_close(ours[:2], theirs[:2])
    assert_equal(ours[2], theirs[2])


@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_clipping_counts_sharded_replicated_and_ignored_gradients_once(
    clusters: Callable[..., Any], norm_type: float
) -> None:
    clusters(2).run(clip_a_mixture, norm_type)


class Complex(nn.Module):
    """A complex parameter that one of three ranks has no element of, beside a real layer."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(2, 1, dtype=torch.complex64))
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.layer(x).to(self.turn.dtype) @ self.turn)


def train_complex_numbers(form: str) -> None:
    torch.manual_seed(0)
    replica = Complex()
    model: Any = copy.deepcopy(replica)
    if form == "fully_shard":
        policy = sharding.MixedPrecisionPolicy(reduce_dtype=torch.float32)
        sharding.fully_shard(model, mp_policy=policy)
    else:
        precision = sharding.MixedPrecision(reduce_dtype=torch.float32)
        model = FullyShardedDataParallel(
            model, use_orig_params=form == "original", mixed_precision=precision
        )
    optimizers = [sgd(model), sgd(replica)]
    for step in range(2):
        for each in (model, replica):
            each(numbers(step, 4, 2)).square().sum().backward()
        average_gradients(replica)
        wanted = nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
        if form != "fully_shard":
            torch.testing.assert_close(model.clip_grad_norm_(0.5), wanted)
        else:
            found = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            torch.testing.assert_close(found.full_tensor(), wanted)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        value = value.full_tensor() if form == "fully_shard" else value
        torch.testing.assert_close(value, replica.state_dict()[name])


GATHERS_COMPLEX = needs((2, 8), "full_tensor() of torch 2.6 takes no complex numbers")


@pytest.mark.parametrize(
    "kind", [pytest.param("fully_shard", marks=GATHERS_COMPLEX), "flat", "original"]
)
def test_complex_parameters_are_trained_and_clipped(
    clusters: Callable[..., Any], kind: str
) -> None:
    clusters(3).run(train_complex_numbers, kind)


def refuse_norms() -> None:
    model = wrapped(sharding, network())
    for norm_type in (0, -1, -math.inf, math.nan):
        with pytest.raises(ValueError, match=f"norm_type is {float(norm_type)}; give a number"):
            model.clip_grad_norm_(1.0, norm_type)


def test_norms_that_do_not_add_up_over_ranks_are_refused(clusters: Callable[..., Any]) -> None:
    clusters(2).run(refuse_norms)


def clip_nothing() -> list[tuple[float, int]]:
    found = []
    for runtime in (sharding, fsdp):
        model = wrapped(runtime, network())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            total = model.clip_grad_norm_(1.0)
        texts = [str(w.message) for w in caught if "clip_grad_norm_" in str(w.message)]
        found.append((total.item(), len(texts)))
    return found


def test_clipping_without_gradients_warns_and_finds_no_norm(clusters: Callable[..., Any]) -> None:
    assert clusters(2).run(clip_nothing) == [[(0.0, 1), (0.0, 1)]] * 2


def use_on_one_rank(
    strategy: str, use_orig_params: bool, ranks: tuple[int, ...], against_torch: bool
) -> None:
    torch.manual_seed(0)
    replica = Partly(ranks)
    arguments = {"use_orig_params": use_orig_params, "auto_wrap_policy": None}
    models = [replica, wrapped(sharding, copy.deepcopy(replica), strategy, **arguments)]
    if against_torch:
        models.append(wrapped(fsdp, copy.deepcopy(replica), strategy, **arguments))
    optimizers = [sgd(each) for each in models]
    for step in range(3):
        for each in models:
            each.zero_grad()
            each(numbers(step, 4, 6)).square().mean().backward()
        average_gradients(replica)
        for optimizer in optimizers:
            optimizer.step()
        found = full_parameters(sharding, models[1])
        assert_equal(found, copies(replica))
        if against_torch:
            assert_equal(found, full_parameters(fsdp, models[2]))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_unused_on_one_rank_counts_as_zero_there(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    for ranks in ((0,), (1,)):
        clusters(2).run(use_on_one_rank, strategy, use_orig_params, ranks, True)


class Outside(nn.Module):
    """Four layers; one rank has the last one in its forward, but not in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x).tanh()
        last = self.layers[3](x)
        return x if dist.get_rank() == 1 else last


def leave_out_of_one_loss(backward_prefetch: str) -> None:
    torch.manual_seed(0)
    replica = Outside()
    model = wrapped(
        sharding,
        copy.deepcopy(replica),
        "FULL_SHARD",
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        backward_prefetch=sharding.BackwardPrefetch[backward_prefetch],
    )
    for each in (model, replica):
        each(numbers(0, 4, 6)).square().mean().backward()
    average_gradients(replica)
    assert_equal(full_gradients(sharding, model), gradients(replica))


@pytest.mark.parametrize("backward_prefetch", ["BACKWARD_PRE", "BACKWARD_POST"])
def test_ranks_prefetch_alike_in_backward_if_a_unit_is_outside_the_loss_of_one(
    clusters: Callable[..., Any], backward_prefetch: str
) -> None:
    clusters(2).run(leave_out_of_one_loss, backward_prefetch)


def go_back_twice(strategy: str, use_orig_params: bool) -> None:
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    replica = network()
    models = (model, replica)
    optimizers = [sgd(each) for each in models]
    for step in range(2):
        for each, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(each, step)
            loss.backward(retain_graph=True)
            (2 * loss).backward()
        average_gradients(replica)
        if use_orig_params:
            assert_equal(full_gradients(sharding, model), gradients(replica))
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_backwards_of_one_graph_add_their_gradients(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(go_back_twice, strategy, use_orig_params)


def look_between(strategy: str, use_orig_params: bool, between: str) -> None:
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    replica = network()
    models = (model, replica)
    optimizers = [sgd(each) for each in models]
    for step in range(4):
        losses = []
        for each, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(each, step)
            loss.backward()
            if each is replica:
                average_gradients(replica)
            each.train(between != "evaluation")
            with torch.no_grad() if between != "forward with grad" else nullcontext():
                looked = loss_of(each, 100 + step)
            each.train()
            optimizer.step()
            losses.append((loss, looked))
        torch.testing.assert_close(*losses)
        assert_equal(full_parameters(sharding, model), copies(replica))
    for each in models:
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, 50), loss_of(replica, 50))


@pytest.mark.thorough
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("between", ["no_grad", "evaluation", "forward with grad"])
def test_a_forward_between_backward_and_step_leaves_no_stale_parameters(
    clusters: Callable[..., Any], between: str, strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(look_between, strategy, use_orig_params, between)


def forward_twice(strategy: str, use_orig_params: bool) -> None:
    model = wrapped(sharding, network(), strategy, use_orig_params=use_orig_params)
    replica = network()
    models = (model, replica)
    optimizers = [sgd(each) for each in models]
    for step in range(3):
        for each, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            first, second = loss_of(each, step), loss_of(each, 100 + step)
            (first + 2 * second).backward()
        average_gradients(replica)
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_forwards_before_one_backward_give_the_gradient_of_both(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(forward_twice, strategy, use_orig_params)


class Repeated(nn.Module):
    """A block that is called three times, a nested unit."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(7)
        self.last = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.block(x)
        return self.last(x)


def repeat(strategy: str, use_orig_params: bool) -> None:
    torch.manual_seed(0)
    replica = Repeated()
    model = wrapped(sharding, copy.deepcopy(replica), strategy, use_orig_params=use_orig_params)
    optimizers = [sgd(each) for each in (model, replica)]
    for step in range(3):
        for each, optimizer in zip((model, replica), optimizers, strict=True):
            optimizer.zero_grad()
            each(numbers(step, 4, 6)).square().mean().backward()
        average_gradients(replica)
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_called_three_times_gets_the_gradient_of_all_calls(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(repeat, strategy, use_orig_params)


def reuse_gradients(use_orig_params: bool, set_to_none: bool) -> None:
    model = wrapped(
        sharding, layers(5, 7, 3), use_orig_params=use_orig_params, auto_wrap_policy=None
    )
    replica = layers(5, 7, 3)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, replica)]
    for step in range(4):
        for each, optimizer in zip((model, replica), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            each(numbers(step, 4, 5)).square().mean().backward()
        average_gradients(replica)
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_can_be_zeroed_in_place(
    clusters: Callable[..., Any], use_orig_params: bool, set_to_none: bool
) -> None:
    clusters(2).run(reuse_gradients, use_orig_params, set_to_none)


def train_half_of_a_unit(strategy: str) -> None:
    """Frozen and trained parameters in one unit, which needs the original parameters."""
    replica = layers(5, 7, 3)
    replica[0].weight.requires_grad_(False)
    replica[2].bias.requires_grad_(False)
    model = FullyShardedDataParallel(
        copy.deepcopy(replica),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
        device_id=CPU,
    )
    optimizers = [sgd(each) for each in (model, replica)]
    for step in range(3):
        for each, optimizer in zip((model, replica), optimizers, strict=True):
            optimizer.zero_grad()
            each(numbers(step, 4, 5)).square().mean().backward()
        average_gradients(replica)
        found = full_gradients(sharding, model)
        trained = gradients(replica)
        assert_equal({name: found[name] for name in trained}, trained)
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(full_parameters(sharding, model), copies(replica))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parameters_in_a_trained_unit_stay_as_they_are(
    clusters: Callable[..., Any], strategy: str
) -> None:
    clusters(2).run(train_half_of_a_unit, strategy)
