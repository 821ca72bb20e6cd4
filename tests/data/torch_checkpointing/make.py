"""Writes the folder of meta-pytorch/torch_checkpointing beside this file, on two ranks over gloo.

    .venvs/peers/bin/python tests/data/torch_checkpointing/make.py [FOLDER]

The written values are those of `value`, so that a test needs neither the library nor a copy.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from math import prod
from pathlib import Path
from zlib import crc32

RANKS = 2
SHAPES = {"embed.weight": (5, 4), "out.weight": (3, 4), "bias": (3,)}
"""Cut by rows, by columns, and on both ranks."""


def value(name: str, prefix: str = "") -> list[float]:
    """The row-major elements of a tensor."""
    first = crc32(f"{prefix}{name}".encode()) % 16
    return [(first + at) / 8 for at in range(prod(SHAPES[name]))]


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


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    if "RANK" in os.environ:
        _write(folder)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**os.environ, **told, "OMP_NUM_THREADS": "1", "RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]
    codes = [rank.wait(timeout=500) for rank in ranks]
    if any(codes):
        raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
