"""What can be asked of a sharded module, and what is refused; torch's fully_shard is beside it."""

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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

import sharding
from tests.old_torch import TORCH_TRAINS_ON_CPU
from tests.selection import slow

Library = SimpleNamespace
OURS: Library = sharding  # type: ignore[assignment]
TORCH: Library = fsdp  # type: ignore[assignment]
LIBRARIES = (OURS, TORCH) if TORCH_TRAINS_ON_CPU else (OURS,)


class Owner(nn.Module):
    """Blocks under a root that has parameters of its own."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(model: nn.Module, library: Library = OURS, **settings: object) -> Any:
    """A unit for every block, one for the rest."""
    for part in list(model.modules()):
        if isinstance(part, Block):
            library.fully_shard(part, **settings)
    return library.fully_shard(model, **settings)


def steps(count: int = 3) -> list[torch.Tensor]:
    return [batch(step, 4, 7) for step in range(count)]


def is_sharded(module: nn.Module) -> bool:
    kinds = {isinstance(p, DTensor) for p in module.parameters(recurse=True)}
    assert len(kinds) == 1
    return kinds.pop()


# Gathering by hand.


def by_hand() -> None:
    for library in LIBRARIES:
        model, replica = pair(Owner)
        sharded(model, library)
        block, plain = model.blocks[0], replica.blocks[0]
        assert block.unshard() is None
        assert [is_sharded(part) for part in model.blocks] == [False, True, True]
        assert is_sharded(model.head)
        for mine, theirs in zip(block.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        block.reshard()
        assert is_sharded(model)
        handle = block.unshard(async_op=True)
        other = model.blocks[1].unshard(async_op=True)
        assert isinstance(handle, library.UnshardHandle)
        handle.wait()
        handle.wait()
        assert not is_sharded(block)
        other.wait()
        x = steps()[0]
        for each in (model, replica):
            each(x).square().mean().backward()  # what is whole is used
        average_gradients(replica)
        assert_equal(model, replica)
        model.zero_grad()
        replica.zero_grad()
        model.unshard(async_op=True)  # and not awaited
        with torch.no_grad():
            assert torch.equal(model(x), replica(x))
        model.reshard()  # for the optimizer to see the shards
        train(model, replica, steps(2))


def handles_out_of_order() -> None:
    model, replica = pair(Owner)
    sharded(model)
    handle = model.blocks[0].unshard(async_op=True)
    model.blocks[0].reshard()
    handle.wait()  # of nothing
    assert is_sharded(model)
    handles = [block.unshard(async_op=True) for block in model.blocks]
    for handle in reversed(handles):
        handle.wait()
    with torch.no_grad():
        assert torch.equal(model(steps()[0]), replica(steps()[0]))
    train(model, replica, steps(2))


def after_a_step() -> None:
    """What was gathered before a step is not what is gathered after it."""
    for optimizer in (
        partial(torch.optim.SGD, foreach=False),
        partial(torch.optim.SGD, foreach=True),
        partial(torch.optim.AdamW, fused=True),
    ):
        model, replica = pair(Owner)
        sharded(model)
        ours, theirs = (optimizer(m.parameters(), lr=0.1) for m in (model, replica))
        for each in (model, replica):
            each(steps()[0]).square().mean().backward()
        average_gradients(replica)
        ours.step()
        theirs.step()
        for block in model.blocks:
            block.unshard()
        for mine, other in zip(model.blocks.parameters(), replica.blocks.parameters(), strict=True):
            torch.testing.assert_close(mine, other)


def after_a_change() -> None:
    """What stays gathered is gathered again once the shards have changed."""
    model, replica = pair(Owner)
    sharded(model)
    block, plain = model.blocks[0], replica.blocks[0]
    shards = list(block.parameters())
    block.unshard()
    with torch.no_grad():
        for shard in shards:
            shard.mul_(2)
    block.unshard()
    for mine, theirs in zip(block.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, 2 * theirs)


@pytest.mark.thorough
def test_parameters_are_gathered_and_freed_by_hand(clusters: Callable) -> None:
    clusters(2).run(after_a_change)
    clusters(2).run(by_hand)
    clusters(2).run(handles_out_of_order)
    clusters(2).run(after_a_step)


def inner_by_itself() -> None:
    """A unit below the root is called by itself after its parameters were changed."""
    for reshard in (True, False):
        model, replica = pair(Owner)
        sharded(model, reshard_after_forward=reshard)
        optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.1, foreach=True) for m in (model, replica)
        ]
        x = steps()[0]
        for each in (model, replica):
            each(x).square().mean().backward()
        average_gradients(replica)
        model(x)  # no backward comes
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for each in (model, replica):
            each.blocks[1](x).square().mean().backward()
        average_gradients(replica)
        assert_equal(model, replica)


def test_a_unit_called_by_itself_has_the_parameters_of_now(clusters: Callable) -> None:
    clusters(2).run(inner_by_itself)


def kept_whole() -> None:
    for library in LIBRARIES:
        model, replica = pair(Owner)
        sharded(model, library)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        for each in (model, replica):
            each(steps()[0]).square().mean().backward()
        assert not is_sharded(model.blocks[0])
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        for each in (model, replica):
            each(steps()[1]).square().mean().backward()
        average_gradients(replica)
        assert_equal(model, replica)
        model.zero_grad()
        replica.zero_grad()
        model.set_reshard_after_forward(False)
        model(steps()[0])
        assert not is_sharded(model)
        model.set_reshard_after_forward(True)
        for part in (model, *model.blocks):
            part.reshard()
        model(steps()[0])
        assert is_sharded(model)
        train(model, replica, steps(2))


def test_what_is_freed_after_forward_and_backward_can_be_changed(clusters: Callable) -> None:
    clusters(2).run(kept_whole)


def changed_by_hand() -> None:
    model, replica = pair(Owner)
    sharded(model)
    model(steps()[0])  # the root's are whole now
    assert not is_sharded(model.head)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        replica.to(dtype)
        assert is_sharded(model)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert_equal(model, replica)
        model(steps()[0].to(dtype))
    model(steps()[0])
    assert {type(value) for value in model.state_dict().values()} == {DTensor}
    assert is_sharded(model)
    train(model, replica, steps(2))


def test_a_conversion_or_a_state_dict_after_forward_sees_the_shards(clusters: Callable) -> None:
    clusters(2).run(changed_by_hand)


# Gathering ahead.


def gathered(model: Any) -> list[bool]:
    """Which blocks' parameters are whole or on their way, by the memory that they have."""
    units = [block._sharding_unit for block in model.blocks]
    return [
        any(b.buffer is not None and b.buffer.nbytes for b in unit.param_groups) for unit in units
    ]


