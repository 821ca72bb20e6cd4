"""Whole parameters live only while they are needed; a unit sends what it must and no more."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parent))  # for the ranks too, which know this file alone

from replica import batch, pair, train

from sharding import MixedPrecisionPolicy, fully_shard
from sharding.engine.param_group import ParamGroup
from sharding.engine.reduction import PREFETCH_BYTES
from sharding.engine.unit import UNIT, units_of

UNITS = 6
WIDTH = 768
UNIT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
"""More than what small units may have together, ahead of their use."""


class Layer(nn.Module):
    """One unit; every one of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(x))


def layers() -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(UNITS)))


def sharded(model: nn.Sequential, **settings: object) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def param_groups(model: nn.Module) -> list[ParamGroup]:
    return [param_group for unit in units_of((model,)) for param_group in unit.param_groups]


def live(model: nn.Module) -> list[int]:
    """Bytes that the whole parameters of every parameter group have now."""
    return [
        sum(buffer.nbytes for buffer in param_group._buffers.values())
        for param_group in param_groups(model)
    ]


class Watch:
    """What is live whenever a layer begins or ends forward or backward."""

    def __init__(self, model: nn.Sequential, bytes_of: Callable[[], list[int]]) -> None:
        self.model, self.bytes_of = model, bytes_of
        self.seen: dict[str, list[list[int]]] = {"forward": [], "backward": []}
        for layer in model:
            linear = layer.linear
            for register in (linear.register_forward_pre_hook, linear.register_forward_hook):
                register(self.in_forward)
            for register in (
                linear.register_full_backward_pre_hook,
                linear.register_full_backward_hook,
            ):
                register(self.in_backward)

    def in_forward(self, *_: object) -> None:
        self.seen["forward"].append(self.bytes_of())

    def in_backward(self, *_: object) -> None:
        self.seen["backward"].append(self.bytes_of())

    def most(self, way: str) -> int:
        """How many units' parameters were whole at once."""
        return max(sum(map(bool, at_once)) for at_once in self.seen[way])


def x_of(step: int = 0) -> torch.Tensor:
    return batch(step, 4, WIDTH)


def whole_at_once() -> dict[str, tuple[int, int]]:
    most = {}
    for name, reshard in (("freed", True), ("kept", False), ("default", None)):
        model, replica = pair(layers)
        sharded(model, reshard_after_forward=reshard)
        watch = Watch(model, lambda model=model: live(model))
        train(model, replica, [x_of(step) for step in range(2)])
        assert live(model) == [0] * UNITS
        for whole in (*watch.seen["forward"], *watch.seen["backward"]):
            assert set(whole) <= {0, UNIT_BYTES}
        with torch.no_grad():
            watch.seen["forward"].clear()
            model(x_of())
            assert live(model) == [0] * UNITS
            assert watch.most("forward") <= 2
        most[name] = watch.most("forward"), watch.most("backward")
    return most


@pytest.mark.thorough
def test_no_more_than_two_units_are_whole_at_once(clusters: Callable) -> None:
    for most in clusters(2).run(whole_at_once):
        assert most["freed"] == most["default"]
        assert most["freed"][0] <= 2
        assert most["freed"][1] <= 2
        assert most["kept"][1] == UNITS


def whole_on_one_rank() -> None:
    """One rank alone holds its shards and the whole parameters, as others do."""
    model, replica = pair(layers)
    sharded(model)
    watch = Watch(model, lambda: live(model))
    train(model, replica, [x_of(0), x_of(1)])
    assert max(watch.most("forward"), watch.most("backward")) <= 2
    assert live(model) == [0] * UNITS


def test_one_rank_frees_as_many_do(clusters: Callable) -> None:
    clusters(1).run(whole_on_one_rank)


