"""Writes the folders beside this file with Accelerate: `python write.py`.

`plain` is of one process with two models, `fsdp2` of two ranks with FSDP2 and its sharded state
dicts, and `fsdp2-full` the same with full state dicts. The weights count up from 0; one step of
AdamW with a gradient of ones follows, from which the optimizers have `exp_avg` = 0.1.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def linear(first: float) -> Any:
    """A layer whose parameters count up."""
    import torch

    layer = torch.nn.Linear(3, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(12.0).reshape(4, 3) + first)
        layer.bias.copy_(torch.arange(4.0) + 100 + first)
    return layer


def step(layer: Any, optimizer: Any) -> None:
    """One step with a learning rate of 0, so that the weights stay."""
    import torch

    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def plain(folder: Path) -> None:
    """Two models with an optimizer and a scheduler each."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    for first in (0.0, 50.0):
        layer = linear(first)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.0)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        layer, optimizer, _ = accelerator.prepare(layer, optimizer, scheduler)
        step(layer, optimizer)
    accelerator.save_state(str(folder))


def fsdp2(folder: Path, state_dict_type: str) -> None:
    """One model over two ranks, by the functions that `save_state` calls.

    `save_state` itself calls them on accelerators only.
    """
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.checkpointing import save_accelerator_state
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=state_dict_type)
    layer = linear(0.0)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.0)
    step(layer, optimizer)
    save_fsdp_model(plugin, accelerator, layer, str(folder))
    save_fsdp_optimizer(plugin, accelerator, optimizer, layer, str(folder))
    save_accelerator_state(str(folder), [], [], [], [], accelerator.process_index, 0)
    torch.distributed.destroy_process_group()


def rank(number: int, port: int, folder: str, state_dict_type: str) -> None:
    """One rank of two."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    fsdp2(Path(folder), state_dict_type)


def main() -> None:
    """Writes each folder anew."""
    import torch.multiprocessing as processes

    for name, kind in (("plain", ""), ("fsdp2", "SHARDED"), ("fsdp2-full", "FULL")):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "state"
            if not kind:
                plain(folder)
            else:
                with socket.socket() as found:
                    found.bind(("127.0.0.1", 0))
                    port = found.getsockname()[1]
                processes.spawn(rank, (port, str(folder), f"{kind}_STATE_DICT"), nprocs=2)
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(folder, HERE / name)
    (HERE / "fsdp2-full" / "random_states_1.pkl").unlink()  # as large as all else together


if __name__ == "__main__":
    sys.exit(main())
