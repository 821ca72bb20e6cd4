"""Saving a fine-tune: a frozen model and small adapters that are trained, again and again.

    python benchmarks/finetune.py --store DIR

The model is workload A's without moments; beside every linear layer stand two matrices of rank 16
with theirs. Each save comes after all adapters have changed. The floor writes and flushes the bytes
that changed and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

import dcp
import floor
import measure
import report
import torch
import torch.distributed as dist
import workload
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt

RANK = 16
"""Of the adapters."""
WORLD_SIZE = 2


class Adapter(nn.Module):
    """Two matrices beside a linear layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)


class FineTuned(nn.Module):
    """A frozen transformer and an adapter for each of its linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = workload.Transformer(width).requires_grad_(False)
        layers = [m for m in self.frozen.modules() if isinstance(m, nn.Linear)]
        self.adapters = nn.ModuleList(map(Adapter, layers))


def build(gib: float) -> workload.Training:
    """The model on this rank; its frozen part has about so many GiB."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = FineTuned(workload.width_for(3 * gib))  # which counts two moments besides
    for block in model.frozen.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in model.parameters():
        workload.local(parameter).uniform_(-1, 1, generator=generator)
    for parameter in trained:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return workload.Training(model, optimizer)


def changing(training: workload.Training) -> Iterator[torch.Tensor]:
    """This rank's memory of all that a step of training changes."""
    for group in training.optimizer.param_groups:
        for parameter in group["params"]:
            yield workload.local(parameter)
            yield from map(workload.local, training.optimizer.state[parameter].values())


def _on_rank(store: str, gib: float, rounds: int) -> tuple[measure.Samples, int]:
    training = build(gib)
    changed = list(changing(training))
    state_dicts = training.state_dicts()
    buffers = [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in changed]
    rank = dist.get_rank()
    raw, whole, base, theirs = f"{store}/raw-{rank}", f"{store}/1", f"{store}/0", f"{store}/dcp"
    ckpt.save(base, training.state)

    def step() -> None:
        for path in (raw, *((whole, theirs) if rank == 0 else ())):
            report.remove(path)
        for tensor in changed:
            tensor.add_(1)

    held = [*changed, *map(workload.local, training.model.frozen.parameters())]

    def check() -> None:
        saved = [tensor.clone() for tensor in held]
        for tensor in held:
            tensor.zero_()
        ckpt.load(whole, training.state)
        if not all(map(torch.equal, held, saved)):
            raise RuntimeError("what was loaded is not what was saved")

    contestants = {
        report.FLOOR: measure.Contestant(lambda: floor.write(raw, buffers), step),
        "ckpt, base=": measure.Contestant(
            lambda: ckpt.save(whole, training.state, base=base), step, check
        ),
        "ckpt, all of it": measure.Contestant(
            lambda: ckpt.save(whole, training.state), step, check
        ),
        "torch DCP, all of it": measure.Contestant(lambda: dcp.save(theirs, state_dicts), step),
    }
    samples = measure.interleaved(contestants, rounds)
    return samples, sum(buffer.nbytes for buffer in buffers)


def tables(options: report.Options) -> list[report.Table]:
    """One table; the last column says how much was written for every byte that changed."""
    with options.folder() as store:
        ranks = measure.on_ranks(WORLD_SIZE, _on_rank, store, options.gib, options.rounds)
    changed = sum(nbytes for _, nbytes in ranks)
    rows = report.rows(
        str(WORLD_SIZE),
        measure.joined(samples for samples, _ in ranks),
        lambda found: f"{min(sample.written_bytes for sample in found) / changed:.3g}",
    )
    return [
        report.Table(
            f"Save of a fine-tune, {options.gib:g} GiB frozen, {changed / 2**20:.0f} MiB trained, "
            f"{options.where}",
            report.columns("W", "bytes written ÷ changed"),
            rows,
        )
    ]


if __name__ == "__main__":
    report.main(__doc__, tables)
