"""A loop with torchtitan's parts and checkpoints of ckpt: stop anywhere, go on with any ranks.

    torchrun --nproc-per-node 2 examples/with_torchtitan.py --folder DIR --steps 6
    torchrun --nproc-per-node 3 examples/with_torchtitan.py --folder DIR --steps 10 --resume

A trainer of torchtitan takes `CkptCheckpointManager.Config` in the place of its own manager's. The
loop here calls the manager as that trainer does, and runs on a CPU. Needs `pip install torchtitan`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig

from ckpt.integrations.torchtitan import CkptCheckpointManager

BATCH = 12
"""Samples of a step, over all ranks."""


class Progress:
    """How many steps have been made."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """For the checkpoint."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """From the checkpoint."""
        self.step = state["step"]


def main(given: Sequence[str] | None = None) -> None:
    """Train to a step; rank 0 prints the losses of this run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--how", choices=["disabled", "async"], default="async")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(given)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    data = torch.randn(2 * BATCH, 8)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    group = ParamGroupConfig(
        pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.1}
    )
    optimizers = OptimizersContainer(
        OptimizersContainer.Config(param_groups=[group], implementation="foreach"),
        model_parts=[model],
    )
    schedulers = LRSchedulersContainer(optimizers, lambda step: 0.5 ** (step // 3))
    progress = Progress()
    config = CkptCheckpointManager.Config(
        enable=True, folder=".", interval=2, keep_latest_k=2, async_mode=options.how
    )
    manager = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=options.folder,
    )
    losses = list[float]()
    if options.resume:
        manager.load()
    rank, size = dist.get_rank(), dist.get_world_size()
    while progress.step < options.steps:
        half = data[progress.step % 2 * BATCH :][:BATCH]
        batch = half.chunk(size)[rank]
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        schedulers.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
        progress.step += 1
        manager.save(progress.step)
    manager.maybe_wait_for_saving()
    manager.close()
    if rank == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
