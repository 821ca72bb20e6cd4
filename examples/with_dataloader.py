"""A loop over a `DataLoader`: stop anywhere in an epoch, go on on another number of ranks.

    torchrun --nproc-per-node 2 examples/with_dataloader.py --folder DIR --steps 6
    torchrun --nproc-per-node 3 examples/with_dataloader.py --folder DIR --steps 10 --resume

`ckpt.ElasticSampler` gives each rank its part of one order of samples, and its position in the
state does not depend on the number of ranks. A step takes the same 12 samples on 1, 2, 3 or 4
ranks, so the losses are those of one process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import ckpt

SAMPLES, BATCH = 48, 12
"""All samples, and those of a step, over all ranks."""


def main(given: Sequence[str] | None = None) -> None:
    """Train to a step; rank 0 prints the losses of this run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(given)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    samples = torch.randn(SAMPLES, 8)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = ckpt.ElasticSampler(samples, seed=1)
    loader = DataLoader(samples, batch_size=BATCH // ranks, sampler=sampler)  # type: ignore[arg-type]
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "rng": ckpt.rng()}
    losses = []
    with ckpt.Checkpointer(options.folder, every_steps=2, keep=ckpt.Keep(last=2)) as run:
        step = (run.restore(state) or 0) if options.resume else 0
        while step < options.steps and not run.reached_preemption():
            for batch in sampler.batches(loader):  # to the end of the epoch
                loss = (model(batch) - batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                mean = loss.detach() / ranks
                dist.all_reduce(mean)
                losses.append(mean.item())
                run.save(step, state)
                if step == options.steps or run.reached_preemption():
                    break
    if rank == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