def prefetched() -> list[tuple[str, int, list[bool]]]:
    seen: list[tuple[str, int, list[bool]]] = []
    model, replica = pair(partial(Owner, 5))
    sharded(model)
    for index, block in enumerate(model.blocks):
        block.up.register_forward_hook(
            lambda *_, index=index: seen.append(("forward", index, gathered(model)))
        )
        block.up.register_full_backward_hook(
            lambda *_, index=index: seen.append(("backward", index, gathered(model)))
        )
        following, before = list(model.blocks[index + 1 : index + 3]), model.blocks[:index]
        block.set_modules_to_forward_prefetch(following)
        block.set_modules_to_backward_prefetch(list(before[-2:]))
    train(model, replica, steps(2))
    for part in (model, *model.blocks):
        part.set_modules_to_forward_prefetch([])
        part.set_modules_to_backward_prefetch([])
    seen.clear()
    train(model, replica, steps(1))
    alone = list(seen)
    assert all(sum(at_once) == 1 for _, _, at_once in alone), alone
    model.set_modules_to_forward_prefetch([model.blocks[4], model.blocks[1]])
    train(model, replica, steps(2))
    for block in model.blocks:
        block.set_modules_to_forward_prefetch(list(model.blocks[2:4]))
        block.set_modules_to_backward_prefetch([model.blocks[0], model.blocks[4]])
    seen.clear()
    train(model, replica, steps(1))
    forward = [(index, at_once) for way, index, at_once in seen if way == "forward"]
    assert all(at_once[2] or index > 2 for index, at_once in forward), forward
    with pytest.raises(ValueError, match="Linear was not given to fully_shard"):
        model.set_modules_to_forward_prefetch([model.head])
    return alone