class Checkpointed(nn.Module):
    """A model that recomputes every layer in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x

    reentrant = False


def checkpointed(reentrant: bool) -> int:
    model, replica = pair(Checkpointed)
    model.reentrant = replica.reentrant = reentrant
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    watch = Watch(model.layers, lambda: live(model))
    x = x_of().requires_grad_()
    train(model, replica, [x, x], exact=False)
    assert live(model) == [0] * UNITS
    return max(watch.most("forward"), watch.most("backward"))


@pytest.mark.thorough
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_recomputed_units_are_freed_in_backward(clusters: Callable, reentrant: bool) -> None:
    assert max(clusters(2).run(checkpointed, reentrant)) <= 3


def frozen() -> int:
    """A frozen unit has no gradient to end it: it is freed when backward has left it."""
    model, replica = pair(layers)
    for each in (model, replica):
        for layer in list(each)[1:-1]:
            layer.requires_grad_(False)
    sharded(model)
    watch = Watch(model, lambda: live(model))
    train(model, replica, [x_of(0), x_of(1)])
    assert live(model) == [0] * UNITS
    return watch.most("backward")


def test_frozen_units_are_freed_in_backward(clusters: Callable) -> None:
    assert max(clusters(2).run(frozen)) <= 3


def parts_kept() -> None:
    """Between forward and backward, a part of the whole parameters stays on each of two ranks."""
    model, replica = pair(layers)
    for layer in model:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    watch = Watch(model, lambda: live(model))
    loss = model(x_of()).square().mean()
    assert live(model) == [0] * UNITS
    for param_group in param_groups(model):
        assert param_group._kept is not None
        kept, shard_group = param_group._kept.part, param_group._kept.shard_group
        assert shard_group.members in ((0, 1), (2, 3))
        assert abs(sum(part.nbytes for part in kept) - UNIT_BYTES / 2) <= 64
    loss.backward()
    assert all(param_group._kept is None for param_group in param_groups(model))
    assert watch.most("backward") <= 2
    model.zero_grad()
    train(model, replica, [x_of(1)], exact=False)
    with torch.no_grad():
        model(x_of())
    assert all(param_group._kept is None for param_group in param_groups(model))
    model(x_of())
    model(x_of())  # what the first kept is gone
    held = [param_group._kept for param_group in param_groups(model)]
    assert all(part is not None for part in held)


@pytest.mark.thorough
def test_a_part_stays_whole_on_a_number_of_ranks(clusters: Callable) -> None:
    clusters(4).run(parts_kept)


def low_precision() -> None:
    model, _ = pair(layers)
    sharded(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    watch = Watch(model, lambda: live(model))
    model(x_of()).sum().backward()
    for whole in (*watch.seen["forward"], *watch.seen["backward"]):
        assert set(whole) <= {0, UNIT_BYTES // 2}
    assert live(model) == [0] * UNITS


def test_whole_parameters_take_the_memory_of_the_dtype_they_are_used_in(
    clusters: Callable,
) -> None:
    clusters(2).run(low_precision)


def tensors_in_memory() -> int:
    """Bytes of all tensors' storages that Python can reach, each once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, nn.Parameter) and found.layout == torch.strided:
            with suppress(NotImplementedError):  # torch 2.6 has tensors that are undefined
                storage = found.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def left_after_a_step() -> None:
    """After a step there are shards and their gradients; nothing else stays, however often."""
    before = tensors_in_memory()
    model = sharded(layers())
    shards = sum(p.to_local().nbytes for p in model.parameters())
    assert abs(shards - UNITS * UNIT_BYTES / dist.get_world_size()) < UNIT_BYTES / 8
    sizes = {}
    for step in range(6):
        model(x_of(step)).square().mean().backward()
        model.zero_grad()
        if step in (1, 5):
            sizes[step] = tensors_in_memory() - before
    assert sizes[5] == sizes[1], sizes
    assert sizes[5] <= shards + UNIT_BYTES // 8, (sizes, shards)
    model(x_of()).square().mean().backward()
    grads = tensors_in_memory() - before - sizes[5]
    assert grads <= shards + UNIT_BYTES // 8
    loss = model(x_of()).square().mean()
    del loss, model
    assert tensors_in_memory() - before <= UNIT_BYTES // 8


@pytest.mark.thorough
def test_nothing_but_shards_and_gradients_stays_after_a_step(clusters: Callable) -> None:
    clusters(3).run(left_after_a_step)


# What travels.

