"""Writes the folder of meta-pytorch/torch_checkpointing beside this file, on two ranks over gloo.

    .venvs/peers/bin/python -m tests.data.torch_checkpointing.make [FOLDER]

The written values are those of `value`, so that a test needs neither the library nor a copy.
"""

from __future__ import annotations

from pathlib import Path

from tests.data.two_ranks import RANKS, elements, write_on_two_ranks

SHAPES = {"embed.weight": (5, 4), "out.weight": (3, 4), "bias": (3,)}
"""Cut by rows, by columns, and on both ranks."""


def value(name: str, prefix: str = "") -> list[float]:
    """The row-major elements of a tensor."""
    return elements(SHAPES[name], prefix + name)


def _write(folder: Path) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gathered(self, data, process_group=None) -> dict:
        found = [None] * RANKS
        torch.distributed.all_gather_object(found, data)
        return dict(enumerate(found))

    DefaultMetadataManager._all_gather_pickled_data = gathered  # its own needs a GPU
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    placements = {"embed.weight": Shard(0), "out.weight": Shard(1), "bias": Replicate()}

    def tensors(prefix: str) -> dict:
        return {
            name: distribute_tensor(
                torch.tensor(value(name, prefix)).view(shape), mesh, [placements[name]]
            )
            for name, shape in SHAPES.items()
        }

    moments = {name: {"exp_avg": each} for name, each in tensors("exp_avg").items()}
    manager = CheckpointManager(
        CheckpointManager.Config(
            items={
                "model": ItemSpec(resharder=DefaultResharder()),
                "optimizer": ItemSpec(resharder=DefaultResharder()),
            },
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    rank = torch.distributed.get_rank()
    options = [{"lr": 0.01, "params": list(SHAPES)}]
    optimizer = {"state": moments, "param_groups": options}
    state = {"model": tensors(""), "optimizer": optimizer, "step": 5, "rank": {"of": rank}}
    manager.save(str(folder / "step-5"), state)
    manager.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    write_on_two_ranks("tests.data.torch_checkpointing.make", _write)
