"""The fixed cost: a state of 100 KB saved and loaded by few and many ranks, in CPU seconds of all.

    python benchmarks/fixed.py --store DIR

The floor writes or reads as many bytes, flushes what it has written, and meets the others in a
barrier before and after. The last table is of new processes: the first call after the imports.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import dcp
import floor
import measure
import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt

WORLD_SIZES = (1, 2, 8)
TENSORS = 10
ROWS, COLUMNS = 80, 32
"""Of float32: 10 KB a tensor."""


def _state() -> dict[str, object]:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    state: dict[str, object] = {}
    for index in range(TENSORS):
        part = torch.rand(ROWS // world_size, COLUMNS)
        state[f"layers.{index}.weight"] = DTensor.from_local(part, mesh, [Shard(0)])
    return state


def _on_rank(store: str, rounds: int) -> tuple[measure.Samples, measure.Samples]:
    state = _state()
    tensors = [tensor.to_local() for tensor in state.values() if isinstance(tensor, DTensor)]
    buffers = [memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in tensors]
    raw, ours, theirs = f"{store}/raw-{dist.get_rank()}", f"{store}/ours", f"{store}/dcp"
    planner = torch_dcp.DefaultSavePlanner(enable_plan_caching=True)

    def fresh() -> None:
        report.remove(raw)
        if dist.get_rank() == 0:
            report.remove(ours)
            report.remove(theirs)

    def met(action: object) -> None:
        assert callable(action)
        dist.barrier()
        action(raw, buffers)
        dist.barrier()

    saved = measure.interleaved(
        {
            report.FLOOR: measure.Contestant(lambda: met(floor.write), fresh),
            "ckpt": measure.Contestant(lambda: ckpt.save(ours, state), fresh),
            "torch DCP": measure.Contestant(lambda: dcp.save(theirs, state), fresh),
            "torch DCP, plans cached": measure.Contestant(
                lambda: torch_dcp.save(state, checkpoint_id=theirs, planner=planner), fresh
            ),
        },
        rounds,
    )
    fresh()
    dist.barrier()
    floor.write(raw, buffers)
    ckpt.save(ours, state)
    dcp.save(theirs, state)
    loaded = measure.interleaved(
        {
            report.FLOOR: measure.Contestant(lambda: met(floor.read)),
            "ckpt": measure.Contestant(lambda: ckpt.load(ours, state)),
            "torch DCP": measure.Contestant(lambda: dcp.load(theirs, state)),
        },
        rounds,
    )
    return saved, loaded


FIRST_CALLS = {
    report.FLOOR: "torch.save(state, path)",
    "ckpt.save": "import ckpt; ckpt.save(path, state)",
    "torch DCP": "import torch.distributed.checkpoint as dcp; dcp.save(state, checkpoint_id=path)",
}
"""A first call in a new process that has imported torch."""
PROCESS = """
import sys, time, torch
path, state = sys.argv[1], {str(at): torch.zeros(2560) for at in range(10)}
before = time.process_time()
CALL
print(time.process_time() - before)
"""


def tables(options: report.Options) -> list[report.Table]:
    """Saves, loads, and first calls. Rounds are cheap here: threefold."""
    saves, loads = [], []
    for world_size in WORLD_SIZES:
        with options.folder() as store:
            ranks = measure.on_ranks(world_size, _on_rank, store, 3 * options.rounds)
        saves += _rows(world_size, [saved for saved, _ in ranks])
        loads += _rows(world_size, [loaded for _, loaded in ranks])
    columns = ("W", "", "CPU seconds, all ranks", "÷ floor", "seconds")
    return [
        report.Table(f"Save 100 KB, {options.where}", columns, saves),
        report.Table(f"Load 100 KB, {options.where}", columns, loads),
        _first_calls(options),
    ]


def _rows(world_size: int, ranks: Sequence[measure.Samples]) -> list[list[str]]:
    samples = measure.joined(ranks)
    return [
        [
            str(world_size),
            name,
            report.spread([sample.cpu_seconds for sample in found]),
            report.spread(report.ratios(samples, name, lambda s: s.cpu_seconds)),
            report.spread([sample.seconds for sample in found]),
        ]
        for name, found in samples.items()
    ]


def _first_calls(options: report.Options) -> report.Table:
    """Each call in new processes, in turn."""
    taken: dict[str, list[float]] = {name: [] for name in FIRST_CALLS}
    with options.folder() as store:
        for number in range(options.rounds):
            for name, call in FIRST_CALLS.items():
                program = PROCESS.replace("CALL", call)
                path = f"{store}/{number}-{name}"
                command = [sys.executable, "-W", "ignore", "-c", program, path]
                taken[name].append(float(subprocess.check_output(command, text=True)))
    rows = [[name, report.spread(seconds)] for name, seconds in taken.items()]
    title = "The first save of 100 KB in a new process that has imported torch, imports included"
    return report.Table(title, ("", "CPU seconds"), rows)


if __name__ == "__main__":
    report.main(__doc__, tables)
