"""The fixed cost: a state of 100 KB saved and loaded by 8 ranks, in CPU seconds of all together.

    python benchmarks/fixed.py --store DIR

The floor writes or reads as many bytes, flushes what it has written, and meets the others in a
barrier before and after.
"""

from __future__ import annotations

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

WORLD_SIZE = 8
TENSORS = 10
ROWS, COLUMNS = 80, 32
"""Of float32: 10 KB a tensor."""


def _state() -> dict[str, object]:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    state: dict[str, object] = {}
    for index in range(TENSORS):
        part = torch.rand(ROWS // WORLD_SIZE, COLUMNS)
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


def tables(options: report.Options) -> list[report.Table]:
    """Two tables, save and load; always of `WORLD_SIZE` ranks. Rounds are cheap here: threefold."""
    with options.folder() as store:
        ranks = measure.on_ranks(WORLD_SIZE, _on_rank, store, 3 * options.rounds)
    title = f"100 KB by {WORLD_SIZE} ranks, {options.where}"
    return [
        _table(f"Save {title}", [saved for saved, _ in ranks]),
        _table(f"Load {title}", [loaded for _, loaded in ranks]),
    ]


def _table(title: str, ranks: Sequence[measure.Samples]) -> report.Table:
    samples = measure.joined(ranks)
    rows = [
        [
            name,
            report.spread([sample.cpu_seconds for sample in found]),
            report.spread(report.ratios(samples, name, lambda s: s.cpu_seconds)),
            report.spread([sample.seconds for sample in found]),
        ]
        for name, found in samples.items()
    ]
    return report.Table(title, ("", "CPU seconds, all ranks", "÷ floor", "seconds"), rows)


if __name__ == "__main__":
    report.main(__doc__, tables)
