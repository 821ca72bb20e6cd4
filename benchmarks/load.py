"""Loading workload A at the world size it was saved with: ckpt beside torch DCP and the raw read.

    python benchmarks/load.py --world-size 2 --store DIR

Everything is loaded into tensors that exist; after the first round every byte is compared. The
second table is of files on a disk that the system has dropped from memory, of up to 8 GB in all, by
two ranks: beside `dd` of the same bytes by each rank, with and without O_DIRECT.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace

import dcp
import floor
import measure
import report
import reshard
import torch.distributed as dist
import workload

import ckpt

COLD_RANKS, COLD_GIB, COLD_ROUNDS = 2, 7.45, 3


def _cold(store: str, gib: float) -> measure.Samples:
    training = workload.build(gib)
    state_dicts, digest = training.state_dicts(), training.digest()
    raw, ours, theirs = f"{store}/raw-{dist.get_rank()}", f"{store}/ours", f"{store}/dcp"
    floor.write(raw, training.buffers())
    ckpt.save(ours, training.state)
    dcp.save(theirs, state_dicts)

    def before() -> None:
        training.clear()
        dist.barrier()
        if dist.get_rank() == 0:
            _drop(store)

    def check() -> None:
        if training.digest() != digest:
            raise RuntimeError(f"rank {dist.get_rank()}: what was loaded is not what was saved")

    def dd(*flags: str) -> None:
        measure.process(["dd", f"if={raw}", "of=/dev/null", "bs=4M", *flags])

    return measure.interleaved(
        {
            report.FLOOR: measure.Contestant(dd, before),
            "dd, O_DIRECT": measure.Contestant(lambda: dd("iflag=direct"), before),
            "ckpt": measure.Contestant(lambda: ckpt.load(ours, training.state), before, check),
            "torch DCP": measure.Contestant(lambda: dcp.load(theirs, state_dicts), before, check),
        },
        COLD_ROUNDS,
    )


def _drop(folder: str) -> None:
    """Takes the files of a folder out of the system's memory; they are flushed."""
    for root, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(root, name), os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def cold_table(options: report.Options) -> report.Table:
    """The files of a checkpoint that no memory holds."""
    gib = min(COLD_GIB, 4 * options.gib)
    with options.folder() as store:
        samples = measure.joined(measure.on_ranks(COLD_RANKS, _cold, store, gib))
    rows = report.rows(str(COLD_RANKS), samples, report.write_calls)
    size = f"{gib * 2**30 / 1e9:.1f} GB, {options.where}"
    title = f"Load of files that are not in memory, {size}; floor: dd"
    return report.Table(title, report.columns("W", "write calls"), rows)


def tables(options: report.Options) -> list[report.Table]:
    """Two tables, the first with a block of rows for each world size."""
    rows = []
    for world_size in options.world_sizes:
        samples, needed = reshard.samples(options, world_size, world_size)
        rows += report.rows(str(world_size), samples, reshard.over_needed(needed))
    columns = report.columns("W", "bytes read ÷ needed")
    warm = report.Table(f"Load, {options.gib:g} GiB, {options.where}", columns, rows)
    if options.short:
        return [warm]
    return [warm, cold_table(replace(options, store=tempfile.gettempdir()))]


if __name__ == "__main__":
    report.main(__doc__, tables)