def first_list() -> list[tuple[str, int, list[bool]]]:
    seen: list[tuple[str, int, list[bool]]] = []
    model, _ = pair(partial(Owner, 5))
    sharded(model)
    for index, block in enumerate(model.blocks):
        block.up.register_forward_hook(
            lambda *_, index=index: seen.append(("forward", index, gathered(model)))
        )
        block.set_modules_to_forward_prefetch(list(model.blocks[index + 1 : index + 3]))
    model(steps()[0])
    return seen


def test_what_is_gathered_ahead_is_what_was_listed(clusters: Callable) -> None:
    clusters(2).run(prefetched)
    for seen in clusters(2).run(first_list):
        for _, index, at_once in seen:
            assert at_once == [index <= at <= index + 2 for at in range(5)], seen


class Embedded(nn.Module):
    """A lookup whose backward does not need the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 7)
        self.last = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table((x.abs() * 3).long().clamp(max=8).sum(-1) % 9))


def not_gathered_in_backward() -> list[int]:
    gathers = []
    for unshard in (True, False):
        model, replica = pair(Embedded)
        for child in model.children():
            OURS.fully_shard(child)
        OURS.fully_shard(model)
        model.table.set_unshard_in_backward(unshard)
        for part in model.children():
            part.set_modules_to_backward_prefetch([])
        param_group = model.table._sharding_unit.param_groups[0]
        with patch.object(param_group, "_gather", side_effect=param_group._gather) as gather:
            train(model, replica, steps(2))
            gathers.append(gather.call_count)
    return gathers


def test_a_unit_that_backward_does_not_need_is_not_gathered(clusters: Callable) -> None:
    assert clusters(2).run(not_gathered_in_backward) == [[4, 2], [4, 2]]


# Gradients.


def divided() -> None:
    for dtype in (None, torch.float16, torch.float64):
        model, replica = pair(lambda: nn.Linear(7, 5))
        OURS.fully_shard(model, mp_policy=OURS.MixedPrecisionPolicy(reduce_dtype=dtype))
        model.set_gradient_divide_factor(5.0)
        for each in (model, replica):
            each(steps()[0]).square().sum().backward()
        average_gradients(replica, divide=5.0)
        for mine, theirs in zip(model.parameters(), replica.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-2, atol=1e-2)
    model.set_reduce_scatter_divide_factor(1.0)
    model.zero_grad()
    replica.zero_grad()
    for each in (model, replica):
        each(steps()[0]).square().sum().backward()
    average_gradients(replica, divide=1.0)
    assert_equal(model, replica, exact=False)
    model, replica = pair(Owner)
    sharded(model)
    model.set_gradient_divide_factor(1.0)  # of the root alone
    for each in (model, replica):
        each(steps()[0]).square().sum().backward()
    average_gradients(replica)
    replica.head.weight.grad *= 2
    replica.head.bias.grad *= 2
    assert_equal(model, replica)


def test_gradients_are_divided_by_the_factor_asked_for(clusters: Callable) -> None:
    clusters(2).run(divided)


def reduced_further() -> None:
    """Two groups of two ranks that shard, and a hook that averages over the groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    group = mesh.get_group("outer")
    calls: list[int] = []

    def average(reduced: torch.Tensor) -> None:
        assert reduced.ndim == 1
        calls.append(reduced.numel())
        dist.all_reduce(reduced, group=group)
        reduced /= 2

    model, replica = pair(Owner)
    model.spare = nn.Linear(3, 3)
    replica.spare = copy.deepcopy(model.spare)
    sharded(model, mesh=mesh["inner"])
    for part in (model, *model.blocks):
        part.set_all_reduce_hook(average)
    train(model, replica, steps(2), exact=False)
    assert len(calls) == 2 * 4
    assert model.spare.weight.grad is None


