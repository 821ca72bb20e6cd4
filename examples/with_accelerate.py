"""An Accelerate loop with checkpoints of ckpt: stop anywhere, go on with any number of ranks.

    torchrun --nproc-per-node 2 examples/with_accelerate.py --folder DIR --steps 6
    torchrun --nproc-per-node 3 examples/with_accelerate.py --folder DIR --steps 10 --resume

One line differs from a loop without ckpt: the import of the Accelerator. Needs
`pip install accelerate`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
from accelerate.utils import ProjectConfiguration
from torch import nn

from ckpt.integrations.accelerate import CkptAccelerator as Accelerator

BATCH = 12
"""Samples of a step, over all ranks."""


class Progress:
    """How many steps have been made: a value of the program's own, registered for checkpoints."""

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
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(given)
    config = ProjectConfiguration(options.folder, automatic_checkpoint_naming=True, total_limit=2)
    # By default Accelerate steps a scheduler once for each process, so that its rate would depend
    # on the number of ranks.
    accelerator = Accelerator(cpu=True, project_config=config, step_scheduler_with_optimizer=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(options.dropout), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = torch.utils.data.DataLoader(
        torch.randn(2 * BATCH, 8), batch_size=BATCH // accelerator.num_processes
    )
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    batches, losses = list(loader), list[float]()
    if options.resume:
        accelerator.load_state()
    while progress.step < options.steps:
        batch = batches[progress.step % len(batches)]
        loss = (model(batch) - batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        progress.step += 1
        if progress.step % 2 == 0:
            accelerator.save_state(blocking=False)
    accelerator.end_training()
    if accelerator.is_main_process:
        print(json.dumps(losses))


if __name__ == "__main__":
    main()
