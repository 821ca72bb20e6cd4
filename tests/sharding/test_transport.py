"""Two ways between ranks, one contract; and ranks that are threads of one process."""

import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parent))  # for the ranks too, which know this file alone

from replica import batch, pair, train

from sharding import MixedPrecisionPolicy, fully_shard
from sharding.engine.composition import Composition, HybridGroups, Item, Purpose, ShardGroup
from sharding.engine.transport import (
    SMALL_BYTES,
    CollectiveTransport,
    P2PTransport,
    Transport,
    transport_between,
)
from sharding.engine.unit import units_of

WAYS: list[Callable[[ShardGroup], Transport]] = [P2PTransport, CollectiveTransport]
CPU = torch.device("cpu")
LARGE = SMALL_BYTES // 4 + 3
"""Elements of a tensor that does not travel with others."""


def numbers(rank: int, sizes: list[int], to: int = 0) -> list[torch.Tensor]:
    """What a rank has for another: the same wherever it is computed."""
    generator = torch.Generator().manual_seed(100 * rank + to)
    return [torch.randn(size, generator=generator) for size in sizes]


def turn_of(purpose: Purpose, turn: int) -> Composition:
    """What an exchange of a test carries."""
    return Composition((Item("test", 1, purpose, turn),))


SIZES = [
    [[5, 3], [5, 3], [2, 3], [0, 0]],
    [[1], [1], [1], [1]],
    [[7], [7], [0], [0]],
    [[LARGE, 5, 0, LARGE], [LARGE, 5, 0, LARGE - 7], [LARGE, 0, 0, 2], [1, 0, 0, 0]],
]
"""By case and rank, the sizes of what a rank has."""


def gathered(way: str) -> None:
    shard_group = ShardGroup.of(dist.group.WORLD)
    rank, size = shard_group.rank, shard_group.size
    transport = WAYS[["p2p", "collectives"].index(way)](shard_group)
    for turn, sizes in enumerate(SIZES):
        places = [[torch.full((n,), -1.0) for n in sizes[r]] for r in range(size)]
        transport.all_gather(
            numbers(rank, sizes[rank]), places, turn_of(Purpose.ALL_GATHER, turn)
        ).wait()
        for r in range(size):
            for place, wanted in zip(places[r], numbers(r, sizes[r]), strict=True):
                assert torch.equal(place, wanted), (turn, r)


def reduced(way: str) -> None:
    shard_group = ShardGroup.of(dist.group.WORLD)
    rank, size = shard_group.rank, shard_group.size
    transport = WAYS[["p2p", "collectives"].index(way)](shard_group)
    for turn, sizes in enumerate(SIZES):
        parts = [numbers(rank, sizes[r], to=1 + r) for r in range(size)]
        copies = [[part.clone() for part in of_rank] for of_rank in parts]
        sums = transport.reduce_scatter(parts, turn_of(Purpose.REDUCE_SCATTER, turn)).wait()
        wanted = numbers(0, sizes[rank], to=1 + rank)
        for r in range(1, size):
            for total, part in zip(wanted, numbers(r, sizes[rank], to=1 + rank), strict=True):
                total += part
        for mine, total in zip(sums, wanted, strict=True):
            if way == "p2p":
                assert torch.equal(mine, total)  # in rank order
            else:
                torch.testing.assert_close(mine, total)
        for of_rank, before in zip(parts, copies, strict=True):
            for part, copied in zip(of_rank, before, strict=True):
                assert torch.equal(part, copied)
        for mine, part in zip(sums, parts[rank], strict=True):
            assert not mine.numel() or mine.data_ptr() != part.data_ptr()


def reduced_to_all(way: str) -> None:
    shard_group = ShardGroup.of(dist.group.WORLD)
    transport = WAYS[["p2p", "collectives"].index(way)](shard_group)
    for turn, numel in enumerate((0, 1, 2, 5, 1001, LARGE * 4)):
        flat = numbers(shard_group.rank, [numel])[0]
        transport.all_reduce(flat, turn_of(Purpose.ALL_REDUCE, turn))
        total = sum(numbers(r, [numel])[0] for r in range(shard_group.size))
        torch.testing.assert_close(flat, total)
        others = [torch.empty_like(flat) for _ in range(shard_group.size)]
        dist.all_gather(others, flat)
        assert all(torch.equal(flat, other) for other in others)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("way", ["p2p", "collectives"])
def test_both_ways_gather_and_sum_alike(clusters: Callable, way: str, world_size: int) -> None:
    for function in (gathered, reduced, reduced_to_all):
        clusters(world_size).run(function, way)


