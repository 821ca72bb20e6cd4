"""Saving workload A: ckpt beside torch DCP and the raw write of the same bytes.

    python benchmarks/save.py --world-size 2 --store DIR

torch_checkpointing is measured where it is installed; it flushes nothing.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import dcp
import floor
import measure
import report
import torch.distributed as dist
import workload

import ckpt


def _torch_checkpointing() -> Any:
    """The manager of meta-pytorch's torch_checkpointing, which gathers its metadata over gloo."""
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gathered(self: object, data: object, process_group: object = None) -> dict[int, object]:
        found: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(found, data)
        return dict(enumerate(found))

    DefaultMetadataManager._all_gather_pickled_data = gathered  # its own needs a GPU
    items = {name: ItemSpec(resharder=DefaultResharder()) for name in ("model", "optimizer")}
    return CheckpointManager(
        CheckpointManager.Config(
            items=items,
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )


def _on_rank(store: str, gib: float, rounds: int) -> measure.Samples:
    training = workload.build(gib)
    state_dicts = training.state_dicts()
    buffers = training.buffers()
    raw, ours, theirs = f"{store}/raw-{dist.get_rank()}", f"{store}/ours", f"{store}/dcp"
    newest = f"{store}/torch_checkpointing"

    def fresh() -> None:
        report.remove(raw)
        if dist.get_rank() == 0:
            report.remove(ours)
            report.remove(theirs)
            report.remove(newest)

    contestants = {
        report.FLOOR: measure.Contestant(lambda: floor.write(raw, buffers), fresh),
        "ckpt": measure.Contestant(lambda: ckpt.save(ours, training.state), fresh),
        "torch DCP": measure.Contestant(lambda: dcp.save(theirs, state_dicts), fresh),
        "torch DCP, no checksums": measure.Contestant(
            lambda: dcp.save_without_checksums(theirs, state_dicts), fresh
        ),
    }
    if find_spec("torch_checkpointing"):
        manager = _torch_checkpointing()
        contestants["torch_checkpointing"] = measure.Contestant(
            lambda: manager.save(newest, state_dicts), fresh
        )
    return measure.interleaved(contestants, rounds)


def tables(options: report.Options) -> list[report.Table]:
    """One table, a block of rows for each world size."""
    rows = []
    for world_size in options.world_sizes:
        with options.folder() as store:
            ranks = measure.on_ranks(world_size, _on_rank, store, options.gib, options.rounds)
        rows += report.rows(str(world_size), measure.joined(ranks), report.write_calls)
    return [
        report.Table(
            f"Save, {options.gib:g} GiB, {options.where}", report.columns("W", "write calls"), rows
        )
    ]


if __name__ == "__main__":
    report.main(__doc__, tables)