@pytest.mark.thorough
def test_a_hook_reduces_gradients_over_further_ranks(clusters: Callable) -> None:
    clusters(4).run(reduced_further)


def stepped_in_backward() -> None:
    """Hooks on sharded parameters run once their gradients are in place."""
    finals = []
    for library in LIBRARIES:
        model, replica = pair(Owner)
        sharded(model, library)
        for each in (model, replica):
            optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in each.parameters()}

            def step(parameter: nn.Parameter, optimizers: dict = optimizers) -> None:
                assert parameter.grad is not None
                if isinstance(parameter, DTensor):
                    optimizers[parameter].step()
                    optimizers[parameter].zero_grad()

            for parameter in each.parameters():
                parameter.register_post_accumulate_grad_hook(step)
        other = torch.optim.SGD(replica.parameters(), lr=0.1)
        for x in steps():
            for each in (model, replica):
                each(x).square().mean().backward()
            average_gradients(replica)
            other.step()
            other.zero_grad()
            assert_equal(model, replica)
        finals.append([p.to_local() for p in model.parameters()])
    torch.testing.assert_close(finals[0], finals[-1], rtol=0, atol=0)


def test_an_optimizer_may_step_in_backward(clusters: Callable) -> None:
    clusters(2).run(stepped_in_backward)


class Generator(nn.Module):
    """Two models in one loss, each with a root of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.judge(self.make(x) * 2)


def two_roots() -> None:
    for reshard in (True, False, None):
        model, replica = pair(Generator)
        for part in model.children():
            sharded(part, reshard_after_forward=reshard)
        train(model, replica, steps(2))

        def losses(model: Generator, x: torch.Tensor) -> torch.Tensor:
            made = model.make(x)
            model.judge(made.detach()).square().mean().backward()
            return model.judge(made).mean() + made.square().mean()

        train(model, replica, steps(2), losses, exact=False)


@pytest.mark.thorough
def test_two_roots_in_one_loss_train_as_the_replica(clusters: Callable) -> None:
    clusters(2).run(two_roots)


# What a unit is made of.


def several_modules() -> None:
    sent = []
    for library in LIBRARIES:
        model, replica = pair(Owner)
        library.fully_shard([model.blocks[0], model.blocks[1]])
        library.fully_shard([model.blocks[2], model.head])
        library.fully_shard(model)
        train(model, replica, steps())
        if library is OURS:
            with patch.object(dist, "isend", side_effect=dist.isend) as send:
                loss = model(steps()[0]).sum()
                forward = send.call_count
                loss.backward()
                sent = [forward, send.call_count - forward]
    assert sent[0] <= 2
    assert sent[1] <= 4  # gathered again and reduced; fewer where units travel together


def test_several_modules_are_one_unit(clusters: Callable) -> None:
    clusters(2).run(several_modules)


def ignored() -> None:
    for library in LIBRARIES:
        model, replica = pair(Owner)
        left = {model.blocks[1].up.weight, model.head.bias}
        for part in (*model.blocks, model):
            library.fully_shard(part, ignored_params=left)
        x = steps()[0]
        for each in (model, replica):
            each(x).square().sum().backward()
        plain = dict(replica.named_parameters())
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) != (parameter in left)
            if parameter in left:  # nobody reduces it
                assert torch.equal(parameter.grad, plain[name].grad)
                plain[name].grad = None
                parameter.grad = None
        average_gradients(replica)
        assert_equal(model, replica)


def test_ignored_parameters_are_left_alone(clusters: Callable) -> None:
    clusters(2).run(ignored)


def offloaded() -> None:
    for pin_memory in (True, False):
        model, replica = pair(Owner)
        sharded(model, offload_policy=OURS.CPUOffloadPolicy(pin_memory=pin_memory))
        train(model, replica, steps(2))
        assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_offloading_to_the_cpu_trains_on_the_cpu(clusters: Callable) -> None:
    clusters(2).run(offloaded)


class Methods(nn.Module):
    """Forward is not the only way in."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(7, 7), nn.Linear(7, 7)

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """What the encoder makes of it."""
        return self.encoder(x) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x) * 2.0)


