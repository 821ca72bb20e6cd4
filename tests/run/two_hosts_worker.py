"""A run with two tiers, as torchrun starts it on each host of test_two_hosts.py.

    two_hosts_worker.py SHARED LOCAL STEPS

With "memory" in the place of LOCAL, the near tier is in memory.

Each element of the state is the step it was saved at. Rank 0 prints the restored step and each step
that it has finished.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt

SHARED_EVERY = 5


def main() -> None:
    """Restore, train to the last step, and check the state."""
    shared, local, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.zeros(10, 3), mesh, [Shard(0)])
    assert isinstance(weight, DTensor)
    part = weight.to_local()
    near: dict[str, Any] = {"local": local, "local_every_steps": 1}
    if local == "memory":
        near = {"memory": ckpt.Memory(every_steps=1)}
    with ckpt.Checkpointer(
        shared,
        every_steps=SHARED_EVERY,
        **near,
        blocking=True,
        on_failure="raise",
        timeout=15,
    ) as run:
        first = run.restore({"weight": weight}) or 0
        assert bool((part == first).all()), part
        say(f"restored {first} on {dist.get_world_size()} ranks")
        for step in range(first + 1, steps + 1):
            part += 1
            run.save(step, {"weight": weight})
            say(f"step {step}")
    dist.destroy_process_group()


def say(line: str) -> None:
    """Print a line on rank 0 at once."""
    if dist.get_rank() == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
