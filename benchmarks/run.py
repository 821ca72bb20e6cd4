"""What a step pays for a run that looks after its checkpoints, and what a restore takes.

    python benchmarks/run.py --store DIR

The ranks are hosts: each has a local folder of its own, on a tmpfs. The run's own folder is in the
store. The floor copies as many bytes as a rank saves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import measure
import report
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt

WORLD_SIZE = 2
TENSORS = 100
CALLS = 100_000
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

    saved = measure.interleaved(
        {
            report.FLOOR: measure.Contestant(copied, run.wait_until_finished),
            "near save, until training goes on": measure.Contestant(
                saving(False), run.wait_until_finished
            ),
            "far save, until training goes on": measure.Contestant(
                saving(True), run.wait_until_finished
            ),
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
    ]


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
