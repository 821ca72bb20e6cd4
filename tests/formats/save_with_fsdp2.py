"""A job that trains with FSDP2 and Adam and saves with DCP: no code of ours takes part in it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def whole(value: object) -> object:
    """The value with every DTensor gathered; called on all ranks."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {str(key): whole(each) for key, each in value.items()}
    return value


def train_and_save(folder: Path) -> None:
    """Leave the checkpoint in `checkpoint` and the full tensors in `full.pt`. All ranks call it."""
    torch.manual_seed(0)
    # 5 and 1 rows over 2 ranks: an uneven and an empty shard.
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "step": 7}
    save(state, checkpoint_id=folder / "checkpoint")
    full = whole(state)
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.pt")
