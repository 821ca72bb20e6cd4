"""Writes the folder of Megatron-core beside this file, on two ranks over gloo.

    .venvs/peers/bin/python -m tests.data.megatron.make [FOLDER]

The written values are those of `value`, so that a test needs neither Megatron nor a copy of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.data.two_ranks import RANKS, elements, write_on_two_ranks

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
    return elements(SHAPES[name], prefix + name)


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


if __name__ == "__main__":
    write_on_two_ranks("tests.data.megatron.make", _write)
