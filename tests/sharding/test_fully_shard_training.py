"""A model given to `fully_shard` trains as the whole model would, bit for bit, whatever it is."""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parent))  # for the ranks too, which know this file alone

from replica import (
    Block,
    assert_equal,
    average_gradients,
    batch,
    blocks,
    pair,
    train,
    whole,
)

from sharding.fsdp2 import fully_shard
from sharding.policies import MixedPrecisionPolicy
from tests.selection import slow, thorough


def shard_all(model: nn.Module, **settings: object) -> nn.Module:
    """A unit for every child, one for the rest."""
    for child in model.children():
        fully_shard(child, **settings)
    return fully_shard(model, **settings)


def steps(count: int = 2) -> list[torch.Tensor]:
    return [batch(step, 4, 7) for step in range(count)]


# Settings and optimizers.


def every_setting() -> None:
    for reshard in (True, False, None):
        model, replica = pair(blocks)
        train(shard_all(model, reshard_after_forward=reshard), replica, steps())
    model, replica = pair(blocks)
    train(fully_shard(model), replica, steps())
    model, replica = pair(blocks)
    for child in model[:-1]:
        fully_shard(child)  # and no root
    for parameter in model[-1].parameters():
        parameter.requires_grad_(False)
    for parameter in replica[-1].parameters():
        parameter.requires_grad_(False)
    train(model, replica, steps())


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_reshard_setting_trains_as_the_replica(clusters: Callable, world_size: int) -> None:
    clusters(world_size).run(every_setting)


def every_optimizer() -> None:
    for optimizer, settings in [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
    ]:
        model, replica = pair(blocks)
        # The vectorized loops round otherwise at the ends of a shard than inside a tensor.
        train(shard_all(model), replica, steps(), optimizer=optimizer, exact=False, **settings)


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, thorough(3)])
def test_foreach_and_fused_optimizers_step_on_shards(clusters: Callable, world_size: int) -> None:
    clusters(world_size).run(every_optimizer)


def every_norm() -> None:
    for norm_type in (1.0, 2.0, float("inf")):
        # torch has no infinity norm of an empty shard, such as Odd's are
        model, replica = pair(blocks if norm_type == float("inf") else Odd)
        shard_all(model)
        for each in (model, replica):
            each(batch(0, 4, 7)).square().sum().backward()
        average_gradients(replica)
        ours = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        theirs = torch.nn.utils.clip_grad_norm_(replica.parameters(), 0.1, norm_type)
        torch.testing.assert_close(whole(ours), theirs, rtol=1e-5, atol=0)
        assert_equal(model, replica, exact=False)


@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping_by_norm_sees_all_shards(clusters: Callable, world_size: int) -> None:
    clusters(world_size).run(every_norm)


# Sizes, shapes and dtypes.


class Odd(nn.Module):
    """Uneven, short, empty and zero-dimensional parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.inner = nn.Linear(7, 4)
        self.shift = nn.Parameter(torch.randn(2, 1, 1))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.large = nn.Linear(4, 4001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.large(self.inner(x) * self.scale + self.shift.sum() + self.empty.sum())
        return y + self.first(x)


def odd_shapes() -> list[tuple[int, ...]]:
    model, replica = pair(Odd)
    train(shard_all(model), replica, steps())
    model, replica = pair(Odd)
    train(fully_shard(model), replica, steps())
    return [tuple(p.to_local().shape) for p in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_uneven_empty_and_zero_dimensional_parameters_train(
    clusters: Callable, world_size: int
) -> None:
    shapes = clusters(world_size).run(odd_shapes)
    assert all(rank[0] == () for rank in shapes)  # whole everywhere
    assert [rank[1] for rank in shapes][2:] == [(0, 1, 1)] * (world_size - 2)


class Convolutions(nn.Module):
    """Parameters of up to four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.linear = nn.Linear(6, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).mean((2, 3)))


