"""Train under torchrun's elastic agents: workers die, hosts come and go, the run goes on by itself.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # see elastic_kills.py
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 20 --rdzv-backend c10d \
        --rdzv-endpoint HOST:29400 --rdzv-conf last_call_timeout=2 examples/elastic.py --folder DIR

Every start, the first and each that follows a failure, is the same program: it restores the newest
checkpoint of DIR, on the number of ranks that there is now, and trains on. A SIGTERM, which agents
send before they start workers anew, makes a checkpoint at once. `elastic_kills.py` kills workers
and hosts of such a run, and compares its losses with those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from text import Batches, standard_library
from torch.nn import functional as F
from train import Ranks, build, clip_gradients, learning_rate, say

import ckpt


def main() -> None:
    """Train to the last step; rank 0 adds the loss of each step to `losses.jsonl`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    say(f"rank {ranks.rank} of {ranks.world} is process {os.getpid()}")
    model = build("fsdp2", seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    state = {"model": model, "optimizer": optimizer, "rng": ckpt.rng()}
    batches = Batches(standard_library(), seed=1)
    keep = ckpt.Keep(last=2)
    with ckpt.Checkpointer(options.folder, every_steps=3, keep=keep, timeout=60) as run:
        first = (run.restore(state) or 0) + 1
        if ranks.rank == 0:
            say(f"{ranks.world} ranks go on at step {first}")
        for step in range(first, options.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step - 1, options.steps)
            inputs, targets = batches.share(step - 1, ranks.rank, ranks.world)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(model)
            optimizer.step()
            value = ranks.mean(loss)
            if ranks.rank == 0:
                with open(os.path.join(options.folder, "losses.jsonl"), "a") as log:
                    line = {"step": step, "loss": value, "ranks": ranks.world}
                    print(json.dumps(line), file=log)
                say(f"step {step}  loss {value:.4f}")
            run.save(step, state, force=step == options.steps)
            if run.reached_preemption():
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
