"""Writes the folder of Megatron-core beside this file, on two ranks over gloo.

    .venvs/peers/bin/python tests/data/megatron/make.py [FOLDER]

The written values are those of `value`, so that a test needs neither Megatron nor a copy of them.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from math import prod
from pathlib import Path
from zlib import crc32

RANKS = 2
SHAPES = {
    "embedding.word_embeddings.weight": (6, 4),
    "decoder.layers.mlp.linear_fc1.weight": (2, 4, 4),
    "decoder.final_layernorm.weight": (4,),
}
"""Cut by rows; of the layers, one on each rank; the same on both ranks."""
STATES = ("", "optimizer.state.exp_avg.")
FOLDER = "iter_0000005"


def value(name: str, prefix: str = "") -> list[float]:
    """The row-major elements of a tensor."""
    first = crc32(f"{prefix}{name}".encode()) % 16
    return [(first + at) / 8 for at in range(prod(SHAPES[name]))]


def _sharded(rank: int) -> dict:
    import torch
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    found: dict = {}
    for prefix in STATES:
        for name, shape in SHAPES.items():
            whole = torch.tensor(value(name, prefix)).view(shape)
            key = prefix + name
            if name.startswith("embedding"):
                part = whole.chunk(RANKS)[rank].contiguous()
                found[key] = ShardedTensor.from_rank_offsets(key, part, (0, rank, RANKS))
            elif name.startswith("decoder.layers"):
                found[key] = ShardedTensor.from_rank_offsets(
                    key, whole[rank].contiguous(), (0, rank, RANKS), prepend_axis_num=1
                )
            else:
                found[key] = ShardedTensor.from_rank_offsets(key, whole, replica_id=rank)
    extra = {"recipe": f"of rank {rank}"}
    found["extra"] = ShardedObject("decoder.layers._extra_state", extra, (RANKS,), (rank,))
    found["rng"] = ShardedObject("rng_state", [torch.arange(3) + rank], (RANKS,), (rank,))
    return found


def _write(folder: Path) -> None:
    import torch
    from megatron.core import dist_checkpointing

    torch.cuda.synchronize = lambda *_: None  # Megatron calls both, also without a GPU
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    common = {
        "iteration": 5,
        "checkpoint_version": 3.0,
        "args": argparse.Namespace(hidden_size=4, num_layers=2),
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": 5},
        "optimizer": {"param_groups": [{"lr": 0.01, "betas": (0.9, 0.95), "step": 5}]},
        "mean": torch.arange(2.0),
    }
    if rank == 0:
        (folder / FOLDER).mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save({**_sharded(rank), **common}, str(folder / FOLDER))
    if rank == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text("5")
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
