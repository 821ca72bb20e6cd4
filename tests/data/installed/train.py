"""A job that saves, or resumes and saves again, beside packages with the names of the repository's.

torchrun --nproc-per-node 2 train.py NEW
torchrun --nproc-per-node 3 train.py NEW OLD
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import ckpt
import formats
import sharding
import tools
from ckpt.sharding import FullyShardedDataParallel
from ckpt.sharding.wrap import ModuleWrapPolicy

assert (formats.THEIRS, sharding.THEIRS, tools.THEIRS) == (True, True, True)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_world_size())
model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 5)), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "step": 1}
if len(sys.argv) > 2:
    assert ckpt.load(sys.argv[2], {**state, "step": 0})["step"] == 1
else:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
ckpt.save(sys.argv[1], state)
ckpt.save(f"{sys.argv[1]}-background", state, blocking=False).wait()
with ckpt.publish(state, "packages") as live:
    live.update().wait()
    assert ckpt.load(live.url, {**state, "step": 0})["step"] == 1
dist.destroy_process_group()
