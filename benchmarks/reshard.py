"""Loading workload A at another world size: ckpt beside torch DCP and the raw read of the needed.

    python benchmarks/reshard.py --store DIR

The checkpoints are written by one set of processes and read by another. Every rank first loads
DCP's once: that is what the floor's raw file holds, and what every byte is compared with after the
first round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import dcp
import floor
import measure
import report
import torch.distributed as dist
import workload

import ckpt

CHANGES = ((4, 2), (2, 4), (4, 1))
"""World sizes saved with and loaded at."""
TURNED = ((2, 2), (4, 4))
"""World sizes that save matrices cut by rows, and load them cut by columns."""


def samples(
    options: report.Options, saved: int, loaded: int, by_columns: bool = False
) -> tuple[measure.Samples, int]:
    """Samples of loading at one world size what was saved with another, and the bytes needed."""
    with options.folder() as store:
        measure.on_ranks(saved, _save, store, options.gib)
        ranks = measure.on_ranks(loaded, _load, store, options.gib, options.rounds, by_columns)
    return measure.joined(part for part, _ in ranks), sum(needed for _, needed in ranks)


def over_needed(needed: int) -> Callable[[Sequence[measure.Sample]], str]:
    """For the last column: bytes read over bytes needed."""
    return lambda found: f"{statistics.median(s.read_bytes for s in found) / needed:.2f}"


def _save(store: str, gib: float) -> None:
    training = workload.build(gib)
    ckpt.save(f"{store}/ours", training.state)
    dcp.save(f"{store}/dcp", training.state_dicts())


def _load(store: str, gib: float, rounds: int, by_columns: bool) -> tuple[measure.Samples, int]:
    training = workload.build(gib, by_columns=by_columns)
    state_dicts = training.state_dicts()
    buffers = training.buffers()
    raw, ours, theirs = f"{store}/raw-{dist.get_rank()}", f"{store}/ours", f"{store}/dcp"
    dcp.load(theirs, state_dicts)
    floor.write(raw, buffers)
    expected = training.digest()

    def check() -> None:
        if training.digest() != expected:
            raise RuntimeError(f"rank {dist.get_rank()}: what was loaded is not what was saved")

    def contestant(run: Callable[[], object]) -> measure.Contestant:
        return measure.Contestant(run, training.clear, check)

    found = measure.interleaved(
        {
            report.FLOOR: contestant(lambda: floor.read(raw, buffers)),
            "ckpt": contestant(lambda: ckpt.load(ours, training.state)),
            "ckpt, verify=False": contestant(lambda: ckpt.load(ours, training.state, verify=False)),
            "torch DCP": contestant(lambda: dcp.load(theirs, state_dicts)),
        },
        rounds,
    )
    return found, sum(map(len, buffers))


def tables(options: report.Options) -> list[report.Table]:
    """One table, a block of rows for each change of world size."""
    rows = []
    for saved, loaded, by_columns in (
        *((*change, False) for change in CHANGES),
        *((*change, True) for change in TURNED),
    ):
        found, needed = samples(options, saved, loaded, by_columns)
        label = f"{saved} → {loaded}" + ", columns" * by_columns
        rows += report.rows(label, found, over_needed(needed))
    columns = report.columns("W", "bytes read ÷ needed")
    return [report.Table(f"Reshard on load, {options.gib:g} GiB, {options.where}", columns, rows)]


if __name__ == "__main__":
    report.main(__doc__, tables)