HASH_BYTES = 8
"""A message to each other rank before the first all-gather of a root: the hash of its units."""


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of every message that this rank sends meanwhile."""
    sent: list[int] = []
    send = dist.isend

    def spy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return send(tensor, *args, **kwargs)

    with patch.object(dist, "isend", spy):
        yield sent


def messages(world_size: int) -> None:
    for reshard, gathers in ((True, 2), (False, 1)):
        model, _ = pair(layers)
        sharded(model, reshard_after_forward=reshard)
        shard_bytes = sum(parameter.to_local().nbytes for parameter in model.parameters())
        with counted() as sent:
            loss = model(x_of()).square().mean()
            others = world_size - 1
            assert sum(sent) == others * (shard_bytes + HASH_BYTES)
            forward = len(sent)
            loss.backward()
        # The weight's part, and what is small, to each peer.
        assert forward == (2 * UNITS + 1) * others
        assert len(sent) == (2 * UNITS * (gathers + 1) + 1) * others
        for accumulates in range(2):
            model.set_requires_gradient_sync(False)
            with counted() as sent:
                model(x_of(accumulates)).square().mean().backward()
            assert len(sent) == 2 * UNITS * others * gathers
        model.set_requires_gradient_sync(True)
        with counted() as sent, torch.no_grad():
            model(x_of())
        assert len(sent) == 2 * UNITS * others


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_unit_is_gathered_once_each_way_and_reduced_once(
    clusters: Callable, world_size: int
) -> None:
    clusters(world_size).run(messages, world_size)


def small_units(width: int) -> list[int]:
    """Of 40 units, many are gathered ahead of their use, but no more than may be."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(40)))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, sum(live(model)))

    for part in model:
        part.register_forward_hook(look)
        part.register_full_backward_hook(look)
    counts = []
    for step in range(3):
        with counted() as sent:
            loss = model(batch(step, 4, width)).sum()
            counts.append(len(sent))
            loss.backward()
            counts.append(len(sent) - counts[-1])
        assert live(model) == [0] * 40
    assert most <= PREFETCH_BYTES + 2 * live_bytes_of(model)
    return counts


def live_bytes_of(model: nn.Module) -> int:
    """Bytes of the largest unit's full buffer."""
    return max(param_group.unsharded_bytes for param_group in param_groups(model))


@pytest.mark.thorough
def test_small_units_travel_together(clusters: Callable) -> None:
    clusters(2).run(small_units, 200)  # 6 MB of them
    for counts in clusters(2).run(small_units, 50):
        assert counts[0] == 1 + 40  # nobody knows yet what comes next
        assert max(counts[2], counts[4]) < 10, counts
        assert max(counts[1], counts[3], counts[5]) < 20, counts


class Wide(nn.Module):
    """Many parameters of many sizes in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(3, 5) for _ in range(20))
        self.large = nn.Linear(128, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(x).sum() + sum(small(x[:, :3]).sum() for small in self.small)


def many_parameters() -> None:
    model = fully_shard(Wide())
    with counted() as sent:
        loss = model(batch(0, 4, 128))
        assert sent.pop(0) == HASH_BYTES
        assert len(sent) == 2  # all that is small, and the one that is large
        loss.backward()
        assert len(sent) == 4
    assert getattr(model, UNIT).param_groups[0].parameters[-1].name == "large.bias"


def test_small_parameters_of_a_unit_travel_in_one_message(clusters: Callable) -> None:
    clusters(2).run(many_parameters)


def reduced_before_the_end(forwards_dropped: int) -> list[bool]:
    """Whether the last unit has its gradient when backward comes to the first."""
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(2, 600)
    for _ in range(forwards_dropped):
        model(x)  # with gradients, and nobody asks for them
    seen = []
    model[0].register_forward_hook(
        lambda module, args, output: (
            output.register_hook(lambda gradient: seen.append(model[3].weight.grad is not None))
            and None
        )
    )
    model(x).sum().backward()
    return seen


@pytest.mark.parametrize("dropped", [0, 3])
def test_gradients_are_reduced_on_the_way_whatever_forwards_came_before(
    clusters: Callable, dropped: int
) -> None:
    assert clusters(2).run(reduced_before_the_end, dropped) == [[True]] * 2
