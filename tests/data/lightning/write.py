"""Writes the files beside this file with Lightning: `python write.py`.

`one.ckpt` is a checkpoint of one process, `sharded` a folder of two ranks with the model-parallel
strategy, both after two steps of SGD with momentum on a layer whose gradients are ones.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def module() -> Any:
    """A layer whose parameters count up, and hyperparameters."""
    import lightning
    import torch

    class Counting(lightning.LightningModule):
        def __init__(self, rate: float = 0.5, sizes: tuple[int, ...] = (3, 4)) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(*sizes)
            with torch.no_grad():
                self.layer.weight.copy_(torch.arange(12.0).reshape(4, 3))
                self.layer.bias.copy_(torch.arange(4.0) + 100)

        def configure_model(self) -> None:
            mesh = getattr(self, "device_mesh", None)
            if mesh is not None:
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.layer, mesh=mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["rate"], momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

    return Counting()


def run(strategy: Any, devices: int, file: Path, folder: str) -> None:
    """Trains for two steps and saves."""
    import lightning
    import torch

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module(), torch.utils.data.DataLoader(torch.ones(4, 3), batch_size=1))
    trainer.save_checkpoint(file)


def main() -> None:
    """Writes each anew."""
    with tempfile.TemporaryDirectory() as folder:
        run("auto", 1, HERE / "one.ckpt", folder)
        from lightning.pytorch.strategies import ModelParallelStrategy

        found = Path(folder) / "sharded"
        run(ModelParallelStrategy(process_group_backend="gloo"), 2, found, folder)
        if found.is_dir() and (found / "meta.pt").is_file():
            shutil.rmtree(HERE / "sharded", ignore_errors=True)
            shutil.copytree(found, HERE / "sharded")


if __name__ == "__main__":
    sys.exit(main())