class Nested(Methods):
    """Forward goes by another way in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encode(x, scale=2.0))

    def generate(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Forward, some times."""
        for _ in range(count):
            x = self(x).tanh() + self.decoder(x)
        if not count:
            raise ValueError("how often?")
        return x


def nested_ways_in() -> None:
    """Torch lets go of the decoder's parameters after the inner call."""

    def generated(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.generate(x, 3).square().mean()

    for is_root in (True, False):
        model, replica = pair(lambda: nn.Sequential(Nested(), Nested()))
        if is_root:
            model, replica = model[0], replica[0]
            OURS.fully_shard(model.encoder)
            OURS.fully_shard(model)
            OURS.register_fsdp_forward_method(model, "encode")
            OURS.register_fsdp_forward_method(model, "generate")
            train(model, replica, steps(2), generated, exact=False)
            with pytest.raises(ValueError, match="how often"):
                model.generate(steps()[0], 0)
            assert is_sharded(model)
        else:
            OURS.fully_shard(model[0])
            OURS.fully_shard(model)
            OURS.register_fsdp_forward_method(model[0], "encode")
        train(model, replica, steps(2))
        with torch.no_grad():
            assert torch.equal(model(steps()[0]), replica(steps()[0]))
        assert is_sharded(model)


def other_ways_in() -> None:
    for library in LIBRARIES:
        model, replica = pair(lambda: nn.Sequential(Methods(), Block()))
        library.fully_shard(model[0])
        sharded(model, library)
        library.register_fsdp_forward_method(model[0], "encode")
        library.register_fsdp_forward_method(nn.Linear(3, 3), "forward")  # not sharded: nothing
        with pytest.raises(ValueError, match="decode"):
            library.register_fsdp_forward_method(model[0], "decode")

        def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
            return model[0].encode(x, scale=3.0).square().mean()

        train(model, replica, steps(1))  # torch wants the root to have run
        for x in steps(2):
            for each in (model, replica):
                loss(each, x).backward()
            average_gradients(replica)
            assert_equal(model, replica)
            assert is_sharded(model)
            model.zero_grad()
            replica.zero_grad()
        assert model[0].encode.__doc__ == Methods.encode.__doc__
        train(model, replica, steps(1), exact=False)


@pytest.mark.thorough
def test_other_methods_gather_as_forward_does(clusters: Callable) -> None:
    clusters(2).run(other_ways_in)
    clusters(2).run(nested_ways_in)


# Meta devices and state dicts.


def late_values() -> None:
    _, source = pair(Owner)
    finals = []
    for library in LIBRARIES:
        with torch.device("meta"):
            model = Owner()
        sharded(model, library)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        if library is OURS:
            with pytest.raises(RuntimeError, match=r"meta device \(head\.weight.*to_empty"):
                model(steps()[0])
        mesh = model.head.weight.device_mesh
        state = {
            name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
            for name, tensor in source.state_dict().items()
        }
        model.load_state_dict(state, assign=True)
        assert_equal(model, source)
        replica = copy.deepcopy(source)
        train(model, replica, steps(2))
        with torch.device("meta"):
            model = Owner()
        sharded(model, library)
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in steps(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finals.append([p.to_local() for p in model.parameters()])
    torch.testing.assert_close(finals[0], finals[-1])


def test_a_model_built_on_the_meta_device_gets_its_values_later(clusters: Callable) -> None:
    clusters(2).run(late_values)


def replaced_by_something_else() -> None:
    model, _ = pair(Owner)
    sharded(model)
    mesh = model.head.weight.device_mesh
    good = model.head.weight
    model.head.weight = nn.Parameter(torch.ones(5, 7))
    with pytest.raises(TypeError, match=r"head\.weight.*replaced by a Parameter of shape \(5, 7\)"):
        model(steps()[0])
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(5, 8), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match=r"replaced by a DTensor of shape \(5, 8\)"):
        model(steps()[0])
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(5, 7), mesh, [Replicate()]))
    with pytest.raises(TypeError, match=r"head\.weight.*Replicate"):
        model(steps()[0])
    model.head.weight = good
    model(steps()[0]).sum().backward()