def many_on_their_way() -> None:
    """Turns that overlap, awaited in another order than they were started in."""
    shard_group = ShardGroup.of(dist.group.WORLD)
    transport = P2PTransport(shard_group)
    sizes = [3, LARGE, 1]
    started = []
    for turn in range(8):
        places = [[torch.zeros(n) for n in sizes] for _ in range(shard_group.size)]
        mine = [tensor + turn for tensor in numbers(shard_group.rank, sizes)]
        gathering = transport.all_gather(mine, places, turn_of(Purpose.ALL_GATHER, 100 + turn))
        summing = transport.reduce_scatter(
            [[t + turn for t in mine] for _ in range(shard_group.size)],
            turn_of(Purpose.REDUCE_SCATTER, 100 + turn),
        )
        started.append((turn, gathering, places, summing))
    for turn, gathering, places, summing in reversed(started):
        sums = summing.wait()
        gathering.wait()
        for rank in range(shard_group.size):
            for place, value in zip(places[rank], numbers(rank, sizes), strict=True):
                assert torch.equal(place, value + turn)
        total = sum(numbers(rank, sizes)[1] + 2 * turn for rank in range(shard_group.size))
        torch.testing.assert_close(sums[1], total)


def test_turns_that_overlap_are_told_apart_by_their_tags(clusters: Callable) -> None:
    clusters(3).run(many_on_their_way)


@contextmanager
def asked_for(way: str) -> Iterator[None]:
    os.environ["SHARDING_TRANSPORT"] = way
    try:
        yield
    finally:
        del os.environ["SHARDING_TRANSPORT"]


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 7)) for _ in range(3)))


def sharded(model: nn.Module, **settings: object) -> nn.Module:
    for child in model.children():
        fully_shard(child, **settings)
    return fully_shard(model, **settings)


def by_collectives() -> None:
    batches = [batch(step, 4, 7) for step in range(3)]
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    low = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for settings in ({}, {"mesh": two}, {"reshard_after_forward": 2}, {"mp_policy": low}):
        model, replica = pair(blocks)
        with asked_for("collectives"):
            train(sharded(model, **settings), replica, batches, exact=False)
        for unit in units_of((model,)):
            for param_group in unit.param_groups:
                assert isinstance(param_group._transport, CollectiveTransport)


@pytest.mark.thorough
def test_a_user_may_ask_for_the_librarys_collectives(clusters: Callable) -> None:
    clusters(4).run(by_collectives)


def asked_wrongly() -> None:
    with asked_for("pigeons"), pytest.raises(ValueError, match="SHARDING_TRANSPORT='pigeons'"):
        sharded(blocks())(batch(0, 4, 7))
    shard_group = ShardGroup.of(dist.group.WORLD)
    with asked_for("p2p"):
        assert isinstance(transport_between(shard_group, CPU), P2PTransport)
        with pytest.raises(ValueError, match="needs gloo and tensors in host memory"):
            transport_between(shard_group, torch.device("meta"))
    assert isinstance(transport_between(shard_group, CPU), P2PTransport)
    assert isinstance(transport_between(shard_group, torch.device("meta")), CollectiveTransport)
    assert isinstance(transport_between(ShardGroup.alone(), CPU), P2PTransport)


def test_a_way_that_does_not_exist_is_refused(clusters: Callable) -> None:
    clusters(2).run(asked_wrongly)


def outsider() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        shard_group = ShardGroup(ref(dist.group.WORLD), (0, 1), 1)
        assert shard_group.others == [0]
    else:
        assert ShardGroup.of(group).size == 1
    with pytest.raises(ValueError, match="at least one process group"):
        HybridGroups(ShardGroup.alone(), ShardGroup.alone()).group  # noqa: B018
    four = ShardGroup(None, (4, 5, 6, 7), 2)
    assert four.others == [3, 0, 1]
    assert four.part(2) == ShardGroup(None, (6, 7), 0)
    assert four.part(4) == four
    assert four.part(1) == ShardGroup(None, (6,), 0)


def test_peers_are_divided_into_runs(clusters: Callable) -> None:
    clusters(2).run(outsider)


# Ranks as threads.


def as_threads(world_size: int, work: Callable[[], None]) -> None:
    """Run a function on ranks that are threads of this process."""
    from torch.testing._internal.distributed import multi_threaded_pg

    world = multi_threaded_pg._install_threaded_pg()
    errors: dict[int, BaseException] = {}
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            work()
        except BaseException as error:
            errors[rank] = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            if world.default_pg is not None:
                dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
    for error in errors.values():
        raise error


class Own(nn.Sequential):
    """A class that the threads shard at once, for the first time."""


def trained_as_a_thread(built: nn.Module) -> None:
    model, replica = copy.deepcopy(built), copy.deepcopy(built)
    sharded(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    batches = [batch(step, 4, 7) for step in range(3)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, replica)]
    for x in batches:
        for each in (model, replica):
            each(x).square().mean().backward()
        for mine, theirs in zip(model.parameters(), replica.parameters(), strict=True):
            dist.all_reduce(theirs.grad)
            theirs.grad /= dist.get_world_size()
            assert isinstance(mine, DTensor)
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), replica.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.detach())


def threads() -> None:
    torch.manual_seed(0)
    built = Own(*blocks())
    for world_size in (2, 4):
        as_threads(world_size, partial(trained_as_a_thread, built))


@pytest.mark.thorough
@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="the threaded process group of torch 2.11 fails at its end: its world lacks `comms`",
)
def test_ranks_may_be_threads_of_one_process() -> None:
    threads()
