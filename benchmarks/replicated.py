"""A replicated model (DDP): how evenly the ranks share the writing.

    python benchmarks/replicated.py --world-size 4 --store DIR

Every rank holds the whole state. The figure is the bytes that the busiest rank wrote, over those
that each would write if all wrote as much; it is the same in every round, so there is one.
"""

from __future__ import annotations

import os
import re
from collections import Counter

import dcp
import measure
import report
import torch
import torch.distributed as dist
import workload
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

import ckpt

WORLD_SIZE = 4
"""Ranks, whatever is asked for: more replicas are harder to serve evenly."""
MOST_GIB = 0.25
"""Every rank has as much: more would be memory for nothing."""
_RANK = re.compile(r"-(\d{5})\.safetensors$|^__(\d+)_\d+\.distcp$")


def _on_rank(store: str, gib: float) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(workload.Transformer(workload.width_for(gib)))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ckpt.save(f"{store}/ours", {"model": model, "optimizer": optimizer})
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save(f"{store}/dcp", {"model": model_state, "optimizer": optimizer_state})
    dist.barrier()


def _written(folder: str) -> Counter[int]:
    """Bytes in the files of each rank."""
    found: Counter[int] = Counter()
    for name in os.listdir(folder):
        if match := _RANK.search(name):
            found[int(match[1] or match[2])] += os.path.getsize(f"{folder}/{name}")
    return found


def tables(options: report.Options) -> list[report.Table]:
    """One table; always of `WORLD_SIZE` ranks."""
    gib = min(options.gib, MOST_GIB)
    with options.folder() as store:
        measure.on_ranks(WORLD_SIZE, _on_rank, store, gib)
        written = {name: _written(f"{store}/{at}") for name, at in RIVALS.items()}
    rows = []
    for name, found in written.items():
        busiest, total = max(found.values()), found.total()
        share = f"{busiest / (total / WORLD_SIZE):.3f}"
        rows.append([name, f"{busiest / 1e6:,.1f}", f"{total / WORLD_SIZE / 1e6:,.1f}", share])
    columns = ("", "MB, busiest rank", "MB, even share", "ratio")
    title = f"Save of a replicated model, {gib:g} GiB, {WORLD_SIZE} ranks"
    return [report.Table(title, columns, rows)]


RIVALS = {"ckpt": "ours", "torch DCP": "dcp"}
"""The folder of each."""


if __name__ == "__main__":
    report.main(__doc__, tables)