def test_what_a_parameter_may_not_be_replaced_by_is_refused(clusters: Callable) -> None:
    clusters(2).run(replaced_by_something_else)


def loaded_between_steps() -> None:
    model, replica = pair(Owner)
    sharded(model)
    train(model, replica, steps(1))
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
    for name, tensor in saved.items():
        assert tensor.placements == (Shard(0),)
        assert torch.equal(tensor.full_tensor(), plain[name])
    train(model, replica, steps(1))
    model.load_state_dict(saved)
    replica.load_state_dict(plain)
    train(model, replica, steps(2))
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*Unexpected key"):
        model.load_state_dict({"other": saved["head.bias"]})


def torchs_functions() -> None:
    """Torch's own functions for state dicts see a plain module of DTensors."""
    saved = []
    for library in LIBRARIES:
        model, _ = pair(Owner)
        sharded(model, library)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for x in steps(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(model, options=options)
        moments = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        assert {type(tensor) for tensor in state.values()} == {torch.Tensor}
        saved.append((state, {k: v["exp_avg"] for k, v in moments["state"].items()}))
        fresh, _ = pair(partial(Owner))
        sharded(fresh, library)
        other = torch.optim.AdamW(fresh.parameters(), lr=0.1)
        set_model_state_dict(fresh, state, options=options)
        set_optimizer_state_dict(fresh, other, moments, options=options)
        for each, by in ((model, optimizer), (fresh, other)):
            each(steps()[2]).square().mean().backward()
            by.step()
        for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())
    torch.testing.assert_close(saved[0], saved[-1])


@pytest.mark.thorough
def test_state_dicts_are_saved_and_loaded_at_any_time(clusters: Callable) -> None:
    clusters(2).run(loaded_between_steps)
    clusters(2).run(torchs_functions)


# Classes, containers, copies.


def classes() -> None:
    model, _ = pair(blocks)
    sharded(model)
    assert isinstance(model, OURS.FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert [type(part).__name__ for part in model] == ["FSDPBlock"] * 3 + ["Linear"]
    assert type(model[0]) is type(model[1])
    part = model[:2]
    assert type(part) is nn.Sequential
    assert [id(block) for block in part] == [id(block) for block in model[:2]]
    x = steps()[0]
    with torch.no_grad():
        assert torch.equal(part(x), model[1](model[0](x)))
    assert type(model[0].__class__(7, 3)) is Block  # as code does that makes more of its kind


def test_sharded_modules_keep_their_classes_and_can_be_sliced(clusters: Callable) -> None:
    clusters(2).run(classes)


def copied() -> None:
    model, _ = pair(Owner)
    OURS.fully_shard(model.blocks[0])
    for each in (model, model.blocks[0]):
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"FSDPBlock cannot be pickled or copied.*state_d"):
                attempt(each)
    copy.deepcopy(model.blocks[1])
    assert copy.deepcopy(model.state_dict()).keys() == model.state_dict().keys()


