"""What a step pays for a run that looks after its checkpoints and data, and what a restore takes.

    python benchmarks/run.py --store DIR

The ranks are hosts: each has a local folder of its own, on a tmpfs. The run's own folder is in the
store. The floor copies as many bytes as a rank saves.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import measure
import report
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt

WORLD_SIZE = 2
TENSORS = 100
CALLS = 100_000
SAMPLES, BATCH = 256_000, 32
TMPFS = "/dev/shm"
NEVER = 1 << 60
"""Steps between two saves that are not due."""


def _state(nbytes: int) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    elements = nbytes // 4 // TENSORS // WORLD_SIZE
    parts = [torch.rand(elements) for _ in range(TENSORS)]
    state = {f"w{at}": DTensor.from_local(part, mesh, [Shard(0)]) for at, part in enumerate(parts)}
    return {**state, "rng": ckpt.rng()}


def _on_rank(
    store: str, memory: str, nbytes: int, rounds: int
) -> tuple[float, measure.Samples, measure.Samples]:
    state = _state(nbytes)
    tensors = [one.to_local() for one in state.values() if isinstance(one, DTensor)]
    copies = [torch.empty_like(one) for one in tensors]
    near = f"{memory}/host{dist.get_rank()}"
    with ckpt.Checkpointer(f"{store}/idle", every_steps=NEVER) as run:
        started = time.perf_counter()
        for step in range(1, CALLS + 1):
            run.save(step, state)
        idle = (time.perf_counter() - started) / CALLS
    run = ckpt.Checkpointer(
        f"{store}/run",
        keep=ckpt.Keep(last=1),
        local=near,
        local_every_steps=1,
        local_keep=1,
        every_steps=NEVER,
    )
    ckpt.prepare(state)
    steps = iter(range(1, NEVER))

    def copied() -> None:
        for copy, one in zip(copies, tensors, strict=True):
            copy.copy_(one)

    def saving(is_far: bool) -> Callable[[], object]:
        return lambda: run.save(next(steps), state, force=is_far)

    def plain() -> None:
        running.append(ckpt.save(f"{store}/plain", state, blocking=False, overwrite=True))

    def waited() -> None:
        run.wait_until_finished()
        for handle in running:
            handle.wait()
        running.clear()
        dist.barrier()

    running: list[Any] = []
    saved = measure.interleaved(
        {
            report.FLOOR: measure.Contestant(copied, waited),
            "ckpt.save, until training goes on": measure.Contestant(plain, waited),
            "near save, until training goes on": measure.Contestant(saving(False), waited),
            "far save, until training goes on": measure.Contestant(saving(True), waited),
        },
        rounds,
    )
    run.save(next(steps), state, force=True)
    run.wait_until_finished()
    far = run.latest_step()
    run.save(next(steps), state)
    run.wait_until_finished()
    loaded = measure.interleaved(
        {
            report.FLOOR: measure.Contestant(copied),
            "near restore": measure.Contestant(lambda: run.restore(state)),
            "far restore": measure.Contestant(lambda: run.restore(state, far)),
        },
        rounds,
    )
    run.close()
    return idle, saved, loaded


def _batches(rounds: int) -> list[list[str]]:
    """The batches of an epoch of small samples, and the time to the next one near its end."""
    data = TensorDataset(torch.arange(SAMPLES))
    size = BATCH * (SAMPLES // BATCH * 9 // 10)
    ours = ckpt.ElasticSampler(data, num_replicas=2, rank=0)
    theirs = DistributedSampler(data, num_replicas=2, rank=0)
    plain, stateful = DataLoader(data, BATCH, sampler=theirs), StatefulDataLoader
    state = {**ours.state_dict(), "position": size}
    reached = stateful(data, BATCH, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    for _ in islice(reached, size // 2 // BATCH):
        pass
    saved = reached.state_dict()

    def resumed() -> object:
        ours.load_state_dict(state)
        return next(iter(ours.batches(DataLoader(data, BATCH, sampler=ours))))

    def loaded() -> object:
        loader = stateful(data, BATCH, sampler=theirs)
        loader.load_state_dict(saved)
        return next(iter(loader))

    def epoch(batches: Callable[[], Iterable[object]]) -> Callable[[], object]:
        return lambda: deque(batches(), maxlen=0)

    def fresh() -> Iterable[object]:
        ours.load_state_dict({**state, "position": 0})
        return ours.batches(DataLoader(data, BATCH, sampler=ours))

    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "ckpt.ElasticSampler, DataLoader": (epoch(fresh), resumed),
        "DistributedSampler, DataLoader, batches skipped": (
            epoch(lambda: plain),
            lambda: next(islice(plain, size // 2 // BATCH, None)),
        ),
        "DistributedSampler, StatefulDataLoader": (
            epoch(lambda: stateful(data, BATCH, sampler=theirs)),
            loaded,
        ),
    }
    if not torch.equal(resumed()[0], loaded()[0]):  # type: ignore[index]
        raise RuntimeError("the loaders go on with different batches")
    count = SAMPLES // 2 // BATCH
    taken: dict[str, list[list[float]]] = {name: [[], []] for name in ways}
    for _ in range(rounds):
        for name, actions in ways.items():
            for action, found in zip(actions, taken[name], strict=True):
                found.append(measure.sampled(action).cpu_seconds)
    return [
        [name, report.spread([one / count * 1e6 for one in whole]), report.spread(next_one)]
        for name, (whole, next_one) in taken.items()
    ]


def tables(options: report.Options) -> list[report.Table]:
    """The time of a call that saves nothing, of calls that save, and of both restores."""
    nbytes = int(options.gib * (1 << 30))
    with (
        options.folder() as store,
        report.Options(TMPFS).folder() as memory,
    ):
        ranks = measure.on_ranks(WORLD_SIZE, _on_rank, store, memory, nbytes, options.rounds)
    where = f"{options.gib:g} GiB by {WORLD_SIZE} ranks, the run in {options.where}"
    idle = statistics.mean(one for one, _, _ in ranks)
    row = [["run.save, nothing due", f"{idle * 1e6:.2f} µs"]]
    return [
        report.Table(
            f"A step without a save, {CALLS:,} calls by {WORLD_SIZE} ranks", ("", ""), row
        ),
        _table(f"A step with a save, {where}", [saved for _, saved, _ in ranks]),
        _table(f"A restore, {where}", [loaded for _, _, loaded in ranks]),
        _data_table(options.rounds),
    ]


def _data_table(rounds: int) -> report.Table:
    (rows,) = measure.on_ranks(1, _batches, rounds)
    title = f"Batches of {BATCH} of {SAMPLES:,} samples, one of 2 ranks, no workers"
    return report.Table(title, ("", "CPU µs a batch", "CPU seconds to go on at 90 %"), rows)


def _table(title: str, ranks: Sequence[measure.Samples]) -> report.Table:
    samples = measure.joined(ranks)
    rows = [
        [
            name,
            report.spread([sample.seconds for sample in found]),
            report.spread(report.ratios(samples, name, lambda s: s.seconds)),
            report.spread([sample.cpu_seconds for sample in found]),
        ]
        for name, found in samples.items()
    ]
    return report.Table(title, ("", "seconds", "÷ copy", "CPU seconds, all ranks"), rows)


if __name__ == "__main__":
    report.main(__doc__, tables)