def last_dimension() -> None:
    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(parameter.ndim - 1) if parameter.ndim > 1 else None

    for dim in (None, 1, -1):
        model, replica = pair(Convolutions)
        chosen = place if dim is None else (lambda p, dim=dim: Shard(dim) if p.ndim > 1 else None)
        fully_shard(model, shard_placement_fn=chosen)
        wanted = 1 if dim == 1 else 3
        assert model.conv.weight.placements == (Shard(wanted),)
        train(model, replica, [batch(step, 2, 3, 5, 5) for step in range(2)])
    model, _ = pair(Convolutions)
    with pytest.raises(ValueError, match=r"conv.bias of shape \(6,\) has no dimension 1"):
        fully_shard(model, shard_placement_fn=lambda p: Shard(1))


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_are_sharded_on_the_dimension_asked_for(
    clusters: Callable, world_size: int
) -> None:
    clusters(world_size).run(last_dimension)


class WatchedConvolutions(Convolutions):
    """Notes whether forward sees contiguous parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert all(p.is_contiguous() for p in self.parameters())
        self.conv.weight.view(-1)
        return super().forward(x)


def contiguous_in_forward(reshard: bool | int) -> None:
    model, replica = pair(WatchedConvolutions)
    options = {"reshard_after_forward": reshard}
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None, **options)
    outer, twin = nn.Sequential(model), nn.Sequential(replica)
    fully_shard(outer)
    train(outer, twin, [batch(step, 2, 3, 5, 5) for step in range(3)])
    model.unshard()
    assert all(p.is_contiguous() for p in model.parameters())
    for mine, theirs in zip(model.parameters(), replica.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_parameters_divided_on_any_dimension_are_contiguous_in_forward(
    clusters: Callable, reshard: bool | int
) -> None:
    clusters(4).run(contiguous_in_forward, reshard)


class TwoDtypes(nn.Module):
    """One unit, two dtypes, and integers besides."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(7, 7)
        self.wide = nn.Linear(7, 7, dtype=torch.float64)
        self.table = nn.Parameter(torch.arange(9), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(self.single(x).to(self.wide.weight.dtype))
        assert self.table.dtype == torch.int64
        return y.float() * self.table.sum()


def two_dtypes() -> None:
    model, replica = pair(TwoDtypes)
    train(fully_shard(model), replica, steps())
    model, replica = pair(TwoDtypes)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(steps()[0]).sum().backward()
    assert model.wide.weight.grad.dtype == torch.float64


def test_two_dtypes_in_one_unit_train(clusters: Callable) -> None:
    clusters(2).run(two_dtypes)


def converted() -> None:
    model, replica = pair(blocks)
    shard_all(model)
    x = steps()[0]
    model(x)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        replica.to(dtype)
        assert model[0].up.weight.dtype == dtype
        train(model, replica, [x.to(dtype) for x in steps(2)])


def test_a_sharded_model_can_be_converted_to_another_dtype(clusters: Callable) -> None:
    clusters(2).run(converted)


# Mixed precision.


class Typed(nn.Module):
    """Records the dtypes it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, more: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        (index, extra) = more["both"]
        assert index.dtype == torch.int64
        self.seen += [x.dtype, extra.dtype, self.linear.weight.dtype]
        return self.linear(x + extra.to(x.dtype))


def mixed_precision() -> None:
    low, high = torch.bfloat16, torch.float32
    x = batch(0, 4, 7)
    more = {"both": [torch.arange(3), batch(1, 4, 7)]}
    for policy, seen, out in [
        (MixedPrecisionPolicy(low), [low] * 3, low),
        (MixedPrecisionPolicy(low, output_dtype=high), [low] * 3, high),
        (MixedPrecisionPolicy(low, reduce_dtype=high, output_dtype=high), [low] * 3, high),
        (MixedPrecisionPolicy(output_dtype=torch.float64), [high] * 3, torch.float64),
    ]:
        model, replica = pair(Typed)
        fully_shard(model, mp_policy=policy)
        output = model(x, more=more)
        assert output.dtype == out
        assert model.seen == seen
        output.sum().backward()
        replica.to(policy.param_dtype)
        replica(x.to(seen[0]), more={"both": [more["both"][0], more["both"][1].to(seen[0])]}).to(
            out
        ).sum().backward()
        for mine, theirs in zip(model.parameters(), replica.parameters(), strict=True):
            assert mine.dtype == mine.grad.dtype == high
            parts = [torch.empty_like(theirs.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, theirs.grad)
            reduce = policy.reduce_dtype or policy.param_dtype or high
            total = sum(part.to(reduce) for part in parts) / dist.get_world_size()
            assert torch.equal(whole(mine.grad), total.to(high))
    assert more["both"][1].dtype == high  # what the caller has is left alone
    model, _ = pair(Typed)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(low, cast_forward_inputs=False))
    with pytest.raises(RuntimeError, match="dtype"):
        model(x, more=more)
    assert model.seen == [high, high, low]


@pytest.mark.parametrize("world_size", [2, 3])
def test_mixed_precision_gathers_reduces_and_casts_as_asked(
    clusters: Callable, world_size: int
) -> None:
    clusters(world_size).run(mixed_precision)


# Accumulation.


def accumulate(reduce_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for syncs in [(True, True, True), (False, False, True), (False, True, True)]:
        model, replica = pair(blocks)
        shard_all(model, mp_policy=policy)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, replica)]
        exact = not all(syncs) and syncs[1] is False  # else the sum has another order
        for step in range(2):
            for micro, sync in enumerate(syncs):
                x = batch(10 * step + micro, 4, 7)
                model.set_requires_gradient_sync(sync)
                model(x).square().mean().backward()
                replica(x).square().mean().backward()
                grads = [p.grad for p in model.parameters()]
                assert all((g is not None) == any(syncs[: micro + 1]) for g in grads)
            average_gradients(replica)
            assert_equal(model, replica, exact=exact and reduce_dtype is None)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def gradient_of_another_unit() -> None:
    """What a unit owes is reduced though it does not run in the backward that reduces."""
    model, replica = pair(blocks)
    shard_all(model)
    x = steps()[0]
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    replica(x).sum().backward()
    model.set_requires_gradient_sync(True)
    for each in (model, replica):
        each[0](x).sum().backward()
    model[1](x)  # with gradients, but they do not come
    average_gradients(replica)
    first, other = dict(model[0].named_parameters()), dict(replica[0].named_parameters())
    for name, parameter in first.items():
        assert torch.equal(whole(parameter.grad), other[name].grad), name
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, thorough(3)])
def test_gradients_add_up_with_and_without_reducing(clusters: Callable, world_size: int) -> None:
    cluster = clusters(world_size)
    for reduce_dtype in (None, torch.float64):
        cluster.run(accumulate, reduce_dtype)
    cluster.run(gradient_of_another_unit)


def accumulate_low_precision() -> None:
    """Unreduced gradients add up in the reduction's dtype, not in that of the computation."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    model, replica = pair(lambda: nn.Linear(7, 3))
    fully_shard(model, mp_policy=policy)
    totals = [torch.zeros_like(p) for p in replica.parameters()]
    for micro in range(4):
        model.set_requires_gradient_sync(micro == 3)
        x = batch(micro, 4, 7)
        model(x).float().square().sum().backward()
        copied = copy.deepcopy(replica).to(torch.bfloat16)
        copied(x.bfloat16()).float().square().sum().backward()
        for total, parameter in zip(totals, copied.parameters(), strict=True):
            total += parameter.grad.float()
    for total, parameter in zip(totals, model.parameters(), strict=True):
        dist.all_reduce(total)
        assert torch.equal(whole(parameter.grad), total / 2)


def test_unreduced_gradients_add_up_in_the_dtype_of_the_reduction(clusters: Callable) -> None:
    clusters(2).run(accumulate_low_precision)


# Order and number of forwards and backwards.


def several_forwards() -> None:
    def two(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() + 3 * model(x.flip(0) * 2).mean()

    def chained(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(F.pad(model(x), (0, 2))).square().mean()

    def around(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model(x * 5)
        result = model(x).square().mean()
        with torch.no_grad():
            model(x * 7)
        return result

    for loss in (two, chained, around):
        for reshard in (True, False, None):
            model, replica = pair(blocks)
            train(shard_all(model, reshard_after_forward=reshard), replica, steps(2), loss)
    for reshard in (True, False):
        model, replica = pair(blocks)
        shard_all(model, reshard_after_forward=reshard)
        for each in (model, replica):
            results = [each(batch(step, 4, 7)).square().mean() for step in range(3)]
            for at in (1, 0, 2):
                results[at].backward()
        for parameter in replica.parameters():
            parameter.grad /= 1
        average_gradients(replica)
        assert_equal(model, replica, exact=False)


class Repeated(nn.Module):
    """One unit several times, and with other branches between."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.block, self.other, self.count = Block(), Block(), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = self.block(x) + 0.5 * self.other(self.block(x))
        return x


def repeated_unit() -> None:
    for reshard in (True, False):
        model, replica = pair(Repeated)
        train(shard_all(model, reshard_after_forward=reshard), replica, steps())


def two_backwards() -> None:
    for reshard in (True, False):
        model, replica = pair(blocks)
        shard_all(model, reshard_after_forward=reshard)
        x = batch(0, 4, 7).requires_grad_()
        y = x.detach().clone().requires_grad_()
        for each, given in ((model, x), (replica, y)):
            result = each(given)
            result.square().sum().backward(retain_graph=True)
            result.sum().backward()
            assert given.grad is not None
        assert torch.equal(x.grad, y.grad)
        average_gradients(replica)
        assert_equal(model, replica, exact=False)


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, slow(3)])
def test_forwards_and_backwards_may_come_in_any_order_and_number(
    clusters: Callable, world_size: int
) -> None:
    cluster = clusters(world_size)
    cluster.run(several_forwards)
    cluster.run(repeated_unit)
    cluster.run(two_backwards)


def stepped_between() -> None:
    model, _ = pair(blocks)
    shard_all(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = steps()[0]
    model(x).sum().backward()
    result = model(x).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed between a forward and its backward"):
        result.backward()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def test_a_step_between_a_forward_and_its_backward_is_an_error(clusters: Callable) -> None:
    clusters(2).run(stepped_between)


def evaluation() -> None:
    """A forward without gradients between backward and step, or after, has the right values."""
    for mode in (torch.no_grad, torch.inference_mode):
        model, replica = pair(blocks)
        shard_all(model)
        x = steps()[0]
        with mode():  # the very first too
            assert torch.equal(model(x), replica(x))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD(replica.parameters(), lr=0.1)
        for step in range(2):
            for each in (model, replica):
                each(batch(step, 4, 7)).square().mean().backward()
            average_gradients(replica)
            with mode():
                assert torch.equal(model(x), replica(x))
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
            with mode():
                assert torch.equal(model.eval()(x), replica.eval()(x))
            model.train()
            assert torch.equal(model(x), replica(x))  # with gradients, and no backward
            assert_equal(model, replica)


def test_a_forward_without_gradients_is_right_at_any_time(clusters: Callable) -> None:
    cluster = clusters(2)
    cluster.run(evaluation)


# Activation checkpointing.


class Checkpointed(nn.Module):
    """Checkpoints around units, or around what is in them."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.where = where
        self.run = partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.where == "outside":
                x = self.run(block, x)
            elif self.where == "inside":
                x = x + self.run(block.down, F.gelu(self.run(block.up, x)))
            elif self.where == "twice":
                x = (self.run(block, x) + self.run(block, 2 * x) + block(x)) / 4
            else:
                x = block(x)
        return self.run(self.two, x) if self.where == "several" else x

    def two(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.blocks[2](x))


def checkpointed(reentrant: bool) -> None:
    for where in ("outside", "inside", "twice", "several"):
        for reshard in (True, False):
            model, replica = pair(partial(Checkpointed, where, reentrant))
            for block in model.blocks:
                for part in (block.up, block.down) if where == "inside" else (block,):
                    fully_shard(part, reshard_after_forward=reshard)
            fully_shard(model)
            # Several runs of the engine add their gradients up in another order.
            exact = not (reentrant and where in ("twice", "several"))
            train(model, replica, steps(2), exact=exact)
    model, replica = pair(blocks)
    shard_all(model)
    x = batch(0, 4, 7).requires_grad_()
    for each in (model, replica):
        checkpoint(each, x, use_reentrant=reentrant).sum().backward()
    average_gradients(replica)
    assert_equal(model, replica)


@pytest.mark.wide
@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_activation_checkpoints_outside_and_inside_units(
    clusters: Callable, reentrant: bool, world_size: int
) -> None:
    clusters(world_size).run(checkpointed, reentrant)


class Inner(nn.Module):
    """Its forward checkpoints a part of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down, self.reentrant = nn.Linear(7, 11), nn.Linear(11, 7), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return x + self.down(hidden)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x))


def checkpoints_in_forward() -> None:
    for reentrant in (True, False):
        model, replica = pair(lambda r=reentrant: nn.Sequential(nn.Linear(7, 7), Inner(r)))
        fully_shard(model[1])
        train(fully_shard(model), replica, steps(2))


def test_a_unit_checkpoints_a_part_of_itself(clusters: Callable) -> None:
    clusters(2).run(checkpoints_in_forward)


# Shared, frozen and unused parameters.


class Tied(nn.Module):
    """Parameters shared inside a unit, between siblings, and by a unit with the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 7)
        self.left, self.right = Block(), Block()
        self.left.also = nn.Linear(7, 11, bias=False)
        self.left.also.weight = self.left.up.weight
        self.right.down.weight = self.left.down.weight
        self.head = nn.Linear(7, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed((x.abs() * 3).long().clamp(max=8).sum(-1) % 9)
        x = self.right(self.left(x)) + self.left.down(F.gelu(self.right.up(x)))
        return self.head(x)


class TiedSiblings(nn.Module):
    """Only through what is shared does the second unit have parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(F.gelu(self.second(x)))  # the first, the owner, does not run


def tied() -> None:
    model, replica = pair(Tied)
    fully_shard(model.embed)
    fully_shard(model)  # the rest in one: the blocks are called by their parts
    assert model.head.weight is model.embed.weight
    train(model, replica, steps())
    assert model.head.weight is model.embed.weight
    model, replica = pair(Tied)
    train(fully_shard(model), replica, steps())
    for reshard in (True, False):
        model, replica = pair(TiedSiblings)
        shard_all(model, reshard_after_forward=reshard)
        train(model, replica, steps())
        model, replica = pair(TiedSiblings)
        for child in model.children():
            fully_shard(child, reshard_after_forward=reshard)  # and no root
        train(model, replica, steps())


def unshard_tied() -> None:
    model, replica = pair(TiedSiblings)
    fully_shard(model.third)  # has the weight of all layers
    fully_shard(model)
    model.unshard()
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    for name, value in replica.state_dict().items():
        assert torch.equal(whole(state[name]), value)
    model.unshard()
    model.reshard()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_a_unit_with_a_weight_of_another_unit_can_be_unsharded_and_resharded(
    clusters: Callable,
) -> None:
    clusters(2).run(unshard_tied)


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_parameters_stay_shared_and_get_one_gradient(
    clusters: Callable, world_size: int
) -> None:
    clusters(world_size).run(tied)


class Lora(nn.Module):
    """A frozen linear layer and a trained low-rank change."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7).requires_grad_(False)
        self.a, self.b = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.base(x) + self.b(self.a(x)))


class Prompt(nn.Module):
    """What is trained comes in through frozen layers, beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(4, 7))
        self.one, self.two = (nn.Linear(7, 7).requires_grad_(False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        prompted = self.two(self.prompt).tanh()
        return self.one(x).tanh() + prompted + x.detach() * self.prompt.detach()


def frozen() -> None:
    for kind in (Lora, Prompt):
        for reshard in (True, False):
            model, replica = pair(lambda k=kind: nn.Sequential(k(), k(), Block(), k()))
            for each in (model, replica):
                each[2].requires_grad_(False)
            shard_all(model, reshard_after_forward=reshard)
            train(model, replica, steps())
            leaf = batch(9, 4, 7).requires_grad_()
            other = leaf.detach().clone().requires_grad_()
            model(leaf).sum().backward()
            replica(other).sum().backward()
            assert torch.equal(leaf.grad, other.grad)


def frozen_later() -> None:
    """Parameters may be frozen, and thawed, after `fully_shard`."""
    model, replica = pair(blocks)
    shard_all(model)
    for thawed in ([0, 1], [3], [0, 1, 2, 3], [2]):
        for each in (model, replica):
            each.requires_grad_(False)
            for at in thawed:
                each[at].requires_grad_(True)
            if 3 in thawed:
                each[3].bias.requires_grad_(False)
        train(model, replica, steps(2))


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, thorough(3)])
def test_frozen_parameters_and_units_train_as_the_replica(
    clusters: Callable, world_size: int
) -> None:
    clusters(world_size).run(frozen)
    clusters(world_size).run(frozen_later)


class Unused(nn.Module):
    """Parts that forward comes by or not, and that the loss depends on or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.aside, self.last = (nn.Linear(7, 7) for _ in range(4))
        self.never = nn.Parameter(torch.randn(3))
        self.aside_counts = True
        self.first_counts = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x) if self.first_counts else F.linear(x, self.first.weight)
        return self.last(y), self.aside(y)


def unused(only_rank: int | None) -> None:
    def loss(model: Unused, x: torch.Tensor) -> torch.Tensor:
        out, aside = model(x)
        result = out.square().mean()
        counts = dist.get_rank() == only_rank
        return result + aside.square().mean() if counts else result

    for units in ("all", "root"):
        model, replica = pair(Unused)
        for each in (model, replica):
            each.first_counts = only_rank is None or dist.get_rank() != only_rank
        if units == "all":
            fully_shard([model.spare])
            fully_shard(model.aside)
            fully_shard(model.last)
        fully_shard(model)
        train(model, replica, steps(), loss)
        train(model, replica, steps(2), loss, optimizer=torch.optim.Adam, exact=False)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_parameter_that_nobody_uses_has_no_gradient(clusters: Callable, world_size: int) -> None:
    clusters(world_size).run(unused, None)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_parameter_unused_on_some_ranks_gets_the_mean(
    clusters: Callable, world_size: int
) -> None:
    for only_rank in range(world_size):
        clusters(world_size).run(unused, only_rank)


class Choosing(nn.Module):
    """Ranks use its parts in different orders, and each leaves another one out of the loss."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(7, 7) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [part(x) for part in self.parts]
        rank, size = dist.get_rank(), dist.get_world_size()
        count = len(made)
        order = [(at * (1 if rank % 2 else count - 1) + rank) % count for at in range(count)]
        kept = [at for at in order if at % (size + 1) != rank]
        total = torch.zeros_like(x)
        for at in kept:
            # The first in this order is the last in backward.
            total = (total + made[at]).tanh()
        return total


def different_orders() -> None:
    for reshard in (True, False):
        model, replica = pair(partial(Choosing, 7))
        for part in model.parts:
            fully_shard(part, reshard_after_forward=reshard)
        train(fully_shard(model), replica, steps(4))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_may_complete_gradients_in_different_orders(
    clusters: Callable, world_size: int
) -> None:
    clusters(world_size).run(different_orders)


# Outputs.


@dataclass
class Made:
    """An output of a class of its own."""

    value: torch.Tensor
    others: dict[str, list[torch.Tensor]]
    label: str = "made"


class Both(NamedTuple):
    one: torch.Tensor
    two: torch.Tensor


class Opaque:
    """An output that nobody can look into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __len__(self) -> int:
        return 1


class Giving(nn.Module):
    """A unit whose output is some nest."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(7, 7), kind

    def forward(self, x: torch.Tensor) -> object:
        y = F.gelu(self.linear(x))
        if self.kind == "dataclass":
            return Made(y[:, :1], {"rest": [y[:, 1:]]})
        if self.kind == "namedtuple":
            return Both(y, y * 2)
        if self.kind == "dict":
            return {"a": y, "b": (y + 1, [y * 3, None, "x"])}
        if self.kind == "opaque":
            return Opaque(y)
        if self.kind == "view":
            return y.view(-1).view(4, 7)
        if self.kind == "input":
            return (x, y)
        if self.kind == "parameter":
            return (y, self.linear.weight, self.linear.bias[2:])
        return y


class Taking(nn.Module):
    """What becomes of the nest."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.giving, self.kind = Giving(kind), kind
        self.last = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> object:
        x = x * 2
        out = self.giving(x)
        if self.kind == "dataclass":
            out = torch.cat([out.value, *out.others["rest"]], 1)
        elif self.kind == "namedtuple":
            assert type(out) is Both
            assert out.one.requires_grad == torch.is_grad_enabled()
            out = out.one + out.two
        elif self.kind == "dict":
            out = out["a"] + out["b"][0] * out["b"][1][0]
        elif self.kind == "opaque":
            out = out.value
        elif self.kind == "view":
            out += 1
            out[:, 0].mul_(2)
            out.relu_()
        elif self.kind == "input":
            out = out[0] * out[1]
        elif self.kind == "parameter":
            out = F.linear(out[0], out[1]) + out[2].sum()
        return self.last(out)


def outputs() -> None:
    kinds = ("dataclass", "namedtuple", "dict", "opaque", "view", "input", "parameter", "plain")
    for kind in kinds:
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(output_dtype=torch.float32)):
            model, replica = pair(partial(Taking, kind))
            for part in model.children():
                fully_shard(part, mp_policy=policy)
            train(fully_shard(model), replica, steps(2))
            with torch.no_grad():
                assert torch.equal(model(steps()[0]), replica(steps()[0]))


def in_place_on_the_output() -> None:
    """The loss changes what the root returned, a view, in place."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        y *= 2
        y[0].add_(1)
        return y.square().mean()

    model, replica = pair(lambda: nn.Sequential(nn.Linear(7, 8), nn.Unflatten(1, (2, 4))))
    train(shard_all(model), replica, steps(), loss)


@pytest.mark.thorough
def test_outputs_of_any_kind_bring_backward_to_the_unit(clusters: Callable) -> None:
    cluster = clusters(2)
    cluster.run(outputs)
    cluster.run(in_place_on_the_output)


class Recurrent(nn.Module):
    """nn.LSTM keeps a list of its parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 5, num_layers=2)
        self.attention = nn.MultiheadAttention(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(x)
        return self.attention(y, y, y)[0]


def recurrent() -> None:
    model, replica = pair(Recurrent)
    train(shard_all(model), replica, [batch(step, 3, 2, 7) for step in range(2)])


def test_modules_that_keep_lists_of_their_parameters_train(clusters: Callable) -> None:
    clusters(2).run(recurrent)


# Replicas of shards.


def hybrid() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for settings in ({}, {"reshard_after_forward": False}):
        model, replica = pair(Odd)
        shard_all(model, mesh=mesh, **settings)
        train(model, replica, steps(), exact=False)
    only = 1

    def loss(model: Unused, x: torch.Tensor) -> torch.Tensor:
        out, aside = model(x)
        return out.sum() + aside.sum() if dist.get_rank() == only else out.sum()

    model, replica = pair(Unused)
    for part in (model.first, model.aside, model.last):
        fully_shard(part, mesh=mesh)
    train(fully_shard(model, mesh=mesh), replica, steps(), loss, exact=False)


def different_orders_of_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, replica = pair(partial(Choosing, 6))
    for part in model.parts:
        fully_shard(part, mesh=mesh)
    train(fully_shard(model, mesh=mesh), replica, steps(3), exact=False)


def test_shards_with_replicas_train_as_the_replica(clusters: Callable) -> None:
    clusters(4).run(hybrid)


@pytest.mark.thorough
def test_replicas_of_shards_may_complete_gradients_in_different_orders(clusters: Callable) -> None:
    clusters(4).run(different_orders_of_replicas)
