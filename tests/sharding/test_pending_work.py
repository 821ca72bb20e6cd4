"""Messages that nobody waits for any more: neither memory nor what comes behind them suffers."""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sharding import fully_shard
from sharding.engine.composition import Composition, Item, Purpose, ShardGroup
from sharding.engine.parameter import ChunkPacking, UnshardedBuffer, pack
from sharding.engine.transport import P2PExchange, P2PTransport

NUMEL = 1 << 16
"""Of one rank's part."""


def carried(sequence: int) -> Composition:
    """What an exchange of a test carries."""
    return Composition((Item("test", 1, Purpose.ALL_GATHER, sequence),))


def buffer_of(size: int) -> tuple[UnshardedBuffer, list[list[torch.Tensor]]]:
    """A full buffer, and the places in it by rank."""
    packing = ChunkPacking(pack([(size * NUMEL,)], [0]), size)
    buffer = UnshardedBuffer.of(packing.slots, packing.numel, torch.float32, torch.device("cpu"))
    return buffer, buffer.places(packing)


def gather_with_nobody(model: Any) -> None:
    """What could not be gathered says so from then on."""
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 64))
    with pytest.raises(RuntimeError, match=r"could not gather .*start the job again"):
        model(torch.ones(2, 64))
    assert all(isinstance(p, DTensor) for p in model.parameters())


def miss_one() -> None:
    """Rank 1 ends. Rank 2 sends when rank 0 has given up; then they exchange something else."""
    rank, shard_group = dist.get_rank(), ShardGroup.of(dist.group.WORLD)
    store = dist.distributed_c10d._get_default_store()
    model: Any = fully_shard(nn.Linear(64, 64))
    model(torch.ones(2, 64)).sum().backward()
    mine = [torch.full((NUMEL,), float(rank))]
    exchange, (_, places) = P2PExchange(shard_group, carried(1)), buffer_of(3)
    if rank == 0:
        for other in (1, 2):
            exchange.receive(places[other], other)
        store.set("posted", "")
        with pytest.raises(RuntimeError):
            exchange.wait()
        store.set("given up", "")
    elif rank == 1:
        store.wait(["posted"])
        os._exit(1)
    else:
        store.wait(["given up"])
        exchange.send(mine, 0)
        exchange.wait()
    del exchange
    _, places = buffer_of(2)
    P2PTransport(ShardGroup(shard_group.reference, (0, 2), rank // 2)).all_gather(
        mine, places, carried(2)
    ).wait()
    assert [place.unique().tolist() for [place] in places] == [[0.0], [2.0]]
    gather_with_nobody(model)


@pytest.mark.thorough
def test_an_exchange_that_failed_leaves_memory_and_the_next_alone(doomed_cluster: Callable) -> None:
    with pytest.raises(Exception, match=r"ranks \[1\] died; \{\}"):  # the others returned
        doomed_cluster(3).run(miss_one)


def interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def interrupt() -> list[list[float]]:
    """Rank 1 sends rank 0 a signal, and then what it waits for."""
    rank, shard_group = dist.get_rank(), ShardGroup.of(dist.group.WORLD)
    store = dist.PrefixStore("interrupt", dist.distributed_c10d._get_default_store())
    _, places = buffer_of(2)
    transport, mine = P2PTransport(shard_group), [torch.full((NUMEL,), float(rank))]
    if rank == 1:
        os.kill(int(store.get("waiting")), signal.SIGUSR1)
        transport.all_gather(mine, places, carried(3)).wait()
        return [place.unique().tolist() for [place] in places]
    before = signal.signal(signal.SIGUSR1, interrupted)
    gathering, is_interrupted = transport.all_gather(mine, places, carried(3)), False
    try:
        store.set("waiting", str(os.getpid()))
        gathering.wait()
        signal.pause()
    except KeyboardInterrupt:
        is_interrupted = True
    assert is_interrupted
    gathering.wait()
    signal.signal(signal.SIGUSR1, before)
    return [place.unique().tolist() for [place] in places]


def test_who_was_interrupted_waits_again(clusters: Callable) -> None:
    assert clusters(2).run(interrupt) == [[[0.0], [1.0]]] * 2
