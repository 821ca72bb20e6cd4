"""Training of what real models have: tied weights, two dtypes, views, checkpoints, ignored parts.

The unsharded replica with averaged gradients is what each must equal, torch beside it where torch
can do the same.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

import sharding
from sharding import FullyShardedDataParallel, ShardingStrategy
from tests.sharding.wrapper_models import (
    CPU,
    STRATEGIES,
    WIDTH,
    WORDS,
    Block,
    assert_equal,
    average_gradients,
    batch,
    copies,
    full_parameters,
    layers,
    network,
    numbers,
    sgd,
    train,
    wrapped,
)

Loss = Callable[[nn.Module, int], torch.Tensor]


def squares(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a model of numbers on this rank's batch."""
    return model(numbers(step, 4, WIDTH)).square().mean()


def train_alike(
    models: list[nn.Module],
    loss_of: Loss,
    steps: int = 3,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
) -> None:
    """Train ours, the replica and perhaps torch's; all have the same losses and parameters."""
    model, replica, *theirs = models
    optimizers = [optimizer(each) for each in models]
    for step in range(steps):
        losses = []
        for each, its in zip(models, optimizers, strict=True):
            its.zero_grad()
            loss = loss_of(each, step)
            loss.backward()
            if each is replica:
                average_gradients(replica)
            its.step()
            losses.append(loss.detach())
        for other in losses[1:]:
            torch.testing.assert_close(losses[0], other)
        found = full_parameters(sharding, model)
        assert_equal(found, copies(replica))
        for other in theirs:
            assert_equal(found, full_parameters(fsdp, other))


class Head(nn.Linear):
    """A layer that is a unit of its own."""


class Tied(nn.Module):
    """An embedding and a head with one weight, each a unit of its own, a block between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.block = Block(7)
        self.head = Head(WIDTH, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


def cross_entropy(model: nn.Module, step: int) -> torch.Tensor:
    tokens, following = batch(step)
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def train_tied(strategy: str, use_orig_params: bool, classes: set[type]) -> None:
    torch.manual_seed(0)
    replica = Tied()
    model = wrapped(
        sharding,
        copy.deepcopy(replica),
        strategy,
        auto_wrap_policy=sharding.wrap.ModuleWrapPolicy(classes),
        use_orig_params=use_orig_params,
    )
    train_alike([model, replica], cross_entropy)
    with FullyShardedDataParallel.summon_full_params(model):
        assert model.head.weight is model.embedding.weight
    model.eval()
    replica.eval()
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(model, 9), cross_entropy(replica, 9))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "classes",
    [{nn.Embedding, Head}, {Head}, {nn.Embedding}, {nn.Embedding, Block, Head}],
    ids=["both units", "head and root", "embedding and root", "every part"],
)
def test_a_weight_tied_across_units_gets_the_gradient_of_all_its_uses(
    clusters: Callable[..., Any], classes: set[type], strategy: str, use_orig_params: bool
) -> None:
    names = sorted(part.__name__ for part in classes)
    clusters(2).run(train_tied_by_name, strategy, use_orig_params, names)


def train_tied_by_name(strategy: str, use_orig_params: bool, names: list[str]) -> None:
    known = {"Embedding": nn.Embedding, "Block": Block, "Head": Head}
    train_tied(strategy, use_orig_params, {known[name] for name in names})


class TwoTypes(nn.Module):
    """Layers of two dtypes in one unit, and a nested unit of both as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.second = nn.Linear(7, WIDTH).double()
        self.inner: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)).double()).float()
        return x if self.inner is None else self.inner(x)


def train_two_types(strategy: str, use_orig_params: bool) -> None:
    torch.manual_seed(0)
    replica = TwoTypes()
    replica.inner = nn.Sequential(TwoTypes())
    wrap = sharding.wrap.ModuleWrapPolicy({nn.Sequential})
    model = wrapped(
        sharding,
        copy.deepcopy(replica),
        strategy,
        auto_wrap_policy=wrap,
        use_orig_params=use_orig_params,
    )
    train_alike([model, replica], squares)
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.float64}


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_dtypes_in_one_unit_are_trained_each_in_its_own(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(train_two_types, strategy, use_orig_params)


class View(nn.Module):
    """A nested unit that returns a view of what it computed, by its name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = Block(7)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        if self.kind == "slice":
            return y[:, : WIDTH - 1]
        if self.kind == "transposed":
            return y.t()
        return y.view(-1) if self.kind == "flat" else y


class Changing(nn.Module):
    """Changes in place what its nested unit returned, and returns a view of the result."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.view = View(kind)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.view(torch.tanh(self.last(x)))
        y.mul_(2)
        y[:2].add_(1)
        return (y * y).flatten()


def change_and_square(model: nn.Module, step: int) -> torch.Tensor:
    y = model(numbers(step, 4, WIDTH))
    y.mul_(3)
    y[:5] += 1
    return y.sum()


def change_in_place(strategy: str, use_orig_params: bool, kind: str) -> None:
    torch.manual_seed(0)
    replica = Changing(kind)
    model = wrapped(
        sharding,
        copy.deepcopy(replica),
        strategy,
        auto_wrap_policy=sharding.wrap.ModuleWrapPolicy({View}),
        use_orig_params=use_orig_params,
    )
    train_alike([model, replica], change_and_square, steps=2)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["slice", "transposed", "flat", "whole"])
