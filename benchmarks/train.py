"""A training step under each sharding runtime: ours, torch's FSDP2 and FSDP1, and DDP.

    python benchmarks/train.py --world-size 2
    python benchmarks/train.py

Three workloads: 8 transformer blocks of width 1,024 (105 M parameters) with 64 tokens a rank, where
communication is most of a step, and with 512; and 32 tiny units, where the fixed cost of a unit is.
Every runtime holds the same weights and sees the same data; the losses of the sharded ones are
compared bit for bit with FSDP2's. Memory is measured apart, one runtime in a process, with AdamW:
the highest resident memory of the steps over the memory before the model was built. Its floor is
what cannot be less: shards, their gradients and moments, two whole units, and what autograd saves.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import measure
import report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sharding

WARM_UP = 2
OURS, FSDP2, DDP = "ckpt fully_shard", "torch FSDP2", "torch DDP"


@dataclass(frozen=True, slots=True)
class Workload:
    """A model of equal blocks and the input of one rank."""

    name: str
    blocks: int
    width: int
    tokens: int
    against: str
    """The contestant that the others are divided by."""


WORKLOADS = (
    Workload("105 M parameters, 64 tokens a rank", 8, 1024, 64, FSDP2),
    Workload("105 M parameters, 512 tokens a rank", 8, 1024, 512, FSDP2),
    Workload("32 tiny units", 32, 32, 16, DDP),
)


class Block(nn.Module):
    """One transformer layer, one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention over all tokens, then the feed-forward part."""
        query, key, value = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _model(workload: Workload) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(workload.width) for _ in range(workload.blocks)))


def _ours(workload: Workload, blocks_a_unit: int = 1) -> nn.Module:
    model = _model(workload)
    for first in range(0, len(model), blocks_a_unit):
        sharding.fully_shard(list(model[first : first + blocks_a_unit]))
    return sharding.fully_shard(model)


def _our_wrapper(workload: Workload) -> nn.Module:
    model = _model(workload)
    for name, block in list(model.named_children()):
        model.add_module(name, sharding.FullyShardedDataParallel(block, use_orig_params=True))
    return sharding.FullyShardedDataParallel(model, use_orig_params=True)


def _fsdp2(workload: Workload) -> nn.Module:
    model = _model(workload)
    for block in model:
        torch_fully_shard(block)
    torch_fully_shard(model)
    return model


def _fsdp1(workload: Workload) -> nn.Module:
    model = _model(workload)
    cpu = torch.device("cpu")
    for name, block in list(model.named_children()):
        model.add_module(name, FullyShardedDataParallel(block, device_id=cpu, use_orig_params=True))
    return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True)


def _ddp(workload: Workload) -> nn.Module:
    return DistributedDataParallel(_model(workload))


RUNTIMES: dict[str, Callable[[Workload], nn.Module]] = {
    DDP: _ddp,
    "torch FSDP1": _fsdp1,
    FSDP2: _fsdp2,
    OURS: _ours,
    "ckpt FullyShardedDataParallel": _our_wrapper,
}


class _Training:
    """A model under one runtime, and what its losses were."""

    def __init__(
        self,
        workload: Workload,
        build: Callable[[Workload], nn.Module],
        optimizer: type[torch.optim.Optimizer],
    ) -> None:
        self.model = build(workload)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)  # type: ignore[call-arg]
        self.losses: list[float] = []
        self._workload = workload

    def step(self) -> None:
        """Forward, backward, optimizer, on data that depends on the step and the rank alone."""
        torch.manual_seed(1000 * len(self.losses) + dist.get_rank())
        inputs = torch.randn(1, self._workload.tokens, self._workload.width)
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def _times(workload: Workload, rounds: int) -> tuple[measure.Samples, dict[str, list[float]]]:
    """On one rank: the samples of every runtime and their losses."""
    trainings = {
        name: _Training(workload, build, torch.optim.SGD) for name, build in RUNTIMES.items()
    }
    contestants = {name: measure.Contestant(training.step) for name, training in trainings.items()}
    samples = measure.interleaved(contestants, rounds + WARM_UP)
    losses = {name: training.losses for name, training in trainings.items()}
    return {name: found[WARM_UP:] for name, found in samples.items()}, losses


def _peak(workload: Workload, build: Callable[[Workload], nn.Module]) -> int:
    """On one rank: bytes that training under one runtime takes at most."""

    def train() -> None:
        training = _Training(workload, build, torch.optim.AdamW)
        for _ in range(4):
            training.step()

    return measure.sampled(train).extra_bytes


def _least_memory(workload: Workload, world_size: int, blocks_a_unit: int = 1) -> int:
    """Bytes a rank that no fully sharded training step can do without."""
    model = _model(workload)
    parameters = sum(p.nbytes for p in model.parameters())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(torch.randn(1, workload.tokens, workload.width)).square().mean()
    whole_units = 2 * parameters * blocks_a_unit // workload.blocks
    del output
    return 4 * parameters // world_size + min(whole_units, parameters) + sum(saved.values())


def tables(world_size: int, rounds: int) -> list[report.Table]:
    """One table of times, and one of memory."""
    times, memory = [], []
    for workload in WORKLOADS:
        results = measure.on_ranks(world_size, _times, workload, rounds)
        samples = measure.joined(found for found, _ in results)
        losses = results[0][1]
        for name, found in samples.items():
            pairs = zip(found, samples[workload.against], strict=True)
            cpu = statistics.median(s.cpu_seconds for s in found)
            equal = "yes" if losses[name] == losses[FSDP2] else "no"
            times.append(
                [
                    workload.name,
                    name,
                    report.spread([sample.seconds for sample in found]),
                    report.spread([mine.seconds / other.seconds for mine, other in pairs]),
                    f"{cpu:.3g}",
                    equal,
                ]
            )
    workload = WORKLOADS[0]
    least = _least_memory(workload, world_size)
    for name, build in RUNTIMES.items():
        peak = max(measure.on_ranks(world_size, _peak, workload, build))
        memory.append([name, f"{peak / 2**20:,.0f}", f"{peak / least:.2f}"])
    units = []
    for blocks in (1, 2, 4, 8):
        build = partial(_ours, blocks_a_unit=blocks)
        peak = max(measure.on_ranks(world_size, _peak, workload, build))
        least = _least_memory(workload, world_size, blocks)
        units.append([str(blocks), f"{peak / 2**20:,.0f}", f"{peak / least:.2f}"])
    heads = (
        "workload",
        "",
        "seconds a step",
        "ratio",
        "CPU seconds",
        "losses of FSDP2, to the bit",
    )
    figures = ("MiB a rank over the memory before", "ratio to the floor")
    title = f"{workload.name}, AdamW, {world_size} ranks"
    return [
        report.Table(
            f"Training step, {world_size} ranks; ratio to FSDP2, for tiny units to DDP",
            heads,
            times,
        ),
        report.Table(f"Peak memory of training, {title}", ("", *figures), memory),
        report.Table(
            f"Peak memory of {OURS} by the size of units, {title}",
            ("blocks a unit", *figures),
            units,
        ),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=2, help="by default 2")
    parser.add_argument("--rounds", type=int, default=7, help="by default 7")
    given = parser.parse_args()
    print(report.origin(), end="\n\n", flush=True)
    for table in tables(given.world_size, given.rounds):
        print(table, flush=True)


if __name__ == "__main__":
    main()
