"""Lightning's Trainer with checkpoints of ckpt: stop anywhere, go on with any number of ranks.

    torchrun --nproc-per-node 2 examples/with_lightning.py --folder DIR --steps 6
    torchrun --nproc-per-node 3 examples/with_lightning.py --folder DIR --steps 10 --resume

`--how` says what distributes the model: `fsdp2` (ModelParallelStrategy), `ddp`, or `plugin`, which
is DDP with a CheckpointIO, of which rank 0 writes all. Needs `pip install lightning`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt.integrations.lightning import (
    CkptCheckpointIO,
    CkptDDPStrategy,
    CkptModelParallelStrategy,
)

BATCH = 12
"""Samples of a step, over all ranks."""


class Autoencoder(pl.LightningModule):
    """Two layers; its losses are those of the whole batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.losses = how, list[float]()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def configure_model(self) -> None:
        """Shard the parameters, where FSDP2 does."""
        if self.how == "fsdp2":
            for module in (self.net, self):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """The loss of this rank's part of a batch."""
        loss = (self.net(batch) - batch).square().mean()
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        """Adam, whose rate falls every third step."""
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main(given: Sequence[str] | None = None) -> None:
    """Train to a step; rank 0 prints the losses of this run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--how", choices=("fsdp2", "ddp", "plugin"), default="fsdp2")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(given)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    strategies: dict[str, Strategy | str] = {
        "ddp": CkptDDPStrategy(),
        "fsdp2": CkptModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1),
        "plugin": "ddp",
    }
    pl.seed_everything(1, verbose=False)
    model = Autoencoder(options.how)
    data = torch.randn(2 * BATCH, 8)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategies[options.how],
        plugins=[CkptCheckpointIO(blocking=False)] if options.how == "plugin" else None,
        callbacks=[
            ModelCheckpoint(
                options.folder, monitor="loss", every_n_train_steps=2, save_top_k=2, save_last=True
            )
        ],
        max_steps=options.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH // world_size)
    trainer.fit(model, loader, ckpt_path="last" if options.resume else None)
    if trainer.is_global_zero:
        print(json.dumps(model.losses))


if __name__ == "__main__":
    main()