def test_an_output_changed_in_place_has_its_gradient_even_where_it_is_a_view(
    clusters: Callable[..., Any], kind: str, strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(change_in_place, strategy, use_orig_params, kind)


class InnerCheckpoint(Block):
    """A block that keeps none of its activations."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Chain(nn.Module):
    """Layers before and after two blocks, which may run under one checkpoint."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(block(7), block(9))
        self.last = nn.Linear(WIDTH, 3)
        self.reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.reentrant is None:
            x = self.blocks(x)
        else:
            x = checkpoint(self.blocks, x, use_reentrant=self.reentrant)
        return self.last(torch.tanh(x))


def chain(place: str, reentrant: bool, unit: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A `Chain` with its blocks made units, and checkpoints in one of the places."""
    torch.manual_seed(0)
    model = Chain(InnerCheckpoint if place == "inside the module" else Block)
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    for number, block in enumerate(model.blocks):
        if place == "inside the module":
            block.reentrant = reentrant
        if place == "inside the unit":
            block = checkpoint_wrapper(block, checkpoint_impl=kind)
        block = unit(block)
        if place == "around the unit":
            block = checkpoint_wrapper(block, checkpoint_impl=kind)
        model.blocks[number] = block
    if place == "around both units":
        model.reentrant = reentrant
    return unit(model)


def checkpointed_squares(place: str, reentrant: bool) -> Loss:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = numbers(step, 4, WIDTH).requires_grad_()
        if place == "around the root":
            return checkpoint(model, x, use_reentrant=reentrant).square().mean()
        return model(x).square().mean()

    return loss


def train_checkpointed(place: str, reentrant: bool, strategy: str, use_orig_params: bool) -> None:
    def unit(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
            device_id=CPU,
        )

    model = chain(place, reentrant, unit)
    replica = chain("nowhere", reentrant, lambda module: module)
    models = [model, replica]
    optimizers = [sgd(each) for each in models]
    for step in range(3):
        for each, its in zip(models, optimizers, strict=True):
            its.zero_grad()
            checkpointed_squares(place if each is model else "nowhere", reentrant)(
                each, step
            ).backward()
        average_gradients(replica)
        for its in optimizers:
            its.step()
        found = full_parameters(sharding, model)
        names = [name.replace("_checkpoint_wrapped_module.", "") for name in found]
        assert_equal(dict(zip(names, found.values(), strict=True)), copies(replica))


@pytest.mark.thorough
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize(
    "place",
    [
        "inside the module",
        "inside the unit",
        "around the unit",
        "around both units",
        "around the root",
    ],
)
def test_activation_checkpoints_change_no_gradient_wherever_they_are(
    clusters: Callable[..., Any],
    place: str,
    reentrant: bool,
    strategy: str,
    use_orig_params: bool,
) -> None:
    clusters(2).run(train_checkpointed, place, reentrant, strategy, use_orig_params)


def ignore(runtime: ModuleType, as_modules: bool, keyword: str, use_orig_params: bool) -> list[Any]:
    torch.manual_seed(0)
    module = Chain()
    with torch.no_grad():
        module.last.weight.add_(dist.get_rank())
    parts = [module.last, module.blocks[0].up]
    states = parts if as_modules else [p for part in parts for p in part.parameters()]
    model = wrapped(runtime, module, use_orig_params=use_orig_params, **{keyword: states})
    optimizer = sgd(model)
    found: list[Any] = []
    for step in range(2):
        optimizer.zero_grad()
        squares(model, step).backward()
        found += [p.grad.clone() for part in parts for p in part.parameters()]
        optimizer.step()
    found += [p.detach().clone() for part in parts for p in part.parameters()]
    found.append(full_parameters(runtime, model))
    return found


def ignore_alike(as_modules: bool, keyword: str, use_orig_params: bool) -> list[Any]:
    ours = ignore(sharding, as_modules, keyword, use_orig_params)
    theirs = ignore(fsdp, as_modules, keyword, use_orig_params)
    torch.testing.assert_close(ours[:-1], theirs[:-1])
    assert_equal(ours[-1], theirs[-1])
    return [ours[0].numpy(), tuple(ours[0].shape)]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    ("as_modules", "keyword"),
    [(True, "ignored_states"), (False, "ignored_states"), (True, "ignored_modules")],
    ids=["modules as states", "parameters as states", "modules"],
)
def test_ignored_states_are_neither_sharded_nor_reduced(
    clusters: Callable[..., Any], as_modules: bool, keyword: str, use_orig_params: bool
) -> None:
    first, second = clusters(2).run(ignore_alike, as_modules, keyword, use_orig_params)
    assert first[1] == (3, WIDTH)
    assert (first[0] != second[0]).any()


def ignore_both_ways() -> None:
    model = layers(5, 7, 3)
    FullyShardedDataParallel(
        model, ignored_modules=[model[0]], ignored_states=[model[2]], device_id=CPU
    )


def test_ignored_modules_and_ignored_states_exclude_each_other(
    clusters: Callable[..., Any],
) -> None:
    with pytest.raises(Exception, match="Cannot pass both ignored_modules and") as caught:
        clusters(2).run(ignore_both_ways)
    assert {name for name, _, _ in caught.value.errors.values()} == {"ArgumentError"}


def wrap_copies(strategy: str, use_orig_params: bool) -> None:
    original = network()
    before = copies(original)
    pair = [
        wrapped(sharding, copy.deepcopy(original), strategy, use_orig_params=use_orig_params)
        for _ in range(2)
    ]
    replica = copy.deepcopy(original)
    wanted = train(replica, 3, replica=True)
    torch.testing.assert_close(train(pair[0], 3), wanted)
    assert_equal(full_parameters(sharding, pair[1]), before, rtol=0, atol=0)
    torch.testing.assert_close(train(pair[1], 3), wanted)
    assert_equal(full_parameters(sharding, pair[1]), copies(replica))
    assert_equal(copies(original), before, rtol=0, atol=0)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_made_before_wrapping_are_trained_apart(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(wrap_copies, strategy, use_orig_params)


def pickle_wrapped(protocol: int) -> None:
    pickle.dumps(wrapped(sharding, network()), protocol=protocol)


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_wrapped_module_refuses_to_be_pickled_and_says_why(
    clusters: Callable[..., Any], protocol: int
) -> None:
    with pytest.raises(Exception, match="state_dict") as caught:
        clusters(2).run(pickle_wrapped, protocol)
    assert sorted(caught.value.errors) == [0, 1]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam foreach": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, eps=0.1, foreach=True),
    "adam fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, eps=0.1, fused=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=0.1, foreach=False),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, eps=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, eps=0.1, momentum=0.5),
}
"""With an epsilon that keeps rounding apart from the sign of a gradient that is nothing else."""


def optimize(kind: str, strategy: str, use_orig_params: bool) -> None:
    replica = network()
    arguments = {"use_orig_params": use_orig_params}
    model, theirs = (
        wrapped(runtime, network(), strategy, **arguments) for runtime in (sharding, fsdp)
    )
    train_alike([model, replica, theirs], cross_entropy, optimizer=OPTIMIZERS[kind])


@pytest.mark.thorough
@pytest.mark.wide
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_that_work_number_by_number_step_the_shards_as_they_would_the_whole(
    clusters: Callable[..., Any], kind: str, use_orig_params: bool
) -> None:
    for strategy in STRATEGIES:
        clusters(2).run(optimize, kind, strategy, use_orig_params)


def train_uneven(strategy: str, use_orig_params: bool) -> None:
    """Units with fewer numbers than ranks: some ranks hold nothing of them."""
    torch.manual_seed(0)
    replica = nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, 1, bias=False), nn.Linear(1, WIDTH))
    models = [
        wrapped(
            runtime,
            copy.deepcopy(replica),
            strategy,
            auto_wrap_policy=runtime.wrap.ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
        )
        for runtime in (sharding, fsdp)
    ]
    train_alike([models[0], replica, models[1]], squares)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_smaller_than_the_number_of_ranks_is_trained(
    clusters: Callable[..., Any], strategy: str, use_orig_params: bool
) -> None:
    clusters(4).run(train_uneven, strategy, use_orig_params)


def train_with_prefetch(
    strategy: str, backward: str | None, forward: bool, limit: bool, use_orig_params: bool
) -> None:
    replica = network()
    model = wrapped(
        sharding,
        network(),
        strategy,
        backward_prefetch=sharding.BackwardPrefetch[backward] if backward else None,
        forward_prefetch=forward,
        limit_all_gathers=limit,
        use_orig_params=use_orig_params,
    )
    train_alike([model, replica], cross_entropy)


@pytest.mark.thorough
@pytest.mark.parametrize("forward", [False, True], ids=["", "forward"])
@pytest.mark.parametrize("backward", [None, "BACKWARD_PRE", "BACKWARD_POST"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_prefetching_changes_no_number(
    clusters: Callable[..., Any], strategy: str, backward: str | None, forward: bool
) -> None:
    for setting in (False, True):
        clusters(2).run(train_with_prefetch, strategy, backward, forward, setting, setting)