def test_copies_and_pickles_are_refused_with_the_reason(clusters: Callable) -> None:
    clusters(2).run(copied)


def refused() -> None:
    model, replica = pair(Owner)
    OURS.fully_shard(model.blocks[0])
    again = "FSDPBlock has been given to fully_shard before"
    with pytest.raises(ValueError, match=again):
        OURS.fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match=again):
        OURS.fully_shard([model.blocks[1], model.blocks[0]])
    with pytest.raises(ValueError, match="containers that do not implement forward"):
        OURS.fully_shard(model.blocks)
    with pytest.raises(ValueError, match="each once; given in one list: Block, Block"):
        OURS.fully_shard([model.blocks[1], model.blocks[1]])
    with pytest.raises(ValueError, match="given in one list: none"):
        OURS.fully_shard([])
    with pytest.raises(ValueError, match=r"gave Replicate\(\) for norm\.weight"):
        OURS.fully_shard(model.blocks[1], shard_placement_fn=lambda p: Replicate())
    with pytest.raises(ValueError, match=r"up\.bias of shape \(11,\) has no dimension 1"):
        OURS.fully_shard(
            model.blocks[1], shard_placement_fn=lambda p: Shard(1) if p.shape == (11,) else None
        )
    assert not any(isinstance(p, DTensor) for p in model.blocks[1].parameters())
    with pytest.raises(ValueError, match="reshard_after_forward=3 does not divide the 2 ranks"):
        model.blocks[0].set_reshard_after_forward(3)
    train(sharded_rest(model), replica, steps(2))


def sharded_rest(model: Any) -> nn.Module:
    OURS.fully_shard([model.blocks[1], model.blocks[2]])
    return OURS.fully_shard(model)


def test_what_cannot_be_sharded_is_refused_and_left_whole(clusters: Callable) -> None:
    clusters(2).run(refused)


class Bare(nn.Module):
    """Without parameters of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def without_parameters() -> None:
    for library in LIBRARIES:
        model, replica = pair(lambda: nn.Sequential(Bare(), nn.Linear(7, 7), Bare()))
        for child in model:
            library.fully_shard(child)
        library.fully_shard(model)
        train(model, replica, steps(2))
        model[0].unshard()
        model[0].reshard()
        model.set_reshard_after_forward(True)


def test_modules_without_parameters_are_units_too(clusters: Callable) -> None:
    clusters(2).run(without_parameters)


# torch.compile.


def compiled(way: str, backend: str) -> None:
    for reshard in (True, False):
        model, replica = pair(blocks)
        for index, block in enumerate(model[:3]):
            if way == "in place, then sharded":
                block.compile(backend=backend)
            elif way == "wrapped, then sharded":
                model[index] = block = torch.compile(block, backend=backend)
            OURS.fully_shard(block, reshard_after_forward=reshard)
            if way == "sharded, then in place":
                block.compile(backend=backend)
        OURS.fully_shard(model)
        plain = dict(replica.named_parameters())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, replica)]
        for x in steps():
            for each in (model, replica):
                each(x).square().mean().backward()
            average_gradients(replica)
            for name, parameter in model.named_parameters():
                other = plain[name.replace("_orig_mod.", "")]
                torch.testing.assert_close(whole(parameter), other.detach())
                torch.testing.assert_close(whole(parameter.grad), other.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.thorough  # each rank imports the compiler
@pytest.mark.parametrize("backend", [slow("eager"), "aot_eager"])
@pytest.mark.parametrize(
    "way", ["in place, then sharded", slow("wrapped, then sharded"), "sharded, then in place"]
)
def test_compiled_blocks_train_as_the_replica(clusters: Callable, way: str, backend: str) -> None:
    clusters(2).run(compiled, way, backend)
